//! One per HTTP worker: takes the engine's one message a step and hands its entries to the sessions of this worker.

use std::sync::Arc;

use actix::{Actor, Context, Handler};

use super::actor::News;
use super::messages::TokenBatch;
use super::registry::Registry;

/// The hub of one HTTP worker.
pub struct SessionHub {
    registry: Arc<Registry>,
}

impl SessionHub {
    /// A hub that looks sessions up in `registry`.
    pub fn new(registry: Arc<Registry>) -> Self {
        Self { registry }
    }
}

impl Actor for SessionHub {
    type Context = Context<Self>;
}

impl Handler<TokenBatch> for SessionHub {
    type Result = ();

    fn handle(&mut self, batch: TokenBatch, _: &mut Self::Context) {
        for entry in batch.entries {
            // A session that has ended left the registry: its client is gone or its answer was stopped, and what the engine
            // computed beyond that is discarded here.
            if let Some(session) = self.registry.session(entry.request) {
                session.do_send(News(entry));
            }
        }
    }
}
