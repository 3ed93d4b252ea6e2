//! What the sessions and the other engine actors tell Admission.

use std::sync::Arc;
use std::time::Duration;

use actix::{Message, Recipient};
use tokio::sync::oneshot;

use crate::actors::session::messages::TokenBatch;
use crate::admission::{Ended, QueuePermit, RequestId, StepCounters, Timing, ValidRequest};
use crate::pages::PageLease;

/// A checked request with its queue permit; its session is already registered with the hub.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Submit {
    /// The request.
    pub request: ValidRequest,
    /// Taken before this message was sent; returns at `Enqueue` or at the waiting request's end.
    pub permit: QueuePermit,
    /// Hub of the HTTP worker that holds the session.
    pub hub: Recipient<TokenBatch>,
}

/// The client went away or asked for an end. Idempotent.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub struct Cancel {
    /// Whose.
    pub request: RequestId,
}

/// The session found a stop string that token `token_index` completed. Idempotent.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub struct StopHit {
    /// Whose.
    pub request: RequestId,
    /// Index among generated tokens; later ones are discarded and not counted.
    pub token_index: u32,
}

/// The pages of a request's whole life.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Reserved {
    /// They go home when it drops.
    pub lease: PageLease,
}

/// Too few pages are free for this request.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub struct Insufficient {
    /// Whose reservation.
    pub request: RequestId,
}

/// The pages that this request had are free again.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub struct PagesFreed {
    /// Whose they were.
    pub request: RequestId,
}

/// The planner let a resident go; its credit is free once its pages and its timing are in.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub struct RequestEnded {
    /// Whose end.
    pub request: RequestId,
    /// How.
    pub ended: Ended,
}

/// The sampler let a request go.
#[derive(Message, Clone, Debug)]
#[rtype(result = "()")]
pub struct Measured {
    /// Whose times.
    pub request: RequestId,
    /// Of the tokens that count.
    pub timing: Timing,
}

/// What the steps did so far.
#[derive(Message, Clone, Debug)]
#[rtype(result = "()")]
pub struct Progressed {
    /// Since the start.
    pub steps: StepCounters,
    /// Residents whose prompt is not computed.
    pub prefilling: u32,
}

/// Take no new work; fail what is left at the deadline.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Drain {
    /// Completes when nothing is live.
    pub done: oneshot::Sender<()>,
    /// From now.
    pub deadline: Duration,
}

/// The engine is dead.
#[derive(Message, Clone, Debug)]
#[rtype(result = "()")]
pub struct EngineFailed {
    /// What happened, for people.
    pub reason: Arc<str>,
}
