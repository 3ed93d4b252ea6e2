//! The one interface between the engine and whatever computes: steps of rows go in, tokens come out.
//!
//! A backend owns weights, KV pool, slot state and streams. It never sees a request twice under two names and never knows why a
//! row is in a step. Two steps may be in flight; they complete in the order of submission.

#[forbid(unsafe_code)]
pub mod counts;
pub mod cpu;
pub mod cuda;
#[forbid(unsafe_code)]
pub mod driver;
#[forbid(unsafe_code)]
pub mod step;
#[forbid(unsafe_code)]
pub mod validate;

use std::sync::Arc;

pub use counts::{DeviceCounts, GraphClass, GraphCounts};
pub use step::{
    Adjust, HostLogits, Input, LogprobsWanted, Row, RowOutput, Rule, SamplingRow, SlotBinding, Start, Step, StepOutput,
    StepTiming, TokenLogprobs, Want,
};
pub use validate::{PlanError, StepLimits, StepValidator, ValidStep};

/// Most steps a backend holds at once: one that computes and one that waits.
pub const STEPS_IN_FLIGHT: usize = 2;

/// What a backend is and can take; fixed for its life.
#[derive(Clone, Debug)]
pub struct Facts {
    /// For people: "cpu (avx512-vnni, 2 threads)" or the GPU's name.
    pub device: String,
    /// Physical KV pages.
    pub pages: usize,
    /// Positions per page.
    pub page_tokens: usize,
    /// Slots: sequences that can be resident.
    pub slots: usize,
    /// Most token rows in one step, decode rows included.
    pub max_step_tokens: usize,
    /// Most positions in one step whose logits the host reads, for log-probabilities or as they are.
    pub host_logit_rows: usize,
    /// Longest sequence in tokens.
    pub context: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Bytes held by weights.
    pub weight_bytes: u64,
    /// Bytes held by the KV pool.
    pub kv_bytes: u64,
}

impl Facts {
    /// The bounds that every step for this backend is checked against.
    pub fn step_limits(&self) -> StepLimits {
        StepLimits {
            pages: self.pages,
            page_tokens: self.page_tokens,
            slots: self.slots,
            max_step_tokens: self.max_step_tokens,
            host_logit_rows: self.host_logit_rows,
            context: self.context,
            vocab: self.vocab,
        }
    }
}

/// Which attention kernel computes (`attention.variant`); all give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AttentionVariant {
    /// The fastest that the backend has.
    #[default]
    Auto,
    /// The plainest: on the CPU the scalar one, whatever the instruction set of the other kernels.
    Reference,
}

impl AttentionVariant {
    /// As the configuration and /health name it.
    pub const fn name(self) -> &'static str {
        match self {
            AttentionVariant::Auto => "auto",
            AttentionVariant::Reference => "reference",
        }
    }
}

/// How the executor learns that a step has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// The executor asks `poll` while something is in flight (CUDA).
    Polled,
    /// The backend calls its notifier from its own thread, then `poll` has the output (CPU).
    Notified,
}

/// Why a backend cannot go on. Every variant is fatal to the engine except at construction.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The backend cannot be made: memory, geometry, driver.
    #[error("cannot start the {backend} backend: {reason}")]
    Unavailable {
        /// "cpu" or "cuda".
        backend: &'static str,
        /// What was missing, and what to do.
        reason: String,
    },
    /// The device or a compute thread failed.
    #[error("{backend} step failed: {reason}")]
    Failed {
        /// "cpu" or "cuda".
        backend: &'static str,
        /// What was reported.
        reason: String,
    },
    /// More than `STEPS_IN_FLIGHT` steps were submitted.
    #[error("a step was submitted while {STEPS_IN_FLIGHT} are in flight")]
    Overrun,
}

/// Computes steps. Made and used on one thread; `submit` and `poll` never block.
pub trait Backend {
    /// What this backend is and can take.
    fn facts(&self) -> &Facts;

    /// What it has counted since its start; the same numbers ride in every step's timing.
    fn counts(&self) -> DeviceCounts {
        DeviceCounts::default()
    }

    /// Whether the executor must poll.
    fn completion(&self) -> Completion;

    /// Gives a `Notified` backend the function that it calls, from any thread, after each finished step.
    fn on_completion(&mut self, notify: Arc<dyn Fn() + Send + Sync>);

    /// Queues one step.
    ///
    /// # Errors
    /// `Overrun` above `STEPS_IN_FLIGHT`, `Failed` when the device is lost.
    fn submit(&mut self, step: ValidStep) -> Result<(), BackendError>;

    /// Takes the oldest finished step, if one is done.
    ///
    /// # Errors
    /// `Failed` when a step died; the backend is unusable from then on.
    fn poll(&mut self) -> Result<Option<StepOutput>, BackendError>;
}

/// Makes a backend on the engine's thread (graph objects stay on the thread that made them).
pub type BackendFactory = Box<dyn FnOnce() -> Result<Box<dyn Backend>, BackendError> + Send>;
