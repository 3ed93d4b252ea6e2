//! Where a session's answer goes: one body at the end, or frames as they come, bounded for a client that reads slowly.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use super::actor::SessionGuard;
use crate::backend::TokenLogprobs;
use crate::protocol::choice::{Answer, ChoiceEnd, Delta, FinishReason};
use crate::protocol::errors::ApiError;
use crate::protocol::format::{Format, Usage};

/// What a unary handler waits for: the body.
pub type Outcome = Result<Bytes, ApiError>;

/// The response of one session.
pub enum Output {
    /// Collects whole answers into one body.
    Whole(Collector),
    /// Sends frames.
    Frames(Streamer),
}

/// Collects the answers of every choice.
pub struct Collector {
    format: Box<dyn Format>,
    answers: Vec<Answer>,
    done: Option<oneshot::Sender<Outcome>>,
}

/// Formats frames and sends them to the body.
pub struct Streamer {
    format: Box<dyn Format>,
    frames: Option<FrameSender>,
    sent: u64,
}

/// The client reads too slowly, or not at all: its answer is over the bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client reads too slowly; the stream is cut")]
pub struct SlowReader;

impl Output {
    /// An answer of `choices` choices as one body.
    pub fn whole(format: Box<dyn Format>, choices: usize) -> (Self, oneshot::Receiver<Outcome>) {
        let empty = Answer { prompt: Vec::new(), text: String::new(), tokens: Vec::new(), reason: FinishReason::Eos };
        let (done, receiver) = oneshot::channel();
        (Output::Whole(Collector { format, answers: vec![empty; choices], done: Some(done) }), receiver)
    }

    /// An answer as frames, of which at most `limit` bytes wait for the client.
    pub fn frames(format: Box<dyn Format>, limit: usize) -> (Self, FrameReceiver) {
        let (sender, receiver) = frame_channel(limit);
        (Output::Frames(Streamer { format, frames: Some(sender), sent: 0 }), receiver)
    }

    /// Frames sent so far. A token sends none while its text is held back.
    pub fn frames_sent(&self) -> u64 {
        match self {
            Output::Whole(_) => 0,
            Output::Frames(s) => s.sent,
        }
    }

    /// Before the first token.
    ///
    /// # Errors
    /// The bound is reached.
    pub fn open(&mut self) -> Result<(), SlowReader> {
        match self {
            Output::Whole(_) => Ok(()),
            Output::Frames(s) => {
                let frame = s.format.open();
                s.send(frame)
            }
        }
    }

    /// Scores of the next tokens of a choice's prompt.
    ///
    /// # Errors
    /// The bound is reached.
    pub fn prompt(&mut self, choice: usize, scores: Vec<TokenLogprobs>) -> Result<(), SlowReader> {
        match self {
            Output::Whole(c) => {
                c.answers[choice].prompt.extend(scores);
                Ok(())
            }
            Output::Frames(s) => {
                let frame = s.format.prompt(choice, scores);
                s.send(frame)
            }
        }
    }

    /// A token of a choice.
    ///
    /// # Errors
    /// The bound is reached.
    pub fn token(&mut self, choice: usize, delta: Delta) -> Result<(), SlowReader> {
        match self {
            Output::Whole(c) => {
                c.answers[choice].text.push_str(&delta.text);
                c.answers[choice].tokens.push(delta.token);
                Ok(())
            }
            Output::Frames(s) => {
                let frame = s.format.token(choice, &delta);
                s.send(frame)
            }
        }
    }

    /// The end of a choice.
    ///
    /// # Errors
    /// The bound is reached.
    pub fn end(&mut self, choice: usize, end: &ChoiceEnd) -> Result<(), SlowReader> {
        match self {
            Output::Whole(c) => {
                c.answers[choice].text.push_str(&end.tail);
                c.answers[choice].reason = end.reason.clone();
                Ok(())
            }
            Output::Frames(s) => {
                let frame = s.format.end(choice, end);
                s.send(Some(frame))
            }
        }
    }

    /// Every choice has ended.
    ///
    /// # Errors
    /// The bound is reached.
    pub fn close(&mut self, usage: Usage) -> Result<(), SlowReader> {
        match self {
            Output::Whole(c) => {
                let body = c.format.whole(&c.answers, usage);
                c.settle(Ok(body));
                Ok(())
            }
            Output::Frames(s) => {
                let frame = s.format.close(usage);
                let sent = s.send(frame);
                s.frames = None;
                sent
            }
        }
    }

    /// The response fails; a stream keeps what it has said.
    pub fn fail(&mut self, error: &ApiError) {
        match self {
            Output::Whole(c) => c.settle(Err(error.clone())),
            Output::Frames(s) => {
                let frame = s.format.failed(error);
                // A client too slow for its own failure is cut like any other.
                let _ = s.send(Some(frame));
                s.frames = None;
            }
        }
    }

    /// A sign of life for a stream that has been silent.
    ///
    /// # Errors
    /// The bound is reached.
    pub fn keep_alive(&mut self) -> Result<(), SlowReader> {
        match self {
            Output::Whole(_) => Ok(()),
            Output::Frames(s) => {
                let frame = s.format.keep_alive();
                s.send(Some(frame))
            }
        }
    }
}

impl Collector {
    fn settle(&mut self, outcome: Outcome) {
        if let Some(done) = self.done.take() {
            // The handler is gone when the client is.
            let _ = done.send(outcome);
        }
    }
}

impl Streamer {
    fn send(&mut self, frame: Option<Bytes>) -> Result<(), SlowReader> {
        let (Some(frame), Some(frames)) = (frame, &self.frames) else { return Ok(()) };
        let sent = frames.send(frame);
        match sent {
            Ok(()) => self.sent += 1,
            Err(_) => self.frames = None,
        }
        sent
    }
}

/// Session's end of a stream of frames.
pub struct FrameSender {
    frames: mpsc::UnboundedSender<Result<Bytes, SlowReader>>,
    waiting: Arc<AtomicUsize>,
    limit: usize,
}

/// Body's end of a stream of frames.
pub struct FrameReceiver {
    frames: mpsc::UnboundedReceiver<Result<Bytes, SlowReader>>,
    waiting: Arc<AtomicUsize>,
}

/// A channel whose bound is bytes: when a frame comes while more than `limit` wait, the stream is cut.
pub fn frame_channel(limit: usize) -> (FrameSender, FrameReceiver) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let waiting = Arc::new(AtomicUsize::new(0));
    (FrameSender { frames: sender, waiting: Arc::clone(&waiting), limit }, FrameReceiver { frames: receiver, waiting })
}

impl FrameSender {
    /// Queues a frame.
    ///
    /// # Errors
    /// The bound is reached; the body ends in an error after what was queued.
    pub fn send(&self, frame: Bytes) -> Result<(), SlowReader> {
        // What waited before counts, not this frame: a long frame alone is no sign of a slow reader.
        let waiting = self.waiting.fetch_add(frame.len(), Ordering::AcqRel);
        if waiting > self.limit {
            let _ = self.frames.send(Err(SlowReader));
            return Err(SlowReader);
        }
        // A receiver that is gone told the session so; nothing to do here.
        let _ = self.frames.send(Ok(frame));
        Ok(())
    }
}

impl FrameReceiver {
    /// The next frame; `None` at the end.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, SlowReader>>> {
        let item = self.frames.poll_recv(cx);
        if let Poll::Ready(Some(Ok(frame))) = &item {
            self.waiting.fetch_sub(frame.len(), Ordering::AcqRel);
        }
        item
    }
}

/// The body of a streaming response. Dropping it before its end cancels the request.
pub struct FrameBody {
    frames: FrameReceiver,
    _guard: SessionGuard,
}

impl FrameBody {
    /// A body fed by `frames` whose drop tells the session that the client is gone.
    pub fn new(frames: FrameReceiver, guard: SessionGuard) -> Self {
        Self { frames, _guard: guard }
    }
}

impl futures_util::Stream for FrameBody {
    type Item = Result<Bytes, SlowReader>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.frames.poll_next(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;

    fn next(receiver: &mut FrameReceiver) -> Poll<Option<Result<Bytes, SlowReader>>> {
        receiver.poll_next(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_client_that_reads_keeps_its_stream_however_long() {
        let (sender, mut receiver) = frame_channel(10);
        for _ in 0..1_000 {
            assert_eq!(sender.send(Bytes::from_static(b"12345678")), Ok(()));
            assert_eq!(next(&mut receiver), Poll::Ready(Some(Ok(Bytes::from_static(b"12345678")))));
        }
        drop(sender);
        assert_eq!(next(&mut receiver), Poll::Ready(None));
    }

    #[test]
    fn a_client_that_does_not_read_is_cut_at_the_bound() {
        let (sender, mut receiver) = frame_channel(7);
        assert_eq!(sender.send(Bytes::from_static(b"12345678")), Ok(()), "one frame always fits");
        assert_eq!(sender.send(Bytes::from_static(b"123")), Err(SlowReader));
        assert!(matches!(next(&mut receiver), Poll::Ready(Some(Ok(_)))));
        assert_eq!(next(&mut receiver), Poll::Ready(Some(Err(SlowReader))));
    }
}
