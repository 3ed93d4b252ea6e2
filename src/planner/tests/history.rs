//! 100,000 seeded events against a naive model. After every plan: budgets, request limit and chunk cap hold, every active
//! sequence decodes, no ended row is in it (I6), slices are consecutive, nobody waits longer than the queue was long (fairness),
//! and no page is in two live page tables (I4). After every step: who leaves, and how.

use std::collections::{BTreeMap, HashSet, VecDeque};

use super::*;
use crate::backend::{STEPS_IN_FLIGHT, Step};
use crate::planner::seeded::Seeded;

/// What a naive observer knows of one resident.
struct Known {
    prompt: usize,
    max_new_tokens: usize,
    prompt_planned: usize,
    tokens_planned: usize,
    tokens_known: usize,
    in_flight: usize,
    pages: Vec<u32>,
    bound: bool,
    ended: Option<Ended>,
    /// Plans that may pass before its next slice.
    patience: usize,
}

impl Known {
    fn wants_prefill(&self) -> bool {
        self.ended.is_none() && self.prompt_planned < self.prompt
    }

    fn end(&mut self, outcome: Outcome, generated: usize) {
        self.ended.get_or_insert(Ended { outcome, generated: generated as u32 });
    }
}

struct History {
    random: Seeded,
    config: PlannerConfig,
    planner: Planner,
    pool: Pool,
    returned: Arc<std::sync::Mutex<Vec<crate::pages::ReturnedPages>>>,
    known: BTreeMap<RequestId, Known>,
    in_flight: VecDeque<Step>,
    next_id: u64,
    departed: [usize; 3],
}

impl History {
    fn new(seed: u64) -> Self {
        let mut random = Seeded::new(seed);
        let config = PlannerConfig {
            slots: 1 + random.below(8),
            token_budget: 1 + random.below(80),
            step_time_target: None,
            chunk_cap: [1, 7, 16, 37, usize::MAX][random.below(5)],
            max_requests: [1, 2, 3, 64][random.below(4)],
            max_step_tokens: 9 + random.below(90),
            scored_positions: 64,
        };
        Self {
            random,
            planner: Planner::new(config.clone()),
            config,
            pool: Pool::new(LIMITS.pages),
            returned: Arc::default(),
            known: BTreeMap::new(),
            in_flight: VecDeque::new(),
            next_id: 1,
            departed: [0; 3],
        }
    }

    fn pending(&self) -> usize {
        self.known.values().filter(|k| k.wants_prefill()).count()
    }

    fn enqueue(&mut self) {
        if self.known.len() >= self.config.slots {
            return;
        }
        let (prompt, max_new_tokens) = (1 + self.random.below(120), 1 + self.random.below(12));
        let sequence = sequence(self.next_id, prompt, max_new_tokens);
        self.next_id += 1;
        let sink = Arc::clone(&self.returned);
        let home: PageHome = Arc::new(move |back| sink.lock().unwrap().push(back));
        let id = sequence.request.id();
        let lease = self.pool.reserve(id, sequence.request.pages(), home).unwrap();
        let known = Known {
            prompt,
            max_new_tokens,
            prompt_planned: 0,
            tokens_planned: 0,
            tokens_known: 0,
            in_flight: 0,
            pages: lease.pages().to_vec(),
            bound: false,
            ended: None,
            patience: self.pending() + 1,
        };
        self.known.insert(id, known);
        self.planner.enqueue(sequence, lease);
    }

    fn cancel(&mut self) {
        let id = RequestId(self.next_id.saturating_sub(1 + self.random.below(10) as u64));
        let token_index = self.random.below(6) as u32;
        let cause = [Cause::Client, Cause::Stop { token_index }, Cause::DrainDeadline][self.random.below(3)];
        self.planner.cancel(id, cause);
        if let Some(known) = self.known.get_mut(&id) {
            let tokens = known.tokens_known;
            match cause {
                Cause::Client => known.end(Outcome::Cancelled, tokens),
                Cause::Stop { token_index } => known.end(Outcome::Finished, tokens.min(token_index as usize + 1)),
                Cause::DrainDeadline => known.end(Outcome::Failed, tokens),
            }
        }
    }

    fn plan(&mut self) {
        let mut decodes: HashSet<_> = self
            .known
            .iter()
            .filter(|(_, k)| k.ended.is_none() && k.prompt_planned == k.prompt && k.tokens_planned < k.max_new_tokens)
            .map(|(&id, _)| id)
            .collect();
        let pending = self.pending();
        let Some(PlannedStep { step, dialects }) = self.planner.plan() else {
            assert!(
                !self.in_flight.is_empty() || (decodes.is_empty() && pending == 0),
                "an idle device and work to do"
            );
            return;
        };
        assert!(self.in_flight.len() < STEPS_IN_FLIGHT && dialects.len() == step.rows.len());
        let slots: HashSet<_> = step.rows.iter().map(|r| r.slot).collect();
        assert!(slots.len() == step.rows.len() && slots.iter().all(|&s| (s as usize) < self.config.slots));
        assert!(step.token_rows() <= self.config.max_step_tokens, "{} rows", step.token_rows());
        self.check_bindings(&step);
        let (mut prompt_tokens, mut requests) = (0, HashSet::new());
        for row in &step.rows {
            let known = self.known.get_mut(&row.request).expect("a resident");
            assert_eq!(known.ended, None, "I6: an ended row in a plan");
            assert!(known.bound, "bound before its first row");
            match row.start {
                Start::Device => assert!(decodes.remove(&row.request), "it was not ready to decode"),
                Start::Host(start) => {
                    assert_eq!(start as usize, known.prompt_planned, "slices are consecutive");
                    assert!(row.len >= 1 && row.len as usize <= self.config.chunk_cap);
                    known.prompt_planned += row.len as usize;
                    prompt_tokens += row.len as usize;
                    assert!(requests.insert(row.request), "one slice per request");
                    known.patience = usize::MAX;
                }
            }
            assert_eq!(row.want == Want::Last, known.prompt_planned == known.prompt);
            if row.want == Want::Last {
                assert_eq!(row.sampling.token_index as usize, known.tokens_planned);
                known.tokens_planned += 1;
                assert!(known.tokens_planned <= known.max_new_tokens, "never past the length end");
            }
            known.in_flight += 1;
        }
        assert!(decodes.is_empty(), "every active sequence decodes in every step");
        assert_eq!(step.tokens.len(), prompt_tokens);
        assert!(prompt_tokens <= self.config.token_budget && requests.len() <= self.config.max_requests);
        assert_eq!(pending > 0, prompt_tokens > 0, "a waiting prompt always advances");
        self.check_fairness();
        self.in_flight.push_back(step);
    }

    /// Who had a slice queues again behind the others; everybody else has waited one plan more.
    fn check_fairness(&mut self) {
        let pending = self.pending();
        for (id, known) in self.known.iter_mut().filter(|(_, k)| k.wants_prefill()) {
            known.patience = if known.patience == usize::MAX { pending } else { known.patience - 1 };
            assert!(known.patience > 0, "{id} waited for more plans than prompts were queued before it");
        }
    }

    fn check_bindings(&mut self, step: &Step) {
        for binding in &step.bindings {
            let known = self.known.get_mut(&binding.request).expect("a resident");
            assert!(!std::mem::replace(&mut known.bound, true), "bound once");
            assert_eq!(binding.pages, known.pages);
        }
        let mut live = HashSet::new();
        let pages = self.known.values().filter(|k| k.bound).flat_map(|k| &k.pages);
        pages.for_each(|page| assert!(live.insert(page), "I4: page {page} is in two live tables"));
    }

    fn retire(&mut self) {
        let Some(step) = self.in_flight.pop_front() else { return };
        let mut retired = retired(step.id, &[]);
        for row in &step.rows {
            let known = self.known.get_mut(&row.request).expect("pages stay until the step is done (rule 5)");
            known.in_flight -= 1;
            // The sampler does not know of ends from outside and reports what it sees; after its own ends it is silent.
            let silent = known.ended.is_some() && self.random.below(2) == 0;
            if row.want == Want::None || silent {
                continue;
            }
            if self.random.below(40) == 0 {
                retired.ended.push((row.request, RowEnd::NonFinite));
                let tokens = known.tokens_known;
                known.end(Outcome::Failed, tokens);
                continue;
            }
            retired.progressed.push((row.request, 1));
            known.tokens_known += usize::from(known.ended.is_none());
            let tokens = known.tokens_known;
            if tokens == known.max_new_tokens || self.random.below(10) == 0 {
                retired.ended.push((row.request, RowEnd::Eos));
                known.end(Outcome::Finished, tokens);
            }
        }
        self.planner.retire(&retired);
    }

    fn depart(&mut self) {
        let mut leaving: Vec<_> =
            self.known.iter().filter(|(_, k)| k.in_flight == 0).map(|(&id, k)| (id, k.ended)).collect();
        leaving.retain(|(_, ended)| ended.is_some());
        let departures: Vec<_> = self.planner.depart().iter().map(|d| (d.request, Some(d.ended))).collect();
        assert_eq!(departures, leaving, "who leaves, and how");
        let mut back = self.returned.lock().unwrap();
        assert_eq!(back.len(), leaving.len(), "one lease each");
        back.drain(..).for_each(|pages| assert!(self.pool.release(pages) > 0));
        for (id, ended) in leaving {
            self.known.remove(&id);
            self.departed[Outcome::ALL.iter().position(|&o| Some(o) == ended.map(|e| e.outcome)).unwrap()] += 1;
        }
        let held: usize = self.known.values().map(|k| k.pages.len()).sum();
        assert_eq!((self.pool.assigned(), self.pool.free()), (held, LIMITS.pages - held), "I3");
        assert_eq!(self.planner.residents(), self.known.len());
    }

    fn step(&mut self) {
        match self.random.below(8) {
            0 | 1 => self.enqueue(),
            2 if self.random.below(3) == 0 => self.cancel(),
            2..=4 => self.retire(),
            _ => self.plan(),
        }
        self.depart();
    }
}

#[test]
fn a_long_random_history_agrees_with_a_naive_model() {
    let mut departed = [0; 3];
    for seed in 0..200 {
        let mut history = History::new(seed);
        (0..500).for_each(|_| history.step());
        departed.iter_mut().zip(history.departed).for_each(|(all, some)| *all += some);
    }
    assert!(departed.iter().all(|&outcome| outcome > 300), "every kind of end was seen: {departed:?}");
}
