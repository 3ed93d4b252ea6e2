//! The pure core of a session: news of its sequences become the response, stop strings are found, and it ends exactly once. It knows
//! neither actix nor the engine; what the engine must hear comes out as effects.

use super::messages::{SessionEnd, TokenEntry};
use super::output::{Output, SlowReader};
use crate::admission::RequestId;
use crate::protocol::choice::{ChoiceDecoder, ChoiceEnd, FinishReason};
use crate::protocol::errors::ApiError;
use crate::protocol::format::Usage;

/// What a session asks of the world around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionEffect {
    /// A stop string was complete with this token: the engine need not go on.
    StopHit {
        /// Whose.
        request: RequestId,
        /// Index of the token.
        token_index: u32,
    },
    /// Nobody waits for this sequence any more.
    Cancel(RequestId),
    /// No news of this sequence are wanted from now on.
    Forget(RequestId),
    /// The session is over; the text is for the log.
    Over(String),
}

struct Choice {
    request: RequestId,
    decoder: ChoiceDecoder,
    live: bool,
}

/// One response in the making.
pub struct SessionCore {
    choices: Vec<Choice>,
    output: Output,
    prompt_tokens: usize,
    over: bool,
}

impl SessionCore {
    /// A session of these sequences, one a choice; `prompt_tokens` counts each prompt once.
    pub fn new(
        choices: impl IntoIterator<Item = (RequestId, ChoiceDecoder)>,
        output: Output,
        prompt_tokens: usize,
    ) -> Self {
        let choices = choices.into_iter().map(|(request, decoder)| Choice { request, decoder, live: true }).collect();
        Self { choices, output, prompt_tokens, over: false }
    }

    /// Before the first token.
    pub fn open(&mut self, effects: &mut Vec<SessionEffect>) {
        if self.output.open().is_err() {
            self.cut(effects);
        }
    }

    /// News of one of the sequences; what concerns none of them, or one that has ended, is dropped.
    pub fn news(&mut self, entry: TokenEntry, effects: &mut Vec<SessionEffect>) {
        if self.take(entry, effects).is_err() {
            self.cut(effects);
        }
    }

    /// The response fails.
    pub fn fail(&mut self, error: &ApiError, effects: &mut Vec<SessionEffect>) {
        if !self.over {
            self.output.fail(error);
            self.leave(error.message.clone(), effects);
        }
    }

    /// The client is gone.
    pub fn client_gone(&mut self, effects: &mut Vec<SessionEffect>) {
        self.leave("cancelled: the client is gone".into(), effects);
    }

    /// The stream has been silent.
    pub fn keep_alive(&mut self, effects: &mut Vec<SessionEffect>) {
        if !self.over && self.output.keep_alive().is_err() {
            self.cut(effects);
        }
    }

    /// Frames sent so far.
    pub fn frames_sent(&self) -> u64 {
        self.output.frames_sent()
    }

    /// Whether the answer goes out in frames.
    pub fn streams(&self) -> bool {
        matches!(self.output, Output::Frames(_))
    }

    /// Whether it has ended.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Tokens so far.
    pub fn usage(&self) -> Usage {
        let completion_tokens = self.choices.iter().map(|c| c.decoder.tokens() as usize).sum();
        Usage { prompt_tokens: self.prompt_tokens, completion_tokens }
    }

    /// The sequences.
    pub fn requests(&self) -> impl ExactSizeIterator<Item = RequestId> + '_ {
        self.choices.iter().map(|c| c.request)
    }

    /// Ends at once, whatever the reason: the engine hears of what it need not compute any more.
    pub fn leave(&mut self, why: String, effects: &mut Vec<SessionEffect>) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        for choice in self.choices.iter_mut().filter(|c| c.live) {
            choice.live = false;
            effects.extend([SessionEffect::Forget(choice.request), SessionEffect::Cancel(choice.request)]);
        }
        effects.push(SessionEffect::Over(why));
    }

    fn cut(&mut self, effects: &mut Vec<SessionEffect>) {
        self.leave("cut: the client reads too slowly".into(), effects);
    }

    fn take(&mut self, entry: TokenEntry, effects: &mut Vec<SessionEffect>) -> Result<(), SlowReader> {
        let Some(at) = self.choices.iter().position(|c| c.request == entry.request && c.live) else { return Ok(()) };
        if !entry.prompt_scores.is_empty() {
            self.output.prompt(at, entry.prompt_scores)?;
        }
        for token in entry.tokens {
            let token_index = token.index;
            let delta = self.choices[at].decoder.push(token);
            let stop = delta.stop.clone();
            self.output.token(at, delta)?;
            if let Some(stop) = stop {
                effects.push(SessionEffect::StopHit { request: entry.request, token_index });
                let end = self.choices[at].decoder.stop(stop);
                return self.end(at, &end, effects);
            }
        }
        let reason = match entry.end {
            None => return Ok(()),
            Some(SessionEnd::Failed(failure)) => {
                // The engine has let this sequence go; only the others are cancelled.
                self.choices[at].live = false;
                effects.push(SessionEffect::Forget(entry.request));
                self.fail(&ApiError::from(&failure), effects);
                return Ok(());
            }
            Some(SessionEnd::Eos) => FinishReason::Eos,
            Some(SessionEnd::Length) => FinishReason::Length,
        };
        let end = self.choices[at].decoder.finish(reason);
        self.end(at, &end, effects)
    }

    fn end(&mut self, at: usize, end: &ChoiceEnd, effects: &mut Vec<SessionEffect>) -> Result<(), SlowReader> {
        self.choices[at].live = false;
        effects.push(SessionEffect::Forget(self.choices[at].request));
        self.output.end(at, end)?;
        if self.choices.iter().any(|c| c.live) {
            return Ok(());
        }
        let closed = self.output.close(self.usage());
        self.leave(end.reason.name().into(), effects);
        closed
    }
}
