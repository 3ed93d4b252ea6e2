//! What the planner is told.

use actix::{Message, Recipient};

use crate::actors::session::messages::TokenBatch;
use crate::admission::RequestId;
use crate::pages::PageLease;
use crate::planner::{Cause, Retired, Sequence};

/// A new resident.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Enqueue {
    /// The sequence.
    pub sequence: Sequence,
    /// Its pages for life.
    pub lease: PageLease,
    /// Hub of its session.
    pub hub: Recipient<TokenBatch>,
}

/// Admission has nothing more to enqueue without news from outside: plan now.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub struct Settled;

/// End a resident. Idempotent; the first end wins.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub struct CancelResident {
    /// Whom.
    pub request: RequestId,
    /// Why.
    pub cause: Cause,
}

/// A step has completed and is understood.
#[derive(Message, Clone, Debug)]
#[rtype(result = "()")]
pub struct StepRetired(pub Retired);

/// A slice of a prompt is scored: its scores are in the mail of its session's hub, and its logits are gone. Once for every slice that
/// `Retired::scoring` named, also when the request has ended.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub struct Scored {
    /// Whose.
    pub request: RequestId,
    /// Positions of the slice.
    pub positions: u32,
}

/// The engine is dead: let every resident go and plan nothing more.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub struct Close;
