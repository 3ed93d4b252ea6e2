//! 100,000 seeded events against a naive model. After every plan: budgets, request limit and chunk cap hold, every active
//! sequence decodes, no ended row is in it (I6), slices are consecutive, nobody waits longer than the queue was long (fairness),
//! no page is in two live page tables (I4), and no more rows of logits exist than there is room for. After every step: who leaves,
//! and how.

use std::collections::{BTreeMap, HashSet, VecDeque};

use super::*;
use crate::backend::{STEPS_IN_FLIGHT, Step};
use crate::planner::seeded::Seeded;

/// What a naive observer knows of one resident.
struct Known {
    prompt: usize,
    scored: bool,
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

    /// Whether its next slice is for the scorer: the last position never is.
    fn scores_next(&self) -> bool {
        self.scored && self.prompt_planned + 1 < self.prompt
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
    /// Logits that exist or will: positions planned and not scored.
    logits: BTreeMap<RequestId, usize>,
    /// Whose logits the scorer has.
    at_scorer: Vec<RequestId>,
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
            scored_positions: 1 + random.below(70),
        };
        Self {
            random,
            planner: Planner::new(config.clone()),
            config,
            pool: Pool::new(LIMITS.pages),
            returned: Arc::default(),
            known: BTreeMap::new(),
            in_flight: VecDeque::new(),
            logits: BTreeMap::new(),
            at_scorer: Vec::new(),
            next_id: 1,
            departed: [0; 3],
        }
    }

    fn pending(&self) -> usize {
        self.known.values().filter(|k| k.wants_prefill()).count()
    }

    /// Prompts that can go on now: none waits for the scorer with its own logits, or for room for them.
    fn ready(&self) -> HashSet<RequestId> {
        let room = self.logits.values().sum::<usize>() < self.config.scored_positions;
        let can = |(id, k): &(&RequestId, &Known)| !self.logits.contains_key(id) && (room || !k.scores_next());
        self.known.iter().filter(|(_, k)| k.wants_prefill()).filter(can).map(|(&id, _)| id).collect()
    }

    fn enqueue(&mut self) {
        if self.known.len() >= self.config.slots {
            return;
        }
        let (prompt, max_new_tokens) = (1 + self.random.below(120), 1 + self.random.below(12));
        let scored = self.random.below(3) == 0;
        let spec = RequestSpec { score_prompt: scored, ..spec(self.next_id, prompt, max_new_tokens) };
        let sequence = sequence_of(self.next_id, spec);
        self.next_id += 1;
        let sink = Arc::clone(&self.returned);
        let home: PageHome = Arc::new(move |back| sink.lock().unwrap().push(back));
        let id = sequence.request.id();
        let lease = self.pool.reserve(id, sequence.request.pages(), home).unwrap();
        let known = Known {
            prompt,
            scored,
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
        let ready = self.ready();
        let Some(PlannedStep { step, dialects }) = self.planner.plan() else {
            let nothing_to_do = decodes.is_empty() && ready.is_empty();
            assert!(!self.in_flight.is_empty() || nothing_to_do, "an idle device and work to do");
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
                    assert!(ready.contains(&row.request), "its last slice is not scored");
                    known.patience = usize::MAX;
                }
            }
            let want = match known.prompt_planned == known.prompt {
                true => Want::Last,
                false if known.scored => Want::All,
                false => Want::None,
            };
            assert_eq!(row.want, want);
            if row.want == Want::All {
                self.logits.insert(row.request, row.len as usize);
            }
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
        assert_eq!(ready.is_empty(), prompt_tokens == 0, "a prompt that can go on does");
        assert!(
            self.logits.values().sum::<usize>() <= self.config.scored_positions,
            "more logits than there is room for"
        );
        self.check_fairness(&ready);
        self.in_flight.push_back(step);
    }

    /// Who had a slice queues again behind the others; everybody else who was ready has waited one plan more.
    fn check_fairness(&mut self, ready: &HashSet<RequestId>) {
        let pending = self.pending();
        for (id, known) in self.known.iter_mut().filter(|(_, k)| k.wants_prefill()) {
            let waited = usize::from(ready.contains(id));
            known.patience = if known.patience == usize::MAX { pending } else { known.patience - waited };
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
            let bad = row.want != Want::None && !silent && self.random.below(40) == 0;
            if row.want == Want::All && (silent || bad) {
                self.logits.remove(&row.request);
            } else if row.want == Want::All {
                self.at_scorer.push(row.request);
                retired.scoring.push(row.request);
            }
            if bad {
                retired.ended.push((row.request, RowEnd::NonFinite));
                let tokens = known.tokens_known;
                known.end(Outcome::Failed, tokens);
            }
            if row.want != Want::Last || silent || bad {
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

    /// The scorer is done with some slice.
    fn score(&mut self) {
        if self.at_scorer.is_empty() {
            return;
        }
        let request = self.at_scorer.swap_remove(self.random.below(self.at_scorer.len()));
        let positions = self.logits.remove(&request).expect("scored once");
        self.planner.scored(request, positions as u32);
    }

    fn step(&mut self) {
        match self.random.below(9) {
            8 => self.score(),
            0 | 1 => self.enqueue(),
            2 if self.random.below(3) == 0 => self.cancel(),
            2..=4 => self.retire(),
            _ => self.plan(),
        }
        self.depart();
        assert_eq!(self.planner.unscored(), self.logits.values().sum::<usize>(), "every credit comes back once");
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
