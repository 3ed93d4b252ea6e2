//! Admission: first come, first served, with at most one reservation outstanding. It turns each event into effects for its
//! neighbours and keeps the account; it knows neither clocks nor addresses (`H`, a session hub's address, passes through).
//!
//! A request that does not fit stops admission: younger ones do not pass it. After every event the account balances (I2).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::account::{Account, Dialect, FinishedSample, Outcome, StepCounters};
use super::permit::QueuePermit;
use super::request::{RequestId, ValidRequest};
use super::roll::{Ended, Left, Roll, Timing};
use crate::actors::session::messages::SessionFailure;
use crate::backend::Rule;
use crate::pages::PageLease;
use crate::planner::{Cause, Sequence};

/// A request as it arrives.
#[derive(Debug)]
pub struct Arrival<H> {
    /// The request.
    pub request: ValidRequest,
    /// Its place in the queue; given back at `Enqueue` or at the waiting request's end.
    pub permit: QueuePermit,
    /// Hub of its session.
    pub hub: H,
    /// When it came, on the engine's clock.
    pub at: Duration,
}

/// What the neighbours must be told, in order.
#[derive(Debug)]
pub enum Effect<H> {
    /// To the page allocator. At most one is unanswered.
    Reserve {
        /// For whom.
        request: RequestId,
        /// How many.
        pages: usize,
    },
    /// To the planner: a new resident with its pages.
    Enqueue {
        /// The sequence.
        sequence: Sequence,
        /// Its pages for life.
        lease: PageLease,
        /// Hub of its session.
        hub: H,
    },
    /// To the planner, after one or more `Enqueue`s: no other follows without news from outside, so a plan made now is not
    /// made too early.
    Settled,
    /// To the planner: end a resident.
    CancelResident {
        /// Whom.
        request: RequestId,
        /// Why.
        cause: Cause,
    },
    /// To the session: nothing more will come.
    Reject {
        /// Whose.
        request: RequestId,
        /// Hub of its session.
        hub: H,
        /// Why.
        failure: SessionFailure,
    },
    /// Nothing is live and no new work is taken.
    Drained,
}

/// Whether new work is taken.
#[derive(Clone, Debug, PartialEq)]
enum Door {
    Open,
    Draining,
    Dead(Arc<str>),
}

/// The core. Every method takes one event and returns its effects through `effects`.
#[derive(Debug)]
pub struct Admission<H> {
    max_batch: usize,
    queue: VecDeque<Arrival<H>>,
    roll: Roll<H>,
    outstanding: Option<RequestId>,
    starved: bool,
    unsettled: bool,
    drain_announced: bool,
    door: Door,
    account: Account,
    samples: Vec<FinishedSample>,
}

impl<H: Clone> Admission<H> {
    /// An open door, `max_batch` resident credits and a pool of `pages` pages.
    pub fn new(max_batch: usize, pages: usize) -> Self {
        let account = Account { kv_pages_total: u32::try_from(pages).unwrap_or(u32::MAX), ..Account::default() };
        Self {
            max_batch,
            queue: VecDeque::new(),
            roll: Roll::new(),
            outstanding: None,
            starved: false,
            unsettled: false,
            drain_announced: false,
            door: Door::Open,
            account,
            samples: Vec::new(),
        }
    }

    /// The account as of the last event.
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Samples of the requests that finished since the last call.
    pub fn take_samples(&mut self) -> Vec<FinishedSample> {
        std::mem::take(&mut self.samples)
    }

    /// A request came.
    pub fn submit(&mut self, arrival: Arrival<H>, effects: &mut Vec<Effect<H>>) {
        if let Some(failure) = self.refusal() {
            self.account.refused_draining += 1;
            self.account.refused_dead += u64::from(matches!(self.door, Door::Dead(_)));
            effects.push(Effect::Reject { request: arrival.request.id(), hub: arrival.hub, failure });
            return;
        }
        let spec = arrival.request.spec();
        self.account.accepted += 1;
        self.account.accepted_by_dialect[row(spec.dialect)] += 1;
        match spec.rule {
            Rule::Greedy => self.account.greedy_requests += 1,
            Rule::Sampled { .. } => self.account.sampled_requests += 1,
        }
        self.queue.push_back(arrival);
        self.advance(effects);
    }

    /// The client of `request` is gone. Idempotent.
    pub fn cancel(&mut self, request: RequestId, effects: &mut Vec<Effect<H>>) {
        if let Some(index) = self.queue.iter().position(|a| a.request.id() == request) {
            if let Some(arrival) = self.queue.remove(index) {
                self.count_waiting_end(&arrival, Outcome::Cancelled);
            }
            if index == 0 {
                self.starved = false;
            }
        } else if self.roll.contains(request) {
            effects.push(Effect::CancelResident { request, cause: Cause::Client });
        }
        self.advance(effects);
    }

    /// The session of `request` found a stop string that token `token_index` completed. Idempotent.
    pub fn stop_hit(&mut self, request: RequestId, token_index: u32, effects: &mut Vec<Effect<H>>) {
        if self.roll.contains(request) {
            effects.push(Effect::CancelResident { request, cause: Cause::Stop { token_index } });
        }
    }

    /// The pages that were asked for. If their request was cancelled meanwhile the lease goes straight home.
    pub fn reserved(&mut self, lease: PageLease, at: Duration, effects: &mut Vec<Effect<H>>) {
        self.outstanding = None;
        let is_head = self.queue.front().is_some_and(|a| a.request.id() == lease.request());
        if let Some(arrival) = if is_head { self.queue.pop_front() } else { None } {
            let spec = arrival.request.spec();
            let pages = u32::try_from(lease.pages().len()).unwrap_or(u32::MAX);
            let prompt = u32::try_from(spec.prompt.len()).unwrap_or(u32::MAX);
            self.roll.enter(lease.request(), spec.dialect, prompt, pages, arrival.hub.clone());
            let sequence = Sequence { request: arrival.request, submitted: arrival.at, resident: at };
            effects.push(Effect::Enqueue { sequence, lease, hub: arrival.hub });
            self.unsettled = true;
        }
        self.advance(effects);
    }

    /// Too few pages are free. Admission waits for pages to come back, unless the request is gone.
    pub fn insufficient(&mut self, request: RequestId, effects: &mut Vec<Effect<H>>) {
        self.outstanding = None;
        self.starved = self.queue.front().is_some_and(|a| a.request.id() == request);
        self.advance(effects);
    }

    /// The pages that `request` had are free.
    pub fn pages_freed(&mut self, request: RequestId, effects: &mut Vec<Effect<H>>) {
        self.starved = false;
        let left = self.roll.pages_back(request);
        self.leave(left, effects);
    }

    /// The planner let `request` go.
    pub fn request_ended(&mut self, request: RequestId, ended: Ended, effects: &mut Vec<Effect<H>>) {
        let left = self.roll.ended(request, ended);
        self.leave(left, effects);
    }

    /// The sampler let `request` go.
    pub fn measured(&mut self, request: RequestId, timing: Timing, effects: &mut Vec<Effect<H>>) {
        let left = self.roll.measured(request, timing);
        self.leave(left, effects);
    }

    /// What the steps did so far, and how many residents still have prompt to compute. News that the death of the engine
    /// overtook counts steps only, for nobody is resident any more.
    pub fn progressed(&mut self, steps: StepCounters, prefilling: u32) {
        self.account.steps = steps;
        self.account.prefilling = if matches!(self.door, Door::Dead(_)) { 0 } else { prefilling };
    }

    /// No new work from now on.
    pub fn drain(&mut self, effects: &mut Vec<Effect<H>>) {
        if self.door == Door::Open {
            self.door = Door::Draining;
        }
        self.drain_announced = false;
        self.advance(effects);
    }

    /// The drain's deadline passed: what waits is rejected, what is resident fails. The sessions are told at once.
    pub fn drain_deadline(&mut self, effects: &mut Vec<Effect<H>>) {
        for arrival in std::mem::take(&mut self.queue) {
            self.count_waiting_end(&arrival, Outcome::Failed);
            effects.push(reject(arrival.request.id(), arrival.hub, SessionFailure::DrainDeadline));
        }
        for (request, resident) in self.roll.running() {
            effects.push(Effect::CancelResident { request, cause: Cause::DrainDeadline });
            effects.push(reject(request, resident.hub.clone(), SessionFailure::DrainDeadline));
        }
        self.advance(effects);
    }

    /// The engine is dead: everything live has failed, and whatever comes later fails at once. Idempotent.
    /// Tokens of requests that die with the engine are not counted, for nobody is left to judge them.
    pub fn engine_failed(&mut self, reason: &Arc<str>, effects: &mut Vec<Effect<H>>) {
        if !matches!(self.door, Door::Dead(_)) {
            self.door = Door::Dead(Arc::clone(reason));
        }
        for arrival in std::mem::take(&mut self.queue) {
            self.count_waiting_end(&arrival, Outcome::Failed);
            effects.push(reject(arrival.request.id(), arrival.hub, SessionFailure::Engine(Arc::clone(reason))));
        }
        for (request, resident) in self.roll.clear() {
            let ended = Ended { outcome: Outcome::Failed, generated: 0 };
            self.count_end(resident.dialect, resident.prompt_tokens, ended);
            effects.push(reject(request, resident.hub, SessionFailure::Engine(Arc::clone(reason))));
        }
        self.account.prefilling = 0;
        self.advance(effects);
    }

    fn refusal(&self) -> Option<SessionFailure> {
        match &self.door {
            Door::Open => None,
            Door::Draining => Some(SessionFailure::Draining),
            Door::Dead(reason) => Some(SessionFailure::Engine(Arc::clone(reason))),
        }
    }

    fn leave(&mut self, left: Option<Left>, effects: &mut Vec<Effect<H>>) {
        if let Some(left) = left {
            self.count_end(left.dialect, left.prompt_tokens, left.ended);
            self.samples.extend(left.sample);
        }
        self.advance(effects);
    }

    fn count_waiting_end(&mut self, arrival: &Arrival<H>, outcome: Outcome) {
        let spec = arrival.request.spec();
        let prompt = u32::try_from(spec.prompt.len()).unwrap_or(u32::MAX);
        self.count_end(spec.dialect, prompt, Ended { outcome, generated: 0 });
    }

    fn count_end(&mut self, dialect: Dialect, prompt_tokens: u32, ended: Ended) {
        let column = Outcome::ALL.iter().position(|&o| o == ended.outcome).unwrap_or(0);
        self.account.ended[row(dialect)][column] += 1;
        self.account.prompt_tokens += u64::from(prompt_tokens);
        self.account.generated_tokens += u64::from(ended.generated);
    }

    /// Asks for the next reservation when a credit, a request and possibly pages are there; then brings the account up to date.
    fn advance(&mut self, effects: &mut Vec<Effect<H>>) {
        if self.outstanding.is_none()
            && !self.starved
            && self.roll.len() < self.max_batch
            && let Some(head) = self.queue.front()
        {
            let (request, pages) = (head.request.id(), head.request.pages());
            self.outstanding = Some(request);
            effects.push(Effect::Reserve { request, pages });
        }
        if self.unsettled && self.outstanding.is_none() {
            self.unsettled = false;
            effects.push(Effect::Settled);
        }
        self.account.waiting = u32::try_from(self.queue.len()).unwrap_or(u32::MAX);
        self.account.resident = u32::try_from(self.roll.len()).unwrap_or(u32::MAX);
        self.account.kv_pages_used = self.roll.pages();
        self.account.kv_pages_peak = self.account.kv_pages_peak.max(self.account.kv_pages_used);
        debug_assert!(self.account.balances(), "I2: {:?}", self.account);
        debug_assert!(self.account.kv_pages_used <= self.account.kv_pages_total, "I3: {:?}", self.account);
        debug_assert!(self.roll.len() <= self.max_batch, "more residents than credits");
        if self.door != Door::Open && !self.drain_announced && self.account.live() == 0 {
            self.drain_announced = true;
            effects.push(Effect::Drained);
        }
    }
}

fn row(dialect: Dialect) -> usize {
    Dialect::ALL.iter().position(|&d| d == dialect).unwrap_or(0)
}

fn reject<H>(request: RequestId, hub: H, failure: SessionFailure) -> Effect<H> {
    Effect::Reject { request, hub, failure }
}
