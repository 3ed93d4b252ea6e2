//! One answer while it arrives: bytes → body → events → record. Decides nothing about connections.

use std::time::Instant;

use super::dialect::{Capture, Dialect, Meaning, interpret};
use super::http1::{HttpError, ResponseDecoder};
use super::job::{CancelPoint, Job, Milestone, Outcome, Output, Record};
use crate::protocol::events::{SseEvent, SseParser};

/// Bytes kept of an error's body.
const ERROR_BODY_BYTES_MAX: usize = 400;

/// Why an exchange on one connection stopped.
pub(super) enum Stop {
    /// The request is over.
    Ended,
    /// A kept-alive connection was closed before a byte of the answer: worth a second try on a new one.
    Stale,
}

/// What the caller does next.
pub(super) enum Progress {
    /// Reads on.
    More,
    /// Hangs up, as planned.
    Cancel,
    /// Takes the record; the connection may serve again.
    Done {
        /// Whether it may.
        reusable: bool,
    },
    /// Gives up.
    Broken(HttpError),
}

/// The answer of one request while it arrives: bytes → body → events → record.
pub(super) struct Answer {
    http: ResponseDecoder,
    sse: SseParser,
    reading: Reading,
    record: Record,
}

/// What the events have said so far; apart from the record's identity so that it can be filled while the decoders are borrowed.
struct Reading {
    dialect: Dialect,
    capture: Capture,
    sent: Instant,
    now: Instant,
    event_us: Vec<u32>,
    output: Output,
    prompt_tokens: Option<u32>,
    output_tokens: Option<u32>,
    done: bool,
    error: Option<String>,
    error_body: Vec<u8>,
    milestone: Option<Milestone>,
    cancel_at: Option<u32>,
}

impl Answer {
    /// An answer of which nothing has come.
    pub fn new(job: &Job, sent: Instant, capture: Capture) -> Self {
        let cancel_at = match job.cancel {
            Some(CancelPoint::AfterTokens(tokens)) => Some(tokens),
            _ => None,
        };
        let reading = Reading {
            dialect: job.wire.dialect,
            capture,
            sent,
            now: sent,
            event_us: Vec::with_capacity(64),
            output: Output::default(),
            prompt_tokens: None,
            output_tokens: None,
            done: false,
            error: None,
            error_body: Vec::new(),
            milestone: job.milestone.clone(),
            cancel_at,
        };
        Self { http: ResponseDecoder::new(), sse: SseParser::new(), reading, record: Record::begun(job, sent) }
    }

    /// Takes bytes that arrived at `now`.
    pub fn take(&mut self, bytes: &[u8], now: Instant) -> Progress {
        self.record.bytes_received += bytes.len() as u64;
        self.reading.now = now;
        let (sse, reading) = (&mut self.sse, &mut self.reading);
        let fed = self.http.feed(bytes, &mut |status, body| {
            if status == 200 {
                sse.feed(body, &mut |event| reading.event(event));
            } else {
                let room = ERROR_BODY_BYTES_MAX.saturating_sub(reading.error_body.len());
                reading.error_body.extend_from_slice(&body[..body.len().min(room)]);
            }
        });
        if let Err(e) = fed {
            return Progress::Broken(e);
        }
        if self.reading.cancel_at.is_some_and(|at| self.reading.event_us.len() >= at as usize) {
            return Progress::Cancel;
        }
        if !self.http.is_done() {
            return Progress::More;
        }
        Progress::Done { reusable: self.http.head().is_some_and(|h| !h.closes) }
    }

    /// The server closed the connection.
    pub fn closed(mut self) -> (Record, Stop) {
        if self.http.end_of_input() {
            return (self.finish(), Stop::Ended);
        }
        let stop = if self.record.bytes_received == 0 { Stop::Stale } else { Stop::Ended };
        (self.fail("the connection closed before the answer was complete".into()), stop)
    }

    /// The response is complete.
    pub fn finish(mut self) -> Record {
        let head = self.http.head().cloned().unwrap_or_default();
        self.record.has_retry_after = head.retry_after.is_some();
        let outcome = match (head.status, self.reading.error.take()) {
            (429 | 503 | 529, _) => Outcome::Refused { status: head.status },
            (200, None) if self.reading.done => Outcome::Completed,
            (200, None) => Outcome::Failed { message: "the stream ended without its last event".into() },
            (200, Some(message)) => Outcome::Failed { message },
            (status, _) => {
                let body = String::from_utf8_lossy(&self.reading.error_body);
                Outcome::Failed { message: format!("status {status}: {body}") }
            }
        };
        self.end(outcome)
    }

    /// It failed.
    pub fn fail(self, message: String) -> Record {
        self.end(Outcome::Failed { message })
    }

    /// This client hung up as planned.
    pub fn cancelled(self) -> Record {
        self.end(Outcome::Cancelled)
    }

    /// Whether a byte of the answer has come.
    pub fn has_begun(&self) -> bool {
        self.record.bytes_received > 0
    }

    fn end(mut self, outcome: Outcome) -> Record {
        let events = u32::try_from(self.reading.event_us.len()).unwrap_or(u32::MAX);
        self.record.ended = Instant::now();
        self.record.outcome = outcome;
        self.record.event_us = self.reading.event_us;
        self.record.output = self.reading.output;
        self.record.prompt_tokens = self.reading.prompt_tokens;
        self.record.output_tokens = self.reading.output_tokens.unwrap_or(events);
        self.record
    }
}

impl Reading {
    fn event(&mut self, event: SseEvent<'_>) {
        match interpret(self.dialect, self.capture, event) {
            Meaning::Token { id, text } => self.token(id, &text),
            Meaning::Usage { prompt, output } => {
                self.prompt_tokens = prompt.or(self.prompt_tokens);
                self.output_tokens = output.or(self.output_tokens);
            }
            Meaning::Done { text, output } => {
                self.done = true;
                self.output_tokens = output.or(self.output_tokens);
                self.output.text.push_str(&text);
            }
            Meaning::Error(message) => self.error = Some(message),
            Meaning::Nothing => {}
        }
    }

    fn token(&mut self, id: Option<u32>, text: &str) {
        let after = self.now.saturating_duration_since(self.sent).as_micros();
        self.event_us.push(u32::try_from(after).unwrap_or(u32::MAX));
        if self.capture == Capture::Outputs {
            self.output.token_ids.extend(id);
            self.output.text.push_str(text);
        }
        if self.milestone.as_ref().is_some_and(|m| m.token as usize == self.event_us.len())
            && let Some(milestone) = self.milestone.take()
        {
            let _ = milestone.tell.send(self.now); // nobody waits any more
        }
    }
}
