//! The resident set and the plan of one step.
//!
//! When to look ahead: a step that waits behind another keeps the device busy, but whatever arrives after it was planned has to
//! wait for it. A decode step is short, so the next one is planned at once. A step with prefill is long next to a launch, and
//! more prompts may arrive while it runs; the next one is planned only when it completes, unless its prefill plan is already
//! full, for then later arrivals could not join it anyway.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::budget::TokenBudget;
use super::counters::{RowInFlight, count};
use super::logit_credits::LogitCredits;
use super::resident::{Cause, Resident, RowEnd, Sequence};
use crate::admission::{Dialect, Ended, Outcome, RequestId, StepCounters};
use crate::backend::{DeviceCounts, STEPS_IN_FLIGHT, Step, StepTiming};
use crate::pages::PageLease;

/// The planner's bounds.
#[derive(Clone, Debug)]
pub struct PlannerConfig {
    /// Resident sequences at most.
    pub slots: usize,
    /// Prompt tokens per step at most.
    pub token_budget: usize,
    /// Step time that the budget adapts to; absent keeps it at `token_budget`.
    pub step_time_target: Option<Duration>,
    /// Prompt tokens per request and step; `usize::MAX` is off.
    pub chunk_cap: usize,
    /// Requests with prompt tokens per step; 1 is packing off.
    pub max_requests: usize,
    /// Positions of scored prompts that are planned and not scored, at least 1: so many rows of logits the host holds at most, beside
    /// those of one row a slot.
    pub scored_positions: usize,
    /// Token rows per step, decode rows included; above `slots`.
    pub max_step_tokens: usize,
}

/// A step, and for each of its rows the surface that the request came through (for the step trace).
#[derive(Debug, PartialEq)]
pub struct PlannedStep {
    /// For the executor.
    pub step: Step,
    /// `[rows]`.
    pub dialects: Vec<Dialect>,
}

/// What the sampler made of a completed step.
#[derive(Clone, Debug, PartialEq)]
pub struct Retired {
    /// Its id.
    pub step: u64,
    /// Tokens accepted per request.
    pub progressed: Vec<(RequestId, u32)>,
    /// Sequences that ended in it.
    pub ended: Vec<(RequestId, RowEnd)>,
    /// Requests whose logits went to the scorer; `Planner::scored` follows for each.
    pub scoring: Vec<RequestId>,
    /// Time and bytes.
    pub timing: StepTiming,
}

/// A sequence that has left: its lease is dropped and its slot is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    /// Whose.
    pub request: RequestId,
    /// How it ended.
    pub ended: Ended,
}

#[derive(Debug)]
struct StepInFlight {
    id: u64,
    rows: Vec<RowInFlight>,
}

/// The core. Call `plan` until it yields nothing after every event, then `depart`.
#[derive(Debug)]
pub struct Planner {
    config: PlannerConfig,
    budget: TokenBudget,
    residents: BTreeMap<RequestId, Resident>,
    prefill: VecDeque<RequestId>,
    free_slots: Vec<u32>,
    credits: LogitCredits,
    in_flight: VecDeque<StepInFlight>,
    last_step: u64,
    counters: StepCounters,
    dead: bool,
}

impl Planner {
    /// An empty resident set.
    pub fn new(config: PlannerConfig) -> Self {
        let free_slots = (0..config.slots as u32).rev().collect();
        let budget = TokenBudget::new(config.token_budget, config.step_time_target);
        let credits = LogitCredits::new(config.scored_positions);
        let counters = StepCounters { prefill_budget_tokens: as_count(budget.tokens()), ..StepCounters::default() };
        Self {
            config,
            budget,
            residents: BTreeMap::new(),
            prefill: VecDeque::new(),
            free_slots,
            credits,
            in_flight: VecDeque::new(),
            last_step: 0,
            counters,
            dead: false,
        }
    }

    /// A new resident. The resident credits of admission are the slots, so one is free. With a dead planner it has failed already.
    pub fn enqueue(&mut self, sequence: Sequence, lease: PageLease) {
        let Some(slot) = self.free_slots.pop() else {
            debug_assert!(false, "more residents than slots");
            return;
        };
        let id = sequence.request.id();
        let mut resident = Resident::new(sequence.request, lease, slot);
        if self.dead {
            resident.end(Outcome::Failed);
        } else {
            self.prefill.push_back(id);
        }
        self.residents.insert(id, resident);
    }

    /// Ends a resident from outside. Idempotent; the first end wins.
    pub fn cancel(&mut self, request: RequestId, cause: Cause) {
        if let Some(resident) = self.residents.get_mut(&request) {
            resident.end_by(cause);
            self.prefill.retain(|&id| id != request);
        }
    }

    /// Takes a completed step. Steps complete in the order in which they were planned.
    pub fn retire(&mut self, retired: &Retired) {
        let Some(step) = self.in_flight.pop_front() else {
            debug_assert!(self.dead, "step {} completed and none is in flight", retired.step);
            return;
        };
        debug_assert_eq!(step.id, retired.step, "steps complete in order");
        for row in &step.rows {
            if let Some(resident) = self.residents.get_mut(&row.request) {
                resident.retire_row(row.prompt as usize);
            }
            // Logits that went to no scorer are gone: one was not finite, or the sequence is over.
            if row.scores && !retired.scoring.contains(&row.request) {
                self.credits.give_back(row.request);
            }
        }
        for &(request, tokens) in &retired.progressed {
            if let Some(resident) = self.residents.get_mut(&request) {
                resident.accept(tokens);
            }
        }
        for &(request, end) in &retired.ended {
            if let Some(resident) = self.residents.get_mut(&request) {
                resident.end(end.outcome());
                self.prefill.retain(|&id| id != request);
            }
        }
        let prompt: u32 = step.rows.iter().map(|row| row.prompt).sum();
        self.budget.observe(prompt as usize, retired.timing.device_us);
        count(&mut self.counters, &step.rows, &retired.timing);
        self.counters.prefill_budget_tokens = as_count(self.budget.tokens());
    }

    /// The scorer is done with a slice of `positions` positions, and its logits are gone. It says so once for each slice that it got,
    /// whether or not the request has ended meanwhile.
    pub fn scored(&mut self, request: RequestId, positions: u32) {
        let given = self.credits.give_back(request);
        debug_assert!(self.dead || given == Some(positions as usize), "{request} scored {positions}, held {given:?}");
    }

    /// The next step, when one is due.
    pub fn plan(&mut self) -> Option<PlannedStep> {
        if self.dead || self.in_flight.len() >= STEPS_IN_FLIGHT || self.waits_for_arrivals() {
            return None;
        }
        let mut planned = PlannedStep { step: Step::default(), dialects: Vec::new() };
        self.plan_decode(&mut planned);
        self.plan_prefill(&mut planned);
        if planned.step.rows.is_empty() {
            return None;
        }
        self.last_step += 1;
        planned.step.id = self.last_step;
        let rows = planned.step.rows.iter().map(RowInFlight::of).collect();
        self.in_flight.push_back(StepInFlight { id: self.last_step, rows });
        Some(planned)
    }

    /// Sequences that no step in flight contains any more; each is returned once.
    pub fn depart(&mut self) -> Vec<Departure> {
        let gone: Vec<_> = self.residents.values().filter_map(|r| Some((r.id(), r.slot(), r.departs()?))).collect();
        gone.into_iter()
            .map(|(request, slot, ended)| {
                drop(self.residents.remove(&request));
                self.free_slots.push(slot);
                Departure { request, ended }
            })
            .collect()
    }

    /// The engine is dead: every resident has failed, and no step will complete or be planned.
    pub fn fail(&mut self) {
        self.dead = true;
        self.prefill.clear();
        self.credits.clear();
        for step in std::mem::take(&mut self.in_flight) {
            for row in step.rows {
                if let Some(resident) = self.residents.get_mut(&row.request) {
                    resident.retire_row(0);
                }
            }
        }
        self.residents.values_mut().for_each(|r| r.end(Outcome::Failed));
    }

    /// Starts from what the backend has counted before the first step: graphs recorded, memory allocated.
    pub fn start_from(&mut self, device: DeviceCounts) {
        self.counters.device = device;
    }

    /// What the steps did so far.
    pub fn counters(&self) -> &StepCounters {
        &self.counters
    }

    /// Residents whose prompt is not computed.
    pub fn prefilling(&self) -> u32 {
        self.residents.values().filter(|r| r.prefilling()).count() as u32
    }

    /// Residents, ended ones still in flight included.
    pub fn residents(&self) -> usize {
        self.residents.len()
    }

    /// Steps in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Positions of scored prompts that are planned and not scored: as many rows of logits exist at most.
    pub fn unscored(&self) -> usize {
        self.credits.held()
    }

    /// Whether the look-ahead is held back: a step with prefill runs and the next prefill plan has room left.
    fn waits_for_arrivals(&self) -> bool {
        let prefill_runs = self.in_flight.back().is_some_and(|s| s.rows.iter().any(|r| r.prompt > 0));
        prefill_runs && !self.next_prefill_is_full()
    }

    fn next_prefill_is_full(&self) -> bool {
        let slices = self.next_slices(self.budget.tokens());
        let tokens: usize = slices.iter().map(|&(_, len)| len).sum();
        slices.len() >= self.config.max_requests || tokens >= self.budget.tokens()
    }

    /// The prefill plan that is due: (request, positions) from the front of the queue, one slice a request, within `budget` positions, the
    /// request limit and the credits for logits. A prompt whose last slice is being scored waits and is passed: its next slice would
    /// need more logits, and its first token may not reach the session before the scores.
    fn next_slices(&self, mut budget: usize) -> Vec<(RequestId, usize)> {
        let (mut credits, mut slices) = (self.credits.left(), Vec::new());
        for resident in self.prefill.iter().filter_map(|id| self.residents.get(id)) {
            if budget == 0 || slices.len() == self.config.max_requests {
                break;
            }
            if self.credits.holds(resident.id()) {
                continue;
            }
            let len = resident.slice_cap().min(self.config.chunk_cap).min(budget);
            let len = if resident.scores_next() { len.min(credits) } else { len };
            if len == 0 {
                continue;
            }
            credits -= if resident.scores_next() { len } else { 0 };
            budget -= len;
            slices.push((resident.id(), len));
        }
        slices
    }

    fn plan_decode(&mut self, planned: &mut PlannedStep) {
        for resident in self.residents.values_mut().filter(|r| r.decodes()) {
            planned.step.rows.push(resident.decode());
            planned.dialects.push(resident.request().spec().dialect);
        }
    }

    /// Plans the slices that are due. Who has more to come goes to the back; who had no room stays in front, the first to have it.
    fn plan_prefill(&mut self, planned: &mut PlannedStep) {
        let room = self.config.max_step_tokens.saturating_sub(planned.step.rows.len());
        let slices = self.next_slices(self.budget.tokens().min(room));
        let mut due = slices.iter().map(|&(id, _)| id).peekable();
        self.prefill.retain(|&id| due.next_if_eq(&id).is_none());
        for (id, len) in slices {
            let Some(resident) = self.residents.get_mut(&id) else { continue };
            if resident.scores_next() {
                self.credits.take(id, len);
            }
            planned.step.bindings.extend(resident.bind());
            planned.step.rows.push(resident.slice(len, &mut planned.step.tokens));
            planned.dialects.push(resident.request().spec().dialect);
            if resident.prompt_left() > 0 {
                self.prefill.push_back(id);
            }
        }
    }
}

fn as_count(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}
