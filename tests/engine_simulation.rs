//! The whole engine without actix: the pure cores, one mailbox each, and a scheduler that picks the next mailbox by a seed. The
//! order of messages between any two cores is kept, as actix keeps it; everything else may interleave. A thousand seeded
//! histories of arrivals, cancels, stop hits, drains and deaths, with every invariant checked after every message.

mod engine_support;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crucible::actors::session::messages::{SessionEnd, SessionFailure, TokenEntry};
use crucible::admission::{
    Admission, Arrival, Effect, Ended, Limits, Outcome, QueuePermits, RequestId, RequestSpec, StepCounters, Timing,
    ValidRequest,
};
use crucible::backend::{STEPS_IN_FLIGHT, Step, StepOutput};
use crucible::pages::{PageHome, PageLease, Pool, ReturnedPages};
use crucible::planner::{Cause, PlannedStep, Planner, PlannerConfig, Retired, Sequence};
use crucible::sampler::{Sampler, Tracked};

use engine_support::fake::{Machine, NotFinite, PAGE, VOCAB, expected};
use engine_support::seeded::Seeded;
use engine_support::{prompt, spec};

/// Mail for Admission.
enum ToAdmission {
    Submit(Arrival<usize>),
    Cancel(RequestId),
    StopHit(RequestId, u32),
    Reserved(PageLease),
    Insufficient(RequestId),
    PagesFreed(RequestId),
    RequestEnded(RequestId, Ended),
    Measured(RequestId, Timing),
    Progressed(Box<StepCounters>, u32),
    Drain,
    DrainDeadline,
    EngineFailed,
}

enum ToPages {
    Reserve(RequestId, usize),
    Release(ReturnedPages),
}

enum ToPlanner {
    Enqueue(Sequence, PageLease, usize),
    Settled,
    CancelResident(RequestId, Cause),
    StepRetired(Retired),
    Close,
}

enum ToSampler {
    Track(RequestId, Tracked<usize>),
    StepCompleted(StepOutput),
    Forget(RequestId, u32),
}

/// What a session does on its own, and what it got.
struct Session {
    prompt: Vec<u32>,
    max_new_tokens: usize,
    eos: Option<u32>,
    /// It finds a stop string at this token.
    stop_at: Option<u32>,
    bad_from: Option<u32>,
    tokens: Vec<u32>,
    end: Option<SessionEnd>,
    stopped: bool,
    cancelled: bool,
}

struct World {
    random: Seeded,
    now: u64,
    limits: Limits,
    permits: QueuePermits,
    admission: Admission<usize>,
    pool: Pool,
    home: PageHome,
    planner: Planner,
    sampler: Sampler<usize>,
    machine: Machine,
    device: VecDeque<StepOutput>,
    to_admission: VecDeque<ToAdmission>,
    to_pages: Arc<Mutex<VecDeque<ToPages>>>,
    to_planner: VecDeque<ToPlanner>,
    to_executor: VecDeque<PlannedStep>,
    to_sampler: VecDeque<ToSampler>,
    to_hubs: [VecDeque<Vec<TokenEntry>>; 2],
    sessions: BTreeMap<RequestId, Session>,
    /// Cancels that the planner has handled: I6 from here on.
    out: HashSet<RequestId>,
    refused: usize,
    rejected_late: usize,
    finished_samples: u64,
    closed: bool,
    drained: bool,
    draining: bool,
    log: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Seeded::new(seed);
        let (pages, slots) = (12 + random.below(40), 1 + random.below(6));
        let planner = PlannerConfig {
            slots,
            token_budget: 1 + random.below(64),
            chunk_cap: [7, 16, usize::MAX][random.below(3)],
            max_requests: [1, 2, 64][random.below(3)],
            max_step_tokens: 64,
        };
        let limits = Limits {
            context: pages * PAGE,
            max_prompt_tokens: 4096,
            max_new_tokens: 4096,
            vocab: VOCAB,
            pages,
            page_tokens: PAGE,
        };
        let to_pages: Arc<Mutex<VecDeque<ToPages>>> = Arc::default();
        let mail = Arc::clone(&to_pages);
        let bad = seed;
        let not_finite: NotFinite = Arc::new(move |request, index| bad_from(bad, request).is_some_and(|b| index >= b));
        Self {
            random,
            now: 0,
            limits,
            permits: QueuePermits::new(4),
            admission: Admission::new(slots, pages),
            pool: Pool::new(pages),
            home: Arc::new(move |back| mail.lock().unwrap().push_back(ToPages::Release(back))),
            planner: Planner::new(planner),
            sampler: Sampler::default(),
            machine: Machine::new(not_finite),
            device: VecDeque::new(),
            to_admission: VecDeque::new(),
            to_pages,
            to_planner: VecDeque::new(),
            to_executor: VecDeque::new(),
            to_sampler: VecDeque::new(),
            to_hubs: Default::default(),
            sessions: BTreeMap::new(),
            out: HashSet::new(),
            refused: 0,
            rejected_late: 0,
            finished_samples: 0,
            closed: false,
            drained: false,
            draining: false,
            log: seed,
        }
    }

    fn at(&self) -> Duration {
        Duration::from_micros(self.now)
    }

    fn arrive(&mut self, seed: u64) {
        let Some(permit) = self.permits.try_take() else {
            self.refused += 1;
            return;
        };
        let id = RequestId(self.sessions.len() as u64 + 1);
        let (len, max_new_tokens) = (1 + self.random.below(70), 1 + self.random.below(20));
        let prompt = prompt(len, id.0 as u32);
        let text = expected(&prompt, max_new_tokens);
        let eos = (self.random.below(3) == 0).then(|| text[self.random.below(text.len())]);
        let request = RequestSpec { eos: eos.into_iter().collect::<Vec<_>>().into(), ..spec(&prompt, max_new_tokens) };
        let stop_at = (self.random.below(4) == 0).then(|| self.random.below(max_new_tokens) as u32);
        let session = Session {
            prompt,
            max_new_tokens,
            eos,
            stop_at,
            bad_from: bad_from(seed, id),
            tokens: Vec::new(),
            end: None,
            stopped: false,
            cancelled: false,
        };
        self.sessions.insert(id, session);
        let request = ValidRequest::new(id, request, &self.limits).expect("a valid request");
        let hub = self.random.below(2);
        self.to_admission.push_back(ToAdmission::Submit(Arrival { request, permit, hub, at: self.at() }));
    }

    fn disconnect(&mut self) {
        if self.sessions.is_empty() {
            return;
        }
        let id = RequestId(1 + self.random.below(self.sessions.len()) as u64);
        if let Some(session) = self.sessions.get_mut(&id).filter(|s| s.end.is_none() && !s.stopped) {
            session.cancelled = true;
            self.to_admission.push_back(ToAdmission::Cancel(id));
        }
    }

    /// Delivers one message from a mailbox that the seed picks; false when every mailbox is empty and the device idle.
    fn deliver(&mut self) -> bool {
        let device_ready = !self.device.is_empty() && !self.closed;
        let pages_waiting = !self.to_pages.lock().unwrap().is_empty();
        let ready = [
            !self.to_admission.is_empty(),
            pages_waiting,
            !self.to_planner.is_empty(),
            !self.to_executor.is_empty(),
            !self.to_sampler.is_empty(),
            !self.to_hubs[0].is_empty(),
            !self.to_hubs[1].is_empty(),
            device_ready,
        ];
        let choices: Vec<_> = (0..ready.len()).filter(|&i| ready[i]).collect();
        if choices.is_empty() {
            return false;
        }
        let choice = choices[self.random.below(choices.len())];
        self.log = (self.log ^ choice as u64).wrapping_mul(0x100_0000_01b3);
        match choice {
            0 => self.run_admission(),
            1 => self.run_pages(),
            2 => self.run_planner(),
            3 => self.run_executor(),
            4 => self.run_sampler(),
            5 | 6 => self.run_hub(choice - 5),
            _ => {
                let output = self.device.pop_front().expect("a step in flight");
                self.to_sampler.push_back(ToSampler::StepCompleted(output));
            }
        }
        true
    }

    fn run_admission(&mut self) {
        let (mut effects, at) = (Vec::new(), self.at());
        let (core, e) = (&mut self.admission, &mut effects);
        match self.to_admission.pop_front().expect("mail") {
            ToAdmission::Submit(arrival) => core.submit(arrival, e),
            ToAdmission::Cancel(request) => core.cancel(request, e),
            ToAdmission::StopHit(request, index) => core.stop_hit(request, index, e),
            ToAdmission::Reserved(lease) => core.reserved(lease, at, e),
            ToAdmission::Insufficient(request) => core.insufficient(request, e),
            ToAdmission::PagesFreed(request) => core.pages_freed(request, e),
            ToAdmission::RequestEnded(request, ended) => core.request_ended(request, ended, e),
            ToAdmission::Measured(request, timing) => core.measured(request, timing, e),
            ToAdmission::Progressed(steps, prefilling) => core.progressed(*steps, prefilling),
            ToAdmission::Drain => core.drain(e),
            ToAdmission::DrainDeadline => core.drain_deadline(e),
            ToAdmission::EngineFailed => core.engine_failed(&Arc::from("scripted"), e),
        }
        for effect in effects {
            self.carry_out(effect);
        }
        self.check_account();
    }

    fn carry_out(&mut self, effect: Effect<usize>) {
        match effect {
            Effect::Reserve { request, pages } => {
                self.to_pages.lock().unwrap().push_back(ToPages::Reserve(request, pages));
            }
            Effect::Enqueue { sequence, lease, hub } => {
                self.to_planner.push_back(ToPlanner::Enqueue(sequence, lease, hub));
            }
            Effect::Settled => self.to_planner.push_back(ToPlanner::Settled),
            Effect::CancelResident { request, cause } => {
                self.to_planner.push_back(ToPlanner::CancelResident(request, cause));
            }
            Effect::Reject { request, hub, failure } => {
                self.rejected_late += usize::from(matches!(failure, SessionFailure::Draining));
                let entry = TokenEntry { request, tokens: Vec::new(), end: Some(SessionEnd::Failed(failure)) };
                self.to_hubs[hub].push_back(vec![entry]);
            }
            Effect::Drained => {
                assert_eq!(self.admission.account().live(), 0);
                self.drained = true;
            }
        }
    }

    fn run_pages(&mut self) {
        let mail = self.to_pages.lock().unwrap().pop_front().expect("mail");
        self.to_admission.push_back(match mail {
            ToPages::Reserve(request, pages) => match self.pool.reserve(request, pages, self.home.clone()) {
                Ok(lease) => ToAdmission::Reserved(lease),
                Err(_) => ToAdmission::Insufficient(request),
            },
            ToPages::Release(back) => {
                let request = back.request();
                self.pool.release(back);
                ToAdmission::PagesFreed(request)
            }
        });
        assert_eq!(self.pool.free() + self.pool.assigned(), self.pool.total(), "I3");
    }

    fn run_planner(&mut self) {
        let mut launch = true;
        match self.to_planner.pop_front().expect("mail") {
            ToPlanner::Enqueue(sequence, lease, hub) => {
                let request = sequence.request.id();
                self.to_sampler.push_back(ToSampler::Track(request, Tracked::new(&sequence, hub)));
                self.planner.enqueue(sequence, lease);
                return;
            }
            ToPlanner::Settled => {}
            ToPlanner::CancelResident(request, cause) => {
                self.planner.cancel(request, cause);
                self.out.insert(request);
                launch = false;
            }
            ToPlanner::StepRetired(retired) => self.planner.retire(&retired),
            ToPlanner::Close => self.planner.fail(),
        }
        while let Some(planned) = if launch { self.planner.plan() } else { None } {
            assert!(planned.step.rows.iter().all(|r| !self.out.contains(&r.request)), "I6");
            self.to_executor.push_back(planned);
        }
        let departures = self.planner.depart();
        let progressed = ToAdmission::Progressed(Box::new(self.planner.counters().clone()), self.planner.prefilling());
        self.to_admission.push_back(progressed);
        for departure in departures {
            self.to_sampler.push_back(ToSampler::Forget(departure.request, departure.ended.generated));
            self.to_admission.push_back(ToAdmission::RequestEnded(departure.request, departure.ended));
        }
    }

    fn run_executor(&mut self) {
        let step: Step = self.to_executor.pop_front().expect("mail").step;
        if self.closed {
            return;
        }
        assert!(self.device.len() < STEPS_IN_FLIGHT, "two steps in flight at most");
        self.device.push_back(self.machine.run(&step));
    }

    fn run_sampler(&mut self) {
        match self.to_sampler.pop_front().expect("mail") {
            ToSampler::Track(request, tracked) => self.sampler.track(request, tracked),
            ToSampler::StepCompleted(output) => {
                let digest = self.sampler.digest(output, self.at());
                self.to_planner.push_back(ToPlanner::StepRetired(digest.retired));
                for (hub, entries) in digest.batches {
                    self.to_hubs[hub].push_back(entries);
                }
            }
            ToSampler::Forget(request, generated) => {
                if let Some(timing) = self.sampler.forget(request, generated) {
                    self.to_admission.push_back(ToAdmission::Measured(request, timing));
                }
            }
        }
    }

    fn run_hub(&mut self, hub: usize) {
        for entry in self.to_hubs[hub].pop_front().expect("mail") {
            let session = self.sessions.get_mut(&entry.request).expect("registered before submit");
            if session.end.is_some() || session.stopped {
                continue;
            }
            for token in entry.tokens {
                assert_eq!(token.index as usize, session.tokens.len(), "tokens in order");
                session.tokens.push(token.id);
                if session.stop_at == Some(token.index) {
                    session.stopped = true;
                    self.to_admission.push_back(ToAdmission::StopHit(entry.request, token.index));
                    break;
                }
            }
            session.end = if session.stopped { None } else { entry.end };
        }
    }

    fn check_account(&mut self) {
        let account = self.admission.account();
        assert!(account.balances(), "I2: {account:?}");
        assert!(account.waiting as usize <= self.permits.limit() && self.permits.held() <= self.permits.limit(), "I5");
        assert!(
            account.kv_pages_used <= account.kv_pages_total && account.prefilling <= account.resident,
            "{account:?}"
        );
        assert!(account.live() > 0 || account.kv_pages_used == 0, "idle means free = total");
        let finished = account.ended_as(Outcome::Finished);
        for sample in self.admission.take_samples() {
            self.finished_samples += 1;
            assert_eq!(sample.gaps_us.len() + 1, sample.generated_tokens as usize);
            let gaps: f64 = sample.gaps_us.iter().map(|&g| f64::from(g)).sum();
            assert!((sample.ttft_us + gaps - sample.e2e_us).abs() < 1.0 && sample.queue_us <= sample.ttft_us);
        }
        assert_eq!(finished, self.finished_samples, "I10: a sample for every finished request");
    }

    /// Nothing is left to deliver: everything is home, and every session has what it must have.
    fn check_rest(&self) {
        let account = self.admission.account();
        assert_eq!((account.live(), self.planner.residents(), self.sampler.len()), (0, 0, 0), "{account:?}");
        assert_eq!((self.pool.free(), self.permits.held()), (self.pool.total(), 0), "every page and permit is back");
        let ended: u64 = Outcome::ALL.iter().map(|&o| account.ended_as(o)).sum();
        assert_eq!(
            (account.accepted, account.accepted + account.refused_draining),
            (ended, self.sessions.len() as u64)
        );
        assert_eq!(self.drained, self.draining || self.closed);
        for (id, session) in &self.sessions {
            let text = expected(&session.prompt, session.max_new_tokens);
            assert_eq!(session.tokens, text[..session.tokens.len()], "{id}: the tokens that it gets alone");
            match &session.end {
                Some(SessionEnd::Length) => assert_eq!(session.tokens.len(), session.max_new_tokens),
                Some(SessionEnd::Eos) => assert_eq!(session.tokens.last().copied(), session.eos),
                Some(SessionEnd::Failed(SessionFailure::NonFinite)) => {
                    assert_eq!(session.bad_from.map(|b| b as usize), Some(session.tokens.len()));
                }
                Some(SessionEnd::Failed(SessionFailure::Engine(_))) => assert!(self.closed),
                Some(SessionEnd::Failed(_)) => assert!(self.draining),
                None => assert!(session.cancelled || session.stopped, "{id} was left without an end"),
            }
        }
    }
}

/// Every eleventh request meets a logit that is not finite, at a token that the seed fixes.
fn bad_from(seed: u64, request: RequestId) -> Option<u32> {
    (seed + request.0).is_multiple_of(11).then_some((seed % 5) as u32)
}

/// Runs one history to its rest; returns the world.
fn history(seed: u64) -> World {
    let mut world = World::new(seed);
    let (drain_at, death_at) = (150 + seed as usize % 400, 100 + seed as usize % 500);
    for step in 0..600 {
        world.now += 1 + world.random.below(50) as u64;
        match world.random.below(40) {
            0 | 1 => world.arrive(seed),
            2 if world.random.below(3) == 0 => world.disconnect(),
            _ => drop(world.deliver()),
        }
        if seed % 3 == 1 && step == drain_at {
            world.draining = true;
            world.to_admission.push_back(ToAdmission::Drain);
        }
        if seed % 6 == 1 && step == drain_at + 40 {
            world.to_admission.push_back(ToAdmission::DrainDeadline);
        }
        if seed % 5 == 2 && step == death_at {
            world.closed = true;
            world.to_admission.push_back(ToAdmission::EngineFailed);
            world.to_planner.push_back(ToPlanner::Close);
        }
    }
    while world.deliver() {
        world.now += 1;
    }
    world.check_rest();
    world
}

#[test]
fn a_thousand_seeded_histories_keep_every_invariant() {
    let mut seen = [0_u64; 6];
    for seed in 0..1_000 {
        let world = std::panic::catch_unwind(|| history(seed)).unwrap_or_else(|_| panic!("history {seed}"));
        let account = world.admission.account();
        for (count, outcome) in seen.iter_mut().zip(Outcome::ALL) {
            *count += account.ended_as(outcome);
        }
        seen[3] += world.refused as u64;
        seen[4] += world.rejected_late as u64;
        seen[5] += account.steps.packed_prefill_batches;
    }
    assert!(seen.iter().all(|&count| count > 500), "every kind of event was seen often: {seen:?}");
}

#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in 0..20 {
        let (first, second) = (history(seed), history(seed));
        assert_eq!((first.log, first.now), (second.log, second.now));
        assert_eq!(first.admission.account(), second.admission.account());
    }
}
