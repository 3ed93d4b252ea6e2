//! Turns the output of a step into what the planner and the sessions must know.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::stopwatch::Stopwatch;
use crate::actors::session::messages::{GeneratedToken, SessionEnd, SessionFailure, TokenEntry};
use crate::admission::{RequestId, Timing};
use crate::backend::{RowOutput, StepOutput};
use crate::planner::{Retired, RowEnd, Sequence};
use crate::scorer::{ScoredSlice, Targets};

/// One tracked sequence. `H` is the address of its session's hub.
#[derive(Debug)]
pub struct Tracked<H> {
    hub: H,
    eos: Arc<[u32]>,
    max_new_tokens: usize,
    /// Of a prompt that is scored.
    targets: Option<Targets>,
    generated: u32,
    over: bool,
    stopwatch: Stopwatch,
}

impl<H: Clone> Tracked<H> {
    /// A sequence that has generated nothing.
    pub fn new(sequence: &Sequence, hub: H) -> Self {
        let spec = sequence.request.spec();
        let targets = || Targets::new(Arc::clone(&spec.prompt), spec.logprobs.unwrap_or(0).into());
        Self {
            hub,
            eos: Arc::clone(&spec.eos),
            max_new_tokens: spec.max_new_tokens,
            targets: spec.score_prompt.then(targets),
            generated: 0,
            over: false,
            stopwatch: Stopwatch::new(sequence.submitted, sequence.resident),
        }
    }

    /// What a row with logits is: it scores the prompt, and what it selected is no part of the answer.
    fn slice(&mut self, row: &mut RowOutput) -> Option<ScoredSlice<H>> {
        let scores = row.finite && !row.logits.is_empty();
        let targets = self.targets.as_mut().filter(|_| scores)?;
        Some(targets.slice(row.request, self.hub.clone(), std::mem::take(&mut row.logits)))
    }

    /// The tokens of one row up to the end, if it comes; what the row has after it is discarded.
    fn take(&mut self, row: &mut RowOutput, at: Duration) -> (Vec<GeneratedToken>, Option<RowEnd>) {
        if !row.finite {
            self.over = true;
            return (Vec::new(), Some(RowEnd::NonFinite));
        }
        let mut logprobs = std::mem::take(&mut row.logprobs).into_iter();
        let mut tokens = Vec::with_capacity(row.tokens.len());
        for id in std::mem::take(&mut row.tokens) {
            tokens.push(GeneratedToken { id, index: self.generated, logprobs: logprobs.next() });
            self.generated += 1;
            self.stopwatch.token(at);
            if let Some(end) = self.end_after(id) {
                self.over = true;
                return (tokens, Some(end));
            }
        }
        (tokens, None)
    }

    fn end_after(&self, token: u32) -> Option<RowEnd> {
        if self.eos.contains(&token) {
            Some(RowEnd::Eos)
        } else if self.generated as usize >= self.max_new_tokens {
            Some(RowEnd::Length)
        } else {
            None
        }
    }
}

/// A step, understood: first for the planner, then one list of entries per hub and the logits to be scored.
#[derive(Debug)]
pub struct Digest<H> {
    /// For the planner.
    pub retired: Retired,
    /// For the sessions, in row order per hub.
    pub batches: Vec<(H, Vec<TokenEntry>)>,
    /// For the scorer; `retired` names their requests.
    pub slices: Vec<ScoredSlice<H>>,
}

/// The core.
#[derive(Debug)]
pub struct Sampler<H> {
    tracked: HashMap<RequestId, Tracked<H>>,
}

impl<H> Default for Sampler<H> {
    fn default() -> Self {
        Self { tracked: HashMap::new() }
    }
}

impl<H: Clone + PartialEq> Sampler<H> {
    /// Follows a new sequence.
    pub fn track(&mut self, request: RequestId, tracked: Tracked<H>) {
        self.tracked.insert(request, tracked);
    }

    /// Lets a sequence go, of whose tokens `generated` count. Its times; nothing when it is not tracked.
    pub fn forget(&mut self, request: RequestId, generated: u32) -> Option<Timing> {
        self.tracked.remove(&request).map(|t| t.stopwatch.read(generated))
    }

    /// Sequences tracked.
    pub fn len(&self) -> usize {
        self.tracked.len()
    }

    /// Whether nothing is tracked.
    pub fn is_empty(&self) -> bool {
        self.tracked.is_empty()
    }

    /// Reads a step's output, which was complete at `at`. Rows of a sequence that is over are an overrun and dropped.
    pub fn digest(&mut self, output: StepOutput, at: Duration) -> Digest<H> {
        let (step, timing) = (output.step, output.timing);
        let mut retired = Retired { step, progressed: Vec::new(), ended: Vec::new(), scoring: Vec::new(), timing };
        let (mut batches, mut slices) = (Vec::<(H, Vec<TokenEntry>)>::new(), Vec::new());
        for mut row in output.rows {
            let request = row.request;
            let Some(tracked) = self.tracked.get_mut(&request).filter(|t| !t.over) else { continue };
            if let Some(slice) = tracked.slice(&mut row) {
                retired.scoring.push(request);
                slices.push(slice);
                continue;
            }
            let (tokens, end) = tracked.take(&mut row, at);
            if !tokens.is_empty() {
                retired.progressed.push((request, tokens.len() as u32));
            }
            retired.ended.extend(end.map(|e| (request, e)));
            let entry = TokenEntry { request, prompt_scores: Vec::new(), tokens, end: end.map(session_end) };
            match batches.iter_mut().find(|(hub, _)| *hub == tracked.hub) {
                Some((_, entries)) => entries.push(entry),
                None => batches.push((tracked.hub.clone(), vec![entry])),
            }
        }
        Digest { retired, batches, slices }
    }
}

fn session_end(end: RowEnd) -> SessionEnd {
    match end {
        RowEnd::Eos => SessionEnd::Eos,
        RowEnd::Length => SessionEnd::Length,
        RowEnd::NonFinite => SessionEnd::Failed(SessionFailure::NonFinite),
    }
}
