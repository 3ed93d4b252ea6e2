//! Which session a request belongs to, across all HTTP workers. A session registers here before it submits, so that no news can
//! arrive for an unknown request.

use actix::Addr;
use dashmap::DashMap;

use super::actor::Session;
use super::hub::SessionHub;
use crate::admission::RequestId;

/// Where a request's news go.
#[derive(Clone)]
pub struct Registered {
    /// The hub of the session's HTTP worker.
    pub hub: Addr<SessionHub>,
    /// The session.
    pub session: Addr<Session>,
}

/// Request → session, for the whole process.
#[derive(Default)]
pub struct Registry(DashMap<RequestId, Registered>);

impl Registry {
    /// Adds a request.
    pub fn insert(&self, request: RequestId, registered: Registered) {
        self.0.insert(request, registered);
    }

    /// The session of a request that has not ended.
    pub fn session(&self, request: RequestId) -> Option<Addr<Session>> {
        self.0.get(&request).map(|r| r.session.clone())
    }

    /// Forgets a request.
    pub fn remove(&self, request: RequestId) {
        self.0.remove(&request);
    }

    /// Requests whose session has not ended.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether every session has ended.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
