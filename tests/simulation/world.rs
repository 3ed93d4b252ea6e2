//! One history: mailboxes, a scheduler that picks the next one by the seed, and every invariant checked after every message. The
//! order of messages between any two cores is kept, as actix keeps it; everything else may interleave.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crucible::actors::session::SessionEffect;
use crucible::actors::session::messages::{SessionEnd, SessionFailure, TokenEntry};
use crucible::admission::{
    Account, Admission, Arrival, Effect, Ended, Limits, Outcome, QueuePermits, RequestId, ValidRequest,
};
use crucible::backend::AttentionVariant;
use crucible::pages::{PageHome, Pool};
use crucible::planner::{Cause, PlannedStep, Planner, PlannerConfig};
use crucible::sampler::{Sampler, Tracked};
use crucible::scorer::ScoredSlice;

use super::catalogue::{self, CONTEXT, Catalogue, PAGE};
use super::client::{Ask, Client, MayFail, News, Verdict};
use super::device::{Device, bad_from, logit_rows};
use super::mail::{ToAdmission, ToPages, ToPlanner, ToSampler};
use super::seeded::Seeded;

/// What happened to the requests of a history.
#[derive(Default)]
pub struct Tally {
    /// Turned away without a place in the queue.
    pub refused: u64,
    /// Turned away by a draining engine.
    pub rejected_late: u64,
    /// Turned away by the constructor.
    pub malformed: u64,
    /// `[Verdict]` in the order of its declaration.
    pub verdicts: [u64; 4],
    /// Sequences that the engine ended at a stop string.
    pub stops: u64,
    /// Positions of prompts that the scorer scored.
    pub scored: u64,
    /// Clients with penalties or a bias that were answered.
    pub adjusted: u64,
    finished_samples: u64,
}

/// The server below its sockets, and its clients.
pub struct World {
    random: Seeded,
    seed: u64,
    now: u64,
    catalogue: &'static Catalogue,
    limits: Limits,
    /// Rows of logits that may exist.
    logit_rows: usize,
    permits: QueuePermits,
    admission: Admission<usize>,
    pool: Pool,
    home: PageHome,
    planner: Planner,
    sampler: Sampler<usize>,
    device: Device,
    to_admission: VecDeque<ToAdmission>,
    to_pages: Arc<Mutex<VecDeque<ToPages>>>,
    to_planner: VecDeque<ToPlanner>,
    to_executor: VecDeque<PlannedStep>,
    to_sampler: VecDeque<ToSampler>,
    to_scorer: VecDeque<ScoredSlice<usize>>,
    to_hubs: [VecDeque<Vec<TokenEntry>>; 2],
    /// `[client]`.
    to_sessions: Vec<VecDeque<News>>,
    clients: Vec<Client>,
    /// Whose news go to which client.
    registry: BTreeMap<RequestId, usize>,
    submitted: BTreeMap<RequestId, usize>,
    resident: HashSet<RequestId>,
    /// How the planner saw each resident end.
    judged: BTreeMap<RequestId, Ended>,
    /// Ends from outside that the planner has handled: I6 from here on.
    out: HashSet<RequestId>,
    closed: bool,
    drained: bool,
    draining: bool,
    /// A hash of every choice of the scheduler.
    pub log: u64,
    pub tally: Tally,
}

impl World {
    fn new(seed: u64) -> Self {
        let catalogue = catalogue::of((seed % 3) as usize);
        let mut random = Seeded::new(seed);
        let (pages, slots) = (12 + random.below(40), 1 + random.below(6));
        let planner = PlannerConfig {
            slots,
            token_budget: 1 + random.below(120),
            step_time_target: [None, Some(Duration::from_micros(300))][random.below(2)],
            chunk_cap: [7, 16, usize::MAX][random.below(3)],
            max_requests: [1, 2, 64][random.below(3)],
            max_step_tokens: 128,
            scored_positions: [1, 10, 64][random.below(3)],
        };
        let limits = Limits {
            context: CONTEXT,
            max_prompt_tokens: CONTEXT,
            max_new_tokens: CONTEXT,
            vocab: catalogue.tokenizer.vocab_size(),
            pages,
            page_tokens: PAGE,
        };
        let to_pages: Arc<Mutex<VecDeque<ToPages>>> = Arc::default();
        let mail = Arc::clone(&to_pages);
        Self {
            random,
            seed,
            now: 0,
            catalogue,
            limits,
            permits: QueuePermits::new(4),
            admission: Admission::new(slots, pages),
            pool: Pool::new(pages),
            home: Arc::new(move |back| mail.lock().unwrap().push_back(ToPages::Release(back))),
            device: Device::new(catalogue.backend(AttentionVariant::Auto, pages, slots, planner.max_step_tokens), seed),
            logit_rows: planner.scored_positions,
            planner: Planner::new(planner),
            sampler: Sampler::default(),
            to_admission: VecDeque::new(),
            to_pages,
            to_planner: VecDeque::new(),
            to_executor: VecDeque::new(),
            to_sampler: VecDeque::new(),
            to_scorer: VecDeque::new(),
            to_hubs: Default::default(),
            to_sessions: Vec::new(),
            clients: Vec::new(),
            registry: BTreeMap::new(),
            submitted: BTreeMap::new(),
            resident: HashSet::new(),
            judged: BTreeMap::new(),
            out: HashSet::new(),
            closed: false,
            drained: false,
            draining: false,
            log: seed,
            tally: Tally::default(),
        }
    }

    /// The state of the account.
    pub fn account(&self) -> &Account {
        self.admission.account()
    }

    fn at(&self) -> Duration {
        Duration::from_micros(self.now)
    }

    /// A client comes. As in `session::launch`, all of its sequences are checked and have a place in the queue, or none is submitted.
    fn arrive(&mut self) {
        if self.closed {
            return;
        }
        let ask = Ask::draw(&mut self.random, self.catalogue);
        let mut specs = ask.specs();
        if self.random.below(16) == 0 {
            specs[0].max_new_tokens = CONTEXT;
        }
        let first = self.submitted.len() as u64 + 1;
        let ids: Vec<_> = (first..).map(RequestId).take(specs.len()).collect();
        let requests = ids.iter().zip(specs).map(|(&id, spec)| ValidRequest::new(id, spec, &self.limits));
        let Ok(requests) = requests.collect::<Result<Vec<_>, _>>() else {
            self.tally.malformed += 1;
            return;
        };
        let Some(permits) = self.permits.try_take_many(requests.len()) else {
            self.tally.refused += 1;
            return;
        };
        let (client, mut effects) = (self.clients.len(), Vec::new());
        self.clients.push(Client::new(ask, ids, &self.catalogue.tokenizer, &mut effects));
        self.to_sessions.push(VecDeque::new());
        for (request, permit) in requests.into_iter().zip(permits) {
            self.registry.insert(request.id(), client);
            self.submitted.insert(request.id(), client);
            let arrival = Arrival { request, permit, hub: client % 2, at: self.at() };
            self.to_admission.push_back(ToAdmission::Submit(arrival));
        }
        self.carry_out_session(effects);
    }

    /// A client goes away.
    fn disconnect(&mut self) {
        let waiting: Vec<_> = (0..self.clients.len()).filter(|&c| self.clients[c].is_waiting()).collect();
        if !waiting.is_empty() {
            let client = waiting[self.random.below(waiting.len())];
            self.clients[client].go();
            self.to_sessions[client].push_back(News::ClientGone);
        }
    }

    /// Some client reads; a slow one seldom does.
    fn read(&mut self) {
        if self.clients.is_empty() {
            return;
        }
        let client = self.random.below(self.clients.len());
        if !self.clients[client].is_slow() || self.random.below(8) == 0 {
            let frames = 1 + self.random.below(4);
            self.clients[client].read(frames);
        }
    }

    /// The engine dies: no step is submitted or completes, everybody is told.
    fn die(&mut self) {
        self.closed = true;
        self.to_admission.push_back(ToAdmission::EngineFailed);
        self.to_planner.push_back(ToPlanner::Close);
        self.to_sessions.iter_mut().for_each(|mail| mail.push_back(News::EngineDied));
    }

    /// Delivers one message from a mailbox that the seed picks; false when every mailbox is empty and the device idle.
    fn deliver(&mut self) -> bool {
        let sessions: Vec<_> = (0..self.to_sessions.len()).filter(|&c| !self.to_sessions[c].is_empty()).collect();
        let ready = [
            !self.to_admission.is_empty(),
            !self.to_pages.lock().unwrap().is_empty(),
            !self.to_planner.is_empty(),
            !self.to_executor.is_empty(),
            !self.to_sampler.is_empty(),
            !self.to_hubs[0].is_empty(),
            !self.to_hubs[1].is_empty(),
            !sessions.is_empty(),
            self.device.is_busy() && !self.closed,
            !self.to_scorer.is_empty(),
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
            7 => {
                let client = sessions[self.random.below(sessions.len())];
                self.run_session(client);
            }
            8 => {
                let output = self.device.complete();
                self.to_sampler.push_back(ToSampler::StepCompleted(output));
            }
            _ => self.run_scorer(),
        }
        self.check_logits();
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
                self.tally.rejected_late += u64::from(matches!(failure, SessionFailure::Draining));
                let entry = TokenEntry {
                    request,
                    prompt_scores: Vec::new(),
                    tokens: Vec::new(),
                    end: Some(SessionEnd::Failed(failure)),
                };
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
                self.resident.insert(request);
                self.planner.enqueue(sequence, lease);
                return;
            }
            ToPlanner::Settled => {}
            ToPlanner::CancelResident(request, cause) => {
                self.tally.stops += u64::from(matches!(cause, Cause::Stop { .. }));
                self.planner.cancel(request, cause);
                self.out.insert(request);
                launch = false;
            }
            ToPlanner::StepRetired(retired) => self.planner.retire(&retired),
            ToPlanner::Scored(request, positions) => self.planner.scored(request, positions),
            ToPlanner::Close => self.planner.fail(),
        }
        while let Some(planned) = if launch { self.planner.plan() } else { None } {
            assert!(planned.step.rows.iter().all(|r| !self.out.contains(&r.request)), "I6: no plan has a row of it");
            self.to_executor.push_back(planned);
        }
        let departures = self.planner.depart();
        let progressed = ToAdmission::Progressed(Box::new(self.planner.counters().clone()), self.planner.prefilling());
        self.to_admission.push_back(progressed);
        for departure in departures {
            self.resident.remove(&departure.request);
            self.judged.insert(departure.request, departure.ended);
            self.to_sampler.push_back(ToSampler::Forget(departure.request, departure.ended.generated));
            self.to_admission.push_back(ToAdmission::RequestEnded(departure.request, departure.ended));
        }
        let stays = self.planner.in_flight() == 0 && self.resident.iter().any(|request| self.out.contains(request));
        assert!(!stays, "I6: what has ended leaves with the last step in flight");
    }

    fn run_executor(&mut self) {
        let planned = self.to_executor.pop_front().expect("mail");
        if !self.closed {
            self.device.submit(planned.step);
        }
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
                self.to_scorer.extend(digest.slices);
            }
            ToSampler::Forget(request, generated) => {
                if let Some(timing) = self.sampler.forget(request, generated) {
                    self.to_admission.push_back(ToAdmission::Measured(request, timing));
                }
            }
        }
    }

    fn run_scorer(&mut self) {
        let slice = self.to_scorer.pop_front().expect("mail");
        let (request, positions) = (slice.request, slice.positions());
        self.tally.scored += u64::from(positions);
        let (hub, entry) = slice.score();
        self.to_hubs[hub].push_back(vec![entry]);
        self.to_planner.push_back(ToPlanner::Scored(request, positions));
    }

    /// Logits exist from the device to the scorer, and never more of them than there is room for.
    fn check_logits(&self) {
        let digested = |mail: &ToSampler| match mail {
            ToSampler::StepCompleted(output) => output.rows.iter().map(|r| r.logits.len()).sum(),
            _ => 0,
        };
        let planned = |planned: &PlannedStep| logit_rows(&planned.step);
        let waiting: usize = self.to_scorer.iter().map(|slice| slice.logits.len()).sum();
        let rows = self.to_executor.iter().map(planned).sum::<usize>()
            + self.device.logit_rows()
            + self.to_sampler.iter().map(digested).sum::<usize>()
            + waiting;
        assert!(rows <= self.logit_rows, "{rows} rows of logits, room for {}", self.logit_rows);
    }

    fn run_hub(&mut self, hub: usize) {
        for entry in self.to_hubs[hub].pop_front().expect("mail") {
            if let Some(&client) = self.registry.get(&entry.request) {
                self.to_sessions[client].push_back(News::Entry(entry));
            }
        }
    }

    fn run_session(&mut self, client: usize) {
        let (news, mut effects) = (self.to_sessions[client].pop_front().expect("mail"), Vec::new());
        self.clients[client].receive(news, &mut effects);
        self.carry_out_session(effects);
    }

    fn carry_out_session(&mut self, effects: Vec<SessionEffect>) {
        for effect in effects {
            match effect {
                SessionEffect::StopHit { request, token_index } => {
                    self.to_admission.push_back(ToAdmission::StopHit(request, token_index));
                }
                SessionEffect::Cancel(request) => self.to_admission.push_back(ToAdmission::Cancel(request)),
                SessionEffect::Forget(request) => drop(self.registry.remove(&request)),
                SessionEffect::Over(_) => {}
            }
        }
    }

    fn check_account(&mut self) {
        let account = self.admission.account();
        assert!(account.balances(), "I2: {account:?}");
        assert!(account.waiting as usize <= self.permits.limit() && self.permits.held() <= self.permits.limit(), "I5");
        let pages = account.kv_pages_used <= account.kv_pages_total;
        assert!(pages && account.prefilling <= account.resident, "{account:?}");
        assert!(account.live() > 0 || account.kv_pages_used == 0, "I3: idle means free = total");
        let finished = account.ended_as(Outcome::Finished);
        for sample in self.admission.take_samples() {
            self.tally.finished_samples += 1;
            assert_eq!(sample.gaps_us.len() + 1, sample.generated_tokens as usize);
            let gaps: f64 = sample.gaps_us.iter().map(|&g| f64::from(g)).sum();
            assert!((sample.ttft_us + gaps - sample.e2e_us).abs() < 1.0 && sample.queue_us <= sample.ttft_us);
        }
        assert_eq!(finished, self.tally.finished_samples, "I10: a sample for every finished request");
    }

    /// Nothing is left to deliver: everything is home, and every client has what it must have.
    fn check_rest(&mut self) {
        let account = self.admission.account();
        assert_eq!((account.live(), self.planner.residents(), self.sampler.len()), (0, 0, 0), "{account:?}");
        assert_eq!((self.pool.free(), self.permits.held()), (self.pool.total(), 0), "every page and permit is back");
        assert_eq!(self.planner.unscored(), 0, "every credit for logits is back");
        let ended: u64 = Outcome::ALL.iter().map(|&o| account.ended_as(o)).sum();
        let arrived = account.accepted + account.refused_draining;
        assert_eq!((account.accepted, arrived), (ended, self.submitted.len() as u64), "I2");
        let generated: u64 = self.judged.values().map(|ended| u64::from(ended.generated)).sum();
        // A dead engine's account closes before the planner has judged what was resident.
        assert!(self.closed || account.generated_tokens == generated, "I10: tokens are counted once");
        let prompts: usize = self.submitted.values().map(|&client| self.clients[client].prompt_tokens()).sum();
        assert!(self.closed || self.draining || account.prompt_tokens == prompts as u64, "I10");
        assert_eq!(self.drained, self.draining || self.closed);
        assert!(self.registry.is_empty(), "no session is left");
        for (request, ended) in self.judged.iter().filter(|(_, ended)| ended.outcome == Outcome::Finished) {
            let expected = self.clients[self.submitted[request]].expected_of(*request);
            let known = [expected.tokens, expected.natural].contains(&(ended.generated as usize));
            assert!(known, "{request} counts {} tokens, not {expected:?}", ended.generated);
        }
        let may_fail = |client: &usize| {
            let bad = |(request, of): (&RequestId, &usize)| of == client && bad_from(self.seed, *request).is_some();
            let may = self.closed || self.draining || self.submitted.iter().any(bad);
            if may { MayFail::Yes } else { MayFail::No }
        };
        let may_fail: Vec<_> = (0..self.clients.len()).map(|client| may_fail(&client)).collect();
        for (client, may_fail) in self.clients.iter_mut().zip(may_fail) {
            let verdict = client.check(may_fail);
            self.tally.adjusted += u64::from(verdict == Verdict::Answered && client.is_adjusted());
            self.tally.verdicts[Verdict::ALL.iter().position(|&v| v == verdict).expect("a verdict")] += 1;
        }
    }
}

/// Runs the history of a seed to its rest.
pub fn history(seed: u64) -> World {
    let mut world = World::new(seed);
    let (drain_at, death_at) = (150 + seed as usize % 400, 100 + seed as usize % 500);
    for step in 0..600 {
        world.now += 1 + world.random.below(50) as u64;
        match world.random.below(40) {
            0 | 1 => world.arrive(),
            2 if world.random.below(3) == 0 => world.disconnect(),
            3..=8 => world.read(),
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
            world.die();
        }
    }
    while world.deliver() {
        world.now += 1;
    }
    world.check_rest();
    world
}
