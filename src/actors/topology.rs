//! Starts the engine arbiter and its five actors, and is the only file that knows every address.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};

use crate::actors::admission::messages::Submit;
use crate::admission::{FinishedSample, Limits, QueuePermit, QueuePermits, RequestId, RequestIds, Snapshot};
use crate::backend::{BackendError, BackendFactory, Facts};

/// What the engine is started with; every value checked by the configuration.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Resident requests at most (`limits.max_batch`).
    pub max_batch: usize,
    /// Waiting requests at most (`limits.max_queue`).
    pub max_queue: usize,
    /// Prompt tokens per prefill plan (`prefill.token_budget`).
    pub token_budget: usize,
    /// Prompt tokens per request and plan (`prefill.chunk_cap`); absent is off.
    pub chunk_cap: Option<usize>,
    /// Requests per prefill plan (`prefill.max_requests`).
    pub prefill_max_requests: usize,
    /// Whether a prefill plan may hold several requests (`prefill.packing`); off is one request a plan.
    pub packing: bool,
    /// `limits.max_prompt_tokens`.
    pub max_prompt_tokens: usize,
    /// `limits.max_new_tokens`.
    pub max_new_tokens: usize,
    /// A step that takes longer is fatal (`executor.step_timeout_ms`).
    pub step_timeout: Duration,
    /// CPU of the engine thread (`executor.pin`).
    pub pin: Option<usize>,
    /// JSON lines, one per step (`telemetry.step_trace`).
    pub step_trace: Option<std::path::PathBuf>,
}

/// Why the engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The backend refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The engine thread could not be made or ended at once.
    #[error("the engine thread did not start: {0}")]
    Thread(String),
}

/// Finished samples not yet taken into the histograms, under the same lock as the snapshot: whoever renders takes both at once.
pub struct Published {
    /// The latest account.
    pub snapshot: Arc<Snapshot>,
    /// Samples of every request that the snapshot counts as finished and no earlier `take_published` returned.
    pub samples: Vec<FinishedSample>,
}

/// What HTTP workers hold of the engine: cheap to clone, safe to use from any thread.
#[derive(Clone)]
pub struct EngineHandle {
    // The owner of this file adds the address of Admission and the board that it publishes on.
    ids: Arc<RequestIds>,
    permits: QueuePermits,
    limits: Arc<Limits>,
    facts: Arc<Facts>,
    fatal: watch::Receiver<Option<Arc<str>>>,
}

impl EngineHandle {
    /// A fresh request id; register the session under it before `submit`.
    pub fn next_id(&self) -> RequestId {
        self.ids.next()
    }

    /// A place in the waiting queue, or none: answer 429 at once.
    pub fn try_permit(&self) -> Option<QueuePermit> {
        self.permits.try_take()
    }

    /// The queue's counters.
    pub fn permits(&self) -> &QueuePermits {
        &self.permits
    }

    /// Bounds for `ValidRequest::new`.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The backend.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Sends a request to Admission. A dead engine answers through the hub.
    pub fn submit(&self, _submit: Submit) {
        unimplemented!("engine")
    }

    /// Ends a request: the client is gone. Idempotent.
    pub fn cancel(&self, _request: RequestId) {
        unimplemented!("engine")
    }

    /// Ends a request at a stop string. Idempotent.
    pub fn stop_hit(&self, _request: RequestId, _token_index: u32) {
        unimplemented!("engine")
    }

    /// The latest published account.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        unimplemented!("engine")
    }

    /// The latest account together with the samples that belong to it; each sample is returned once.
    pub fn take_published(&self) -> Published {
        unimplemented!("engine")
    }

    /// Turns to the error's text once, when the engine dies; every session watches it.
    pub fn fatal(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.fatal.clone()
    }

    /// Refuses new work from now on and completes when nothing is live; at the deadline what is left fails in the typed way.
    pub fn drain(&self, _deadline: Duration) -> oneshot::Receiver<()> {
        unimplemented!("engine")
    }
}

/// The running engine; dropping it stops the arbiter and joins its thread.
pub struct Engine {
    handle: EngineHandle,
}

impl Engine {
    /// Makes the backend on a new thread and starts the actors there.
    ///
    /// # Errors
    /// What the backend said, or why the thread did not start.
    pub fn start(_config: EngineConfig, _backend: BackendFactory) -> Result<Self, EngineError> {
        unimplemented!("engine")
    }

    /// For the HTTP workers.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }
}
