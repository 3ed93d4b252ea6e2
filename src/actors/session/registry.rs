//! Which session a request belongs to, across all HTTP workers. A session registers here before it submits, so that no news can
//! arrive for an unknown request.

use actix::Addr;
use dashmap::DashMap;

use super::actor::Session;
use crate::admission::RequestId;

/// Request → session, for the whole process.
#[derive(Default)]
pub struct Registry(DashMap<RequestId, Addr<Session>>);

impl Registry {
    /// Adds a request.
    pub fn insert(&self, request: RequestId, session: Addr<Session>) {
        self.0.insert(request, session);
    }

    /// The session of a request that has not ended.
    pub fn session(&self, request: RequestId) -> Option<Addr<Session>> {
        self.0.get(&request).map(|session| session.clone())
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
