//! What the sampler is told.

use std::time::Duration;

use actix::{Message, Recipient};

use crate::actors::session::messages::TokenBatch;
use crate::admission::RequestId;
use crate::backend::StepOutput;
use crate::sampler::Tracked;

/// Follow a new resident; sent before the first step that contains it.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Track {
    /// Whom.
    pub request: RequestId,
    /// Its rules and its hub.
    pub tracked: Tracked<Recipient<TokenBatch>>,
}

/// The backend finished a step.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct StepCompleted {
    /// What it selected.
    pub output: StepOutput,
    /// When, on the engine's clock.
    pub at: Duration,
}

/// Let a request go; no step in flight contains it.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub struct Forget {
    /// Whom.
    pub request: RequestId,
    /// Its tokens that count.
    pub generated: u32,
}
