//! The HTTP side: what all workers share, the routes, and the life of the process from listening to the end of the drain.

mod anthropic;
mod connection;
mod generate;
mod intake;
mod listen;
mod models;
mod openai;
mod openapi;
mod respond;
mod run;
mod socket;
mod status;
mod text;
mod tls;
mod tools;

use std::cell::OnceCell;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use actix::{Actor, Addr};
use tokio::sync::Notify;

use crate::actors::session::messages::SessionFailure;
use crate::actors::session::{Registry, SessionHub};
use crate::actors::topology::EngineHandle;
use crate::config::Config;
use crate::model::chat_template::ChatTemplate;
use crate::model::tokenizer::{SpecialText, Tokenizer};
use crate::protocol::choice::{Pieces, Vocabulary};
use crate::protocol::errors::{ApiError, Code, beginning};
use crate::telemetry::metrics::Metrics;

pub use run::{Ending, check, serve};

/// What every HTTP worker shares.
pub struct Service {
    config: Config,
    engine: EngineHandle,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    registry: Arc<Registry>,
    metrics: Metrics,
    draining: AtomicBool,
    stop: Notify,
    /// Unix time of the start, seconds.
    created: u64,
    /// Tells the requests of this process from those of others, in public ids.
    instance: u32,
    requests: AtomicU64,
}

impl Service {
    /// A service over a running engine.
    pub fn new(config: Config, engine: EngineHandle, tokenizer: Tokenizer, template: ChatTemplate) -> Self {
        Self {
            config,
            engine,
            tokenizer,
            template,
            registry: Arc::default(),
            metrics: Metrics::new(),
            draining: AtomicBool::new(false),
            stop: Notify::new(),
            created: unix_seconds(),
            instance: random_bits() as u32,
            requests: AtomicU64::new(0),
        }
    }

    /// Asks `serve` to drain and return, as a signal does.
    pub fn stop(&self) {
        self.stop.notify_one();
    }

    /// Whether new work is taken.
    ///
    /// # Errors
    /// The server drains, or its engine is dead.
    fn accepting(&self) -> Result<(), ApiError> {
        if let Some(reason) = self.engine.fatal().borrow().as_ref() {
            return Err(ApiError::from(&SessionFailure::Engine(Arc::clone(reason))));
        }
        if self.draining.load(Ordering::Acquire) {
            return Err(ApiError::from(&SessionFailure::Draining));
        }
        Ok(())
    }

    /// What a public id such as `chatcmpl-9f3a5c1200000007` has after its prefix; another one at each call.
    fn serial(&self) -> String {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        format!("{:08x}{number:08x}", self.instance)
    }

    /// # Errors
    /// The model named is not the one that is served.
    fn check_model(&self, named: &str) -> Result<(), ApiError> {
        if named == self.config.model.id {
            return Ok(());
        }
        let (named, own) = (beginning(named), &self.config.model.id);
        let text = format!("the model `{named}` does not exist; this server has `{own}`");
        Err(ApiError::about(Code::ModelNotFound, "model", text))
    }
}

/// The hub of one HTTP worker, started on that worker's thread by its first request.
#[derive(Default)]
struct WorkerHub(OnceCell<Addr<SessionHub>>);

impl WorkerHub {
    fn address(&self, service: &Service) -> &Addr<SessionHub> {
        self.0.get_or_init(|| SessionHub::new(Arc::clone(&service.registry)).start())
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// 64 bits that differ from call to call; the standard library's own source of random hash keys.
fn random_bits() -> u64 {
    RandomState::new().build_hasher().finish()
}

impl Pieces for crate::model::detokenizer::Detokenizer {
    fn push(&mut self, id: u32) -> String {
        self.push(id)
    }

    fn finish(&mut self) -> String {
        self.finish()
    }
}

impl Vocabulary for Tokenizer {
    fn token_text(&self, id: u32) -> String {
        self.decode(&[id], SpecialText::Show)
    }

    fn token_bytes(&self, id: u32) -> Vec<u8> {
        Tokenizer::token_bytes(self, id).unwrap_or_default()
    }

    fn is_special(&self, id: u32) -> bool {
        Tokenizer::is_special(self, id)
    }
}
