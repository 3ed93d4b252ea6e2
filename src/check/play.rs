//! Plays sequences on a backend under a schedule, and records what each one saw: tokens, and a digest of the logits at every position.
//! Two plays of the same sequences under different schedules must leave the same traces (invariants I1 and I8).

use std::collections::VecDeque;
use std::sync::Arc;

use super::Dice;
use super::models::Subject;
use super::seen::Seen;
use crate::admission::RequestId;
use crate::arith::adjusted_logits;
use crate::arith::select::select;
use crate::backend::{
    Adjust, Backend, HostLogits, Input, Row, RowOutput, Rule, SamplingRow, SlotBinding, Start, Step, StepTiming,
    StepValidator, Want,
};

/// A sequence to generate.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Prompt.
    pub prompt: Vec<u32>,
    /// Tokens to generate, at least 1.
    pub generate: usize,
    /// Selection.
    pub rule: Rule,
    /// Seed of the draws.
    pub seed: u64,
    /// Penalties and bias; not with `Observe::Everything`.
    pub adjust: Option<Arc<Adjust>>,
    /// Leave after so many generated tokens were planned; absent: never.
    pub cancel_after: Option<usize>,
}

/// Which positions a trace covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observe {
    /// Every generated token's position; only the tokens, no logits.
    Tokens,
    /// Every generated token's position.
    Generated,
    /// Every position of the prompt too (greedy sequences only).
    Everything,
}

/// How pages are handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// In ascending order: a sequence alone lies contiguously.
    Ascending,
    /// In random order, the pages freed last first.
    Shuffled,
}

/// A schedule.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// Prefill tokens of a step.
    pub budget: usize,
    /// Most tokens of one slice.
    pub chunk: usize,
    /// Most resident sequences.
    pub resident: usize,
    /// Steps in flight, 1 or 2.
    pub ahead: usize,
    /// Seed of slot and page choice and of the row order; 0 keeps arrival order.
    pub shuffle: u64,
    /// Page order.
    pub pages: Pages,
    /// What is recorded.
    pub observe: Observe,
    /// Decode rows of successive steps, in turns, once every prompt is in; empty: all active rows, from the first step on.
    pub walk: &'static [usize],
}

impl Style {
    /// One sequence at a time, prompts in one slice.
    pub fn solo(observe: Observe) -> Self {
        Self {
            budget: 2048,
            chunk: 2048,
            resident: 1,
            ahead: 1,
            shuffle: 0,
            pages: Pages::Ascending,
            observe,
            walk: &[],
        }
    }
}

/// What a sequence saw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Generated tokens.
    pub tokens: Vec<u32>,
    /// Digest of the logits at each observed position, in position order.
    pub logits: Vec<u64>,
    /// Where in its stream of random numbers each generated token was drawn.
    pub draws: Vec<u32>,
    /// What must not be: a logit that is not finite, a token that the definition would not have selected from these logits.
    pub faults: Vec<String>,
}

/// Counts of a play.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Steps.
    pub steps: u64,
    /// Steps with at least two prefill slices.
    pub packed: u64,
    /// Token rows.
    pub tokens: u64,
    /// Sum of the steps' times.
    pub timing: StepTiming,
    /// Host time to prepare and launch each step, µs, in order.
    pub launches_us: Vec<f64>,
    /// Which shapes the steps had.
    pub seen: Seen,
}

/// Digest of floats by their bits.
pub fn digest(values: &[f32]) -> u64 {
    values.iter().fold(0xcbf2_9ce4_8422_2325, |h: u64, v| {
        (h ^ u64::from(v.to_bits())).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    })
}

/// Vocabularies up to this size are held against the definition at every position, larger ones at every eighth.
const DEFINED_VOCAB: usize = 8192;

/// A row in flight.
#[derive(Clone, Copy)]
struct Member {
    index: usize,
    sampling: SamplingRow,
}

struct Resident {
    index: usize,
    slot: u32,
    pages: Vec<u32>,
    done: usize,
    planned: usize,
    in_flight: usize,
}

/// A backend with the host's side of the bookkeeping.
pub struct Player {
    /// The backend.
    pub subject: Subject,
    validator: StepValidator,
    free_pages: Vec<u32>,
    free_slots: Vec<u32>,
    next_step: u64,
    next_request: u64,
    poison: bool,
}

impl Player {
    /// Takes a fresh backend.
    pub fn new(subject: Subject) -> Self {
        let f = subject.facts();
        let limits = f.step_limits();
        let (free_pages, free_slots) = ((0..f.pages as u32).rev().collect(), (0..f.slots as u32).rev().collect());
        let validator = StepValidator::new(limits);
        Self { subject, validator, free_pages, free_slots, next_step: 1, next_request: 1, poison: false }
    }

    /// From now on everything that a step must not read is filled with impossible values before each step.
    #[must_use]
    pub fn poisoned(mut self) -> Self {
        self.poison = true;
        self
    }

    /// Plays the sequences; traces come in their order.
    ///
    /// # Errors
    /// A refused plan, or a failed step.
    pub fn play(&mut self, sequences: &[Sequence], style: &Style) -> Result<(Vec<Trace>, Counts), String> {
        let mut game = Game {
            base: self.next_request,
            sequences,
            style,
            dice: Dice::new(style.shuffle),
            left: Vec::new(),
            walked: 0,
            waiting: (0..sequences.len()).collect(),
            resident: Vec::new(),
            traces: vec![Trace::default(); sequences.len()],
            counts: Counts::default(),
        };
        self.next_request += sequences.len() as u64;
        let mut in_flight: VecDeque<Vec<Member>> = VecDeque::new();
        loop {
            game.retire(self);
            let step = game.plan(self);
            let Some((step, members)) = step else {
                if in_flight.is_empty() {
                    return if game.waiting.is_empty() && game.resident.is_empty() {
                        Ok((game.traces, game.counts))
                    } else {
                        Err("nothing fits: a sequence is longer than the pool".into())
                    };
                }
                let members = in_flight.pop_front().unwrap_or_default();
                self.collect(&mut game, &members)?;
                continue;
            };
            if self.poison {
                game.counts.seen.poisoned += u64::from(self.subject.poison(&step.bindings).map_err(|e| e.to_string())?);
            }
            let valid = self.validator.check(step).map_err(|e| e.to_string())?;
            self.subject.submit(valid).map_err(|e| e.to_string())?;
            in_flight.push_back(members);
            if in_flight.len() >= style.ahead {
                let members = in_flight.pop_front().unwrap_or_default();
                self.collect(&mut game, &members)?;
            }
        }
    }

    fn collect(&mut self, game: &mut Game<'_>, members: &[Member]) -> Result<(), String> {
        let output = loop {
            match self.subject.poll().map_err(|e| e.to_string())? {
                Some(output) => break output,
                None => std::hint::spin_loop(),
            }
        };
        let t = output.timing;
        game.counts.launches_us.push(t.launch_us);
        let sum = &mut game.counts.timing;
        sum.launch_us += t.launch_us;
        sum.device_us += t.device_us;
        sum.upload_bytes += t.upload_bytes;
        sum.download_bytes += t.download_bytes;
        for row in &output.rows {
            game.record(row, members)?;
        }
        for resident in game.resident.iter_mut().filter(|r| members.iter().any(|m| m.index == r.index)) {
            resident.in_flight -= 1;
        }
        Ok(())
    }
}

/// What the definition selects.
fn defined(logits: &[f32], sampling: &SamplingRow, offset: u32) -> u32 {
    if sampling.rule != Rule::Greedy {
        return select(logits, sampling, offset).token;
    }
    let best = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (1..logits.len()).fold(0, best) as u32
}

struct Game<'a> {
    base: u64,
    sequences: &'a [Sequence],
    style: &'a Style,
    dice: Dice,
    /// Pages of each cancelled sequence that left before this step.
    left: Vec<Vec<u32>>,
    /// Steps of the walk that are planned.
    walked: usize,
    waiting: VecDeque<usize>,
    resident: Vec<Resident>,
    traces: Vec<Trace>,
    counts: Counts,
}

impl Game<'_> {
    fn record(&mut self, row: &RowOutput, members: &[Member]) -> Result<(), String> {
        let index = (row.request.0 - self.base) as usize;
        let Some(member) = members.iter().find(|m| m.index == index) else {
            return Err(format!("an output for sequence {index}, which had no row in the step"));
        };
        let trace = &mut self.traces[index];
        if !row.finite {
            trace.faults.push(format!("a logit of token {} is not finite", trace.tokens.len()));
        }
        for (offset, (logits, &token)) in row.logits.iter().zip(&row.tokens).enumerate() {
            if row.finite && (logits.len() <= DEFINED_VOCAB || trace.logits.len().is_multiple_of(8)) {
                self.counts.seen.defined += 1;
                let adjust = self.sequences[index].adjust.as_deref();
                let adjusted = adjust.map(|a| adjusted_logits(logits, a, &trace.tokens));
                let logits = adjusted.as_deref().unwrap_or(logits);
                let want = defined(logits, &member.sampling, offset as u32);
                if token != want {
                    trace.faults.push(format!("token {token} was selected, the definition gives {want}"));
                }
            }
            trace.logits.push(digest(logits));
        }
        // Scored prompt positions select tokens too; only those past the prompt are generated.
        let prompt = self.sequences[index].prompt.len();
        if self.style.observe == Observe::Everything && trace.logits.len() < prompt {
            return Ok(());
        }
        trace.tokens.extend(row.tokens.last());
        trace.draws.push(member.sampling.token_index);
        Ok(())
    }

    /// A sequence's end in planned tokens.
    fn target(&self, index: usize) -> usize {
        let s = &self.sequences[index];
        s.cancel_after.map_or(s.generate, |c| c.min(s.generate))
    }

    fn retire(&mut self, player: &mut Player) {
        let mut kept = Vec::new();
        self.left.clear();
        for resident in std::mem::take(&mut self.resident) {
            let prompt = self.sequences[resident.index].prompt.len();
            let cancelled = self.sequences[resident.index].cancel_after;
            let cancelled_early = cancelled == Some(0) && resident.done > 0;
            let finished =
                resident.done >= prompt && resident.planned >= self.target(resident.index) || cancelled_early;
            if finished && resident.in_flight == 0 {
                if cancelled.is_some() {
                    self.left.push(resident.pages.clone());
                }
                player.free_pages.extend(resident.pages);
                player.free_slots.push(resident.slot);
            } else {
                kept.push(resident);
            }
        }
        self.resident = kept;
    }

    fn admit(&mut self, player: &mut Player) -> Vec<SlotBinding> {
        let mut bindings = Vec::new();
        while self.resident.len() < self.style.resident && !player.free_slots.is_empty() {
            let Some(&index) = self.waiting.front() else { break };
            let s = &self.sequences[index];
            let need = (s.prompt.len() + s.generate - 1).div_ceil(16);
            if player.free_pages.len() < need {
                self.counts.seen.blocked += 1;
                break;
            }
            self.waiting.pop_front();
            match self.style.pages {
                Pages::Ascending => player.free_pages.sort_unstable_by(|a, b| b.cmp(a)),
                Pages::Shuffled => {
                    let recent = player.free_pages.len().saturating_sub(2 * need);
                    self.dice.shuffle(&mut player.free_pages[recent..]);
                }
            }
            let pages: Vec<u32> =
                player.free_pages.split_off(player.free_pages.len() - need).into_iter().rev().collect();
            if self.style.shuffle != 0 {
                self.dice.shuffle(&mut player.free_slots);
            }
            let Some(slot) = player.free_slots.pop() else { break };
            let (all, left) = (self.left.len(), &mut self.left);
            left.retain(|l| !l.iter().any(|p| pages.contains(p)));
            self.counts.seen.rebound += (all - left.len()) as u64;
            bindings.push(SlotBinding {
                slot,
                request: self.request(index),
                pages: pages.clone(),
                adjust: s.adjust.clone(),
            });
            self.resident.push(Resident { index, slot, pages, done: 0, planned: 0, in_flight: 0 });
        }
        let in_use = player.subject.facts().pages - player.free_pages.len();
        let seen = &mut self.counts.seen;
        seen.pages_most = seen.pages_most.max(in_use);
        seen.resident_most = seen.resident_most.max(self.resident.len());
        bindings
    }

    /// Most decode rows of this step.
    fn decode_rows(&self) -> usize {
        if self.style.walk.is_empty() {
            return usize::MAX;
        }
        let pending = |r: &Resident| r.done < self.sequences[r.index].prompt.len();
        if self.resident.iter().any(pending) { 0 } else { self.style.walk[self.walked % self.style.walk.len()] }
    }

    fn request(&self, index: usize) -> RequestId {
        RequestId(self.base + index as u64)
    }

    fn plan(&mut self, player: &mut Player) -> Option<(Step, Vec<Member>)> {
        let bindings = self.admit(player);
        if self.style.shuffle != 0 {
            self.dice.shuffle(&mut self.resident);
        }
        let mut step = Step { id: player.next_step, bindings, ..Step::default() };
        let mut members = Vec::new();
        let mut budget = self.style.budget;
        let mut decodes = self.decode_rows();
        for i in 0..self.resident.len() {
            let r = &self.resident[i];
            let s = &self.sequences[r.index];
            let (prompt, target) = (s.prompt.len(), self.target(r.index));
            let logits = if self.style.observe == Observe::Tokens { HostLogits::No } else { HostLogits::Yes };
            let mut row = Row {
                request: self.request(r.index),
                slot: r.slot,
                start: Start::Device,
                len: 1,
                input: Input::DeviceLast,
                want: Want::Last,
                sampling: SamplingRow { rule: s.rule, seed: s.seed, token_index: r.planned as u32, choice: 0 },
                logprobs: None,
                host_logits: logits,
            };
            if r.done < prompt && !(s.cancel_after == Some(0) && r.done > 0) {
                // A sequence that leaves before its first token never reaches its prompt's end.
                let most = if s.cancel_after == Some(0) { prompt - 1 } else { prompt - r.done };
                let len = most.min(self.style.chunk).min(budget);
                if len == 0 {
                    continue;
                }
                budget -= len;
                let ends = r.done + len == prompt;
                (row.start, row.len, row.input) = (Start::Host(r.done as u32), len as u32, Input::Tokens);
                row.want = match (self.style.observe, ends) {
                    (Observe::Everything, _) => Want::All,
                    (_, true) => Want::Last,
                    (_, false) => Want::None,
                };
                step.tokens.extend(&s.prompt[r.done..r.done + len]);
                let r = &mut self.resident[i];
                r.done += len;
                r.planned += usize::from(ends);
            } else if r.done >= prompt && r.planned < target && decodes > 0 {
                decodes -= 1;
                let crosses = (prompt + r.planned - 1).is_multiple_of(16);
                self.counts.seen.crossings += u64::from(crosses);
                self.resident[i].planned += 1;
            } else {
                continue;
            }
            self.resident[i].in_flight += 1;
            members.push(Member { index: self.resident[i].index, sampling: row.sampling });
            step.rows.push(row);
        }
        if step.rows.is_empty() {
            return None;
        }
        player.next_step += 1;
        let walks = step.rows.iter().all(|r| r.input == Input::DeviceLast);
        self.walked += usize::from(walks);
        self.counts.steps += 1;
        self.counts.packed += u64::from(self.counts.seen.step(&step, self.style.chunk));
        self.counts.tokens += step.token_rows() as u64;
        Some((step, members))
    }
}
