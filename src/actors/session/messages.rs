//! What the engine tells the sessions. One `TokenBatch` per HTTP worker and step, and one per scored slice of a prompt; the worker's
//! hub hands entries to its sessions.

use std::sync::Arc;

use actix::Message;

use crate::admission::RequestId;
use crate::backend::TokenLogprobs;

/// A generated token, end-of-sequence included. Counted tokens are all of them up to the end that the planner judged.
#[derive(Clone, Debug, PartialEq)]
pub struct GeneratedToken {
    /// Token id.
    pub id: u32,
    /// Index among the generated tokens, from 0.
    pub index: u32,
    /// When asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// How a sequence ended.
#[derive(Clone, Debug, PartialEq)]
pub enum SessionEnd {
    /// The last token delivered is an end-of-sequence token (it has no text).
    Eos,
    /// `max_new_tokens` reached.
    Length,
    /// It failed; what was generated before stays valid.
    Failed(SessionFailure),
}

/// Why a session fails, in the words its client sees.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SessionFailure {
    /// A logit was not finite.
    #[error(
        "the model produced a non-finite logit, as it will again for this request; change it, or check the model file"
    )]
    NonFinite,
    /// The engine is dead.
    #[error("the engine failed: {0}; send the request again when the server is back")]
    Engine(Arc<str>),
    /// The drain's deadline passed.
    #[error("the server shut down before the request finished; send it to another one, or again when it is back")]
    DrainDeadline,
    /// Submitted while draining.
    #[error("the server is shutting down; send the request to another one, or again when it is back")]
    Draining,
}

/// News for one session.
#[derive(Clone, Debug)]
pub struct TokenEntry {
    /// Whose.
    pub request: RequestId,
    /// Scores of the next tokens of a prompt that is scored, before any generated token.
    pub prompt_scores: Vec<TokenLogprobs>,
    /// New tokens in order; may be empty with an end.
    pub tokens: Vec<GeneratedToken>,
    /// Present once, last.
    pub end: Option<SessionEnd>,
}

/// All news of one step, or of one scored slice, for one HTTP worker.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct TokenBatch {
    /// Entries in row order.
    pub entries: Vec<TokenEntry>,
}
