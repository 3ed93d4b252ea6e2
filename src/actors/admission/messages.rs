//! What the sessions and the other engine actors tell Admission.

use actix::{Message, Recipient};

use crate::actors::session::messages::TokenBatch;
use crate::admission::{QueuePermit, RequestId, ValidRequest};

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
