//! One resident sequence: how far it is planned, how far it is known, and how it ended.

use std::time::Duration;

use crate::admission::{Ended, Outcome, RequestId, ValidRequest};
use crate::backend::{HostLogits, Input, Row, Rule, SamplingRow, SlotBinding, Start, Want};
use crate::pages::PageLease;

/// Positions of a slice that scores its prompt: bounds the logits of a step that travel to the host.
const SCORED_SLICE: usize = 32;

/// A request on its way into residence; every time on the engine's clock.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// The request.
    pub request: ValidRequest,
    /// When it came.
    pub submitted: Duration,
    /// When it got its pages.
    pub resident: Duration,
}

/// Why a resident ends from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The client is gone.
    Client,
    /// Its session found a stop string.
    Stop {
        /// The token that completed it; later ones do not count.
        token_index: u32,
    },
    /// The drain's deadline passed.
    DrainDeadline,
}

/// How the sampler saw a sequence end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowEnd {
    /// An end-of-sequence token.
    Eos,
    /// All tokens that were asked for.
    Length,
    /// A logit was not finite.
    NonFinite,
}

impl RowEnd {
    pub(super) fn outcome(self) -> Outcome {
        match self {
            RowEnd::Eos | RowEnd::Length => Outcome::Finished,
            RowEnd::NonFinite => Outcome::Failed,
        }
    }
}

/// A resident sequence. `planned` runs ahead of `known` by what is in flight.
#[derive(Debug)]
pub(super) struct Resident {
    request: ValidRequest,
    lease: PageLease,
    slot: u32,
    bound: bool,
    planned_prompt: usize,
    known_prompt: usize,
    planned_tokens: usize,
    known_tokens: usize,
    steps_in_flight: usize,
    ended: Option<Ended>,
}

impl Resident {
    pub fn new(request: ValidRequest, lease: PageLease, slot: u32) -> Self {
        Self {
            request,
            lease,
            slot,
            bound: false,
            planned_prompt: 0,
            known_prompt: 0,
            planned_tokens: 0,
            known_tokens: 0,
            steps_in_flight: 0,
            ended: None,
        }
    }

    pub fn id(&self) -> RequestId {
        self.request.id()
    }

    pub fn request(&self) -> &ValidRequest {
        &self.request
    }

    pub fn slot(&self) -> u32 {
        self.slot
    }

    fn prompt_len(&self) -> usize {
        self.request.spec().prompt.len()
    }

    /// Prompt tokens in no plan yet.
    pub fn prompt_left(&self) -> usize {
        self.prompt_len() - self.planned_prompt
    }

    /// Positions that its next slice has at most. A prompt that is scored keeps its last position for a slice of its own: the others
    /// yield logits, the last one selects.
    pub fn slice_cap(&self) -> usize {
        let left = self.prompt_left();
        if self.request.spec().score_prompt { left.saturating_sub(1).clamp(1, SCORED_SLICE) } else { left }
    }

    /// Whether its next slice yields logits of every position.
    pub fn scores_next(&self) -> bool {
        self.request.spec().score_prompt && self.prompt_left() > 1
    }

    /// Whether its prompt is not computed yet.
    pub fn prefilling(&self) -> bool {
        self.ended.is_none() && self.known_prompt < self.prompt_len()
    }

    /// Whether a decode row may be planned: the prompt is, and the known length end is not.
    pub fn decodes(&self) -> bool {
        self.ended.is_none() && self.prompt_left() == 0 && self.planned_tokens < self.request.spec().max_new_tokens
    }

    /// Its page table for life, on first use.
    pub fn bind(&mut self) -> Option<SlotBinding> {
        let first = !std::mem::replace(&mut self.bound, true);
        first.then(|| SlotBinding {
            slot: self.slot,
            request: self.id(),
            pages: self.lease.pages().to_vec(),
            adjust: self.request.spec().adjust.clone(),
        })
    }

    /// The next slice of the prompt, `len` positions; appends its tokens. The last slice selects the first token.
    pub fn slice(&mut self, len: usize, tokens: &mut Vec<u32>) -> Row {
        let start = self.planned_prompt;
        tokens.extend_from_slice(&self.request.spec().prompt[start..start + len]);
        self.planned_prompt += len;
        let want = match self.prompt_left() {
            0 => Want::Last,
            _ if self.request.spec().score_prompt => Want::All,
            _ => Want::None,
        };
        self.row(Start::Host(start as u32), len as u32, Input::Tokens, want)
    }

    /// One decode row: it starts at the device's own position and reads the device's own last token.
    pub fn decode(&mut self) -> Row {
        self.row(Start::Device, 1, Input::DeviceLast, Want::Last)
    }

    fn row(&mut self, start: Start, len: u32, input: Input, want: Want) -> Row {
        let spec = self.request.spec();
        // Nobody reads what the positions of a scored prompt select, so they get the rule that costs least.
        let (rule, logprobs, host_logits) = match want {
            Want::All => (Rule::Greedy, None, HostLogits::Yes),
            Want::Last | Want::None => (spec.rule, spec.logprobs, HostLogits::No),
        };
        let sampling =
            SamplingRow { rule, seed: spec.seed, token_index: self.planned_tokens as u32, choice: spec.choice };
        self.planned_tokens += usize::from(want == Want::Last);
        self.steps_in_flight += 1;
        Row { request: self.id(), slot: self.slot, start, len, input, want, sampling, logprobs, host_logits }
    }

    /// A step that contained `prompt` positions of its prompt has completed.
    pub fn retire_row(&mut self, prompt: usize) {
        self.steps_in_flight -= 1;
        self.known_prompt += prompt;
    }

    /// The sampler accepted `tokens` more; not counted after an end.
    pub fn accept(&mut self, tokens: u32) {
        if self.ended.is_none() {
            self.known_tokens += tokens as usize;
        }
    }

    /// Ends it, unless it has ended.
    pub fn end(&mut self, outcome: Outcome) {
        let generated = self.known_tokens as u32;
        self.ended.get_or_insert(Ended { outcome, generated });
    }

    /// Ends it at a cause from outside. A stop counts as finished; the tokens after it do not count.
    pub fn end_by(&mut self, cause: Cause) {
        let known = self.known_tokens as u32;
        let ended = match cause {
            Cause::Client => Ended { outcome: Outcome::Cancelled, generated: known },
            Cause::Stop { token_index } => {
                Ended { outcome: Outcome::Finished, generated: known.min(token_index.saturating_add(1)) }
            }
            Cause::DrainDeadline => Ended { outcome: Outcome::Failed, generated: known },
        };
        self.ended.get_or_insert(ended);
    }

    /// Its end, once no step in flight contains it.
    pub fn departs(&self) -> Option<Ended> {
        self.ended.filter(|_| self.steps_in_flight == 0)
    }
}
