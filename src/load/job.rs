//! What the client is given and what it gives back: a prepared request with its moment, and the record of what was seen of it. Pure.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Instant;

use serde::Serialize;

use super::dialect::Dialect;

/// How many tokens an answer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// So many: the request names them and says `ignore_eos`, which the target takes.
    Exactly(u32),
    /// So many or fewer: the model may end it, at once even.
    AtMost(u32),
}

impl Length {
    /// The most.
    pub const fn most(self) -> u32 {
        match self {
            Length::Exactly(tokens) | Length::AtMost(tokens) => tokens,
        }
    }
}

/// A request ready to be written.
#[derive(Clone, Debug)]
pub struct Wire {
    /// How its stream is read.
    pub dialect: Dialect,
    /// The whole HTTP request.
    pub bytes: Arc<[u8]>,
    /// Names the request in an oracle; empty when its answer is drawn without a seed.
    pub key: Arc<str>,
    /// What its answer must have.
    pub length: Length,
}

impl Wire {
    /// Takes rendered bytes.
    pub fn new(dialect: Dialect, bytes: Vec<u8>, key: String, length: Length) -> Self {
        Self { dialect, bytes: bytes.into(), key: key.into(), length }
    }
}

/// When a request is cancelled by closing its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CancelPoint {
    /// As soon as the request is written.
    AtOnce,
    /// So many milliseconds after it was written: in the queue or in prefill.
    AfterMs(u32),
    /// When so many tokens have come.
    AfterTokens(u32),
}

/// A wish to be told when a stream has reached a token.
#[derive(Clone, Debug)]
pub struct Milestone {
    /// Tokens received.
    pub token: u32,
    /// Gets one message then, and none if the stream ends before.
    pub tell: mpsc::Sender<Instant>,
}

/// One request to send.
#[derive(Clone, Debug)]
pub struct Job {
    /// Comes back in the record.
    pub id: usize,
    /// The request.
    pub wire: Wire,
    /// When it should have been sent.
    pub due: Instant,
    /// Whether and when it is cancelled.
    pub cancel: Option<CancelPoint>,
    /// Whether someone waits for one of its tokens.
    pub milestone: Option<Milestone>,
}

impl Job {
    /// A request that is due now.
    pub fn now(id: usize, wire: Wire) -> Self {
        Self { id, wire, due: Instant::now(), cancel: None, milestone: None }
    }
}

/// How a request ended, as the client saw it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Outcome {
    /// The stream ended as its dialect ends streams.
    Completed,
    /// Refused for want of room: 429, 529, or a 503 that says so (`Retry-After`, or a code of overload or drain).
    Refused {
        /// The status.
        status: u16,
    },
    /// Cancelled by this client as planned.
    Cancelled,
    /// Anything else.
    Failed {
        /// What happened.
        message: String,
    },
}

/// What a request's answer was, for an oracle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output {
    /// Token ids, on the native surface.
    pub token_ids: Vec<u32>,
    /// The text of all pieces.
    pub text: String,
}

/// Everything that was seen of one request.
#[derive(Clone, Debug)]
pub struct Record {
    /// The job's id.
    pub id: usize,
    /// Its dialect.
    pub dialect: Dialect,
    /// When it should have been sent.
    pub due: Instant,
    /// When its bytes were handed to the socket.
    pub sent: Instant,
    /// When the client was done with it.
    pub ended: Instant,
    /// How it ended.
    pub outcome: Outcome,
    /// The status of a response that arrived whole.
    pub status: Option<u16>,
    /// The server said when to retry.
    pub has_retry_after: bool,
    /// Arrival of each output event, microseconds after `sent`.
    pub event_us: Vec<u32>,
    /// Prompt tokens as the server counts them.
    pub prompt_tokens: Option<u32>,
    /// Generated tokens: the server's count where it reports one, output events otherwise.
    pub output_tokens: u32,
    /// The answer, under `Capture::Outputs`.
    pub output: Output,
    /// Bytes received.
    pub bytes_received: u64,
    /// It was sent a second time because the server had closed the kept-alive connection before a byte of the answer.
    pub reconnected: bool,
    /// The oracle's name for it.
    pub key: Arc<str>,
}

impl Record {
    /// A request that got nowhere.
    pub fn failed(id: usize, message: String) -> Self {
        let now = Instant::now();
        let job = Job::now(id, Wire::new(Dialect::Native, Vec::new(), String::new(), Length::AtMost(0)));
        Self { outcome: Outcome::Failed { message }, ..Self::begun(&job, now) }
    }

    /// A request whose bytes are being handed to the socket.
    pub(super) fn begun(job: &Job, sent: Instant) -> Self {
        Self {
            id: job.id,
            dialect: job.wire.dialect,
            due: job.due,
            sent,
            ended: sent,
            outcome: Outcome::Completed,
            status: None,
            has_retry_after: false,
            event_us: Vec::new(),
            prompt_tokens: None,
            output_tokens: 0,
            output: Output::default(),
            bytes_received: 0,
            reconnected: false,
            key: Arc::clone(&job.wire.key),
        }
    }
}
