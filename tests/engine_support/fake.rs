//! A backend that computes nothing but checks everything: slots, positions, page tables and order. A token is a hash of the whole
//! history of its sequence, so that any mix-up of rows, positions or inputs changes the text.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crucible::admission::RequestId;
use crucible::backend::{
    Backend, BackendError, BackendFactory, Completion, DeviceCounts, Facts, GraphCounts, HostLogits, Input, Row,
    RowOutput, STEPS_IN_FLIGHT, Start, Step, StepOutput, StepTiming, TokenLogprobs, ValidStep, Want,
};

/// Vocabulary of the fake model.
pub const VOCAB: usize = 1000;
/// Positions per page.
pub const PAGE: usize = 16;

/// What the backend does besides its work.
#[derive(Clone)]
pub struct Script {
    pub completion: Completion,
    pub pages: usize,
    pub slots: usize,
    /// Rows of a step whose logits the host may read.
    pub logit_rows: usize,
    pub step_time: Duration,
    /// Called with each submitted step's id; what it returns happens.
    pub fault: Arc<dyn Fn(u64) -> Fault + Send + Sync>,
    /// Requests whose logits are not finite from this token index on.
    pub not_finite: NotFinite,
    /// While true, steps are accepted and none completes.
    pub hold: Arc<AtomicBool>,
    pub seen: Arc<Mutex<Vec<Step>>>,
    pub polls: Arc<AtomicUsize>,
}

/// What may go wrong with a step.
#[derive(Clone, Copy, PartialEq)]
pub enum Fault {
    Nothing,
    FailAtSubmit,
    FailAtPoll,
    Hang,
    Panic,
    /// `submit` never returns: the engine's thread is stuck in it.
    BlockInSubmit,
    /// `poll` never returns once this step is at the front.
    BlockInPoll,
}

/// What a lost driver does to its caller.
fn never_return() -> ! {
    loop {
        std::thread::park();
    }
}

impl Default for Script {
    fn default() -> Self {
        Self {
            completion: Completion::Notified,
            pages: 1024,
            slots: 16,
            logit_rows: 16 + 40,
            step_time: Duration::ZERO,
            fault: Arc::new(|_| Fault::Nothing),
            not_finite: Arc::new(|_, _| false),
            hold: Arc::default(),
            seen: Arc::default(),
            polls: Arc::default(),
        }
    }
}

/// What the backend has counted after this many steps: three graphs recorded at its start, one more with each step.
pub fn counted(steps: u64) -> DeviceCounts {
    let decode = GraphCounts { captures: 3 + steps, replays: steps, ..GraphCounts::default() };
    DeviceCounts { graphs: [decode, GraphCounts::default(), GraphCounts::default()], allocations: 7 }
}

/// The token that follows a history.
pub fn next_token(history: &[u32]) -> u32 {
    let hash = history.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, &t| (h ^ u64::from(t)).wrapping_mul(0x100_0000_01b3));
    ((hash >> 17) % VOCAB as u64) as u32
}

/// The log-probabilities of a token: its id decides them.
pub fn logprobs(token: u32, top: u8) -> TokenLogprobs {
    let other = |n: u32| ((token + n) % VOCAB as u32, -f64::from(token) - f64::from(n));
    TokenLogprobs { chosen: -f64::from(token), top: (0..u32::from(top)).map(other).collect() }
}

/// The logits after a history: another order of the vocabulary for each.
pub fn logits(history: &[u32]) -> Vec<f32> {
    let turn = next_token(history);
    (0..VOCAB as u32).map(|id| ((id * 7 + turn) % VOCAB as u32) as f32 / 64.0).collect()
}

/// What a sequence generates when it is alone in the world.
pub fn expected(prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut history = prompt.to_vec();
    for _ in 0..tokens {
        history.push(next_token(&history));
    }
    history.split_off(prompt.len())
}

struct Slot {
    request: RequestId,
    len: usize,
    pages: Vec<u32>,
    /// Selected and not yet computed as an input.
    last: Option<u32>,
}

struct Pending {
    output: Result<StepOutput, String>,
    ready_at: Option<Instant>,
    blocks: bool,
}

/// Whether the logits of a request are not finite at a token index.
pub type NotFinite = Arc<dyn Fn(RequestId, u32) -> bool + Send + Sync>;

/// The fake model: follows every slot and refuses what a device could not compute. A sequence's history lives in its pages and is
/// read back through its page table, so that a page in two hands changes somebody's text.
pub struct Machine {
    memory: HashMap<(u32, usize), u32>,
    slots: HashMap<u32, Slot>,
    last_id: u64,
    not_finite: NotFinite,
}

struct Fake {
    facts: Facts,
    script: Script,
    machine: Machine,
    queue: VecDeque<Pending>,
    notify: Option<Arc<dyn Fn() + Send + Sync>>,
}

/// Makes the backend where the engine wants it.
pub fn factory(script: Script) -> BackendFactory {
    Box::new(move || {
        let facts = Facts {
            device: "fake".into(),
            pages: script.pages,
            page_tokens: PAGE,
            slots: script.slots,
            max_step_tokens: 2048,
            host_logit_rows: script.logit_rows,
            context: 1 << 14,
            vocab: VOCAB,
            weight_bytes: 0,
            kv_bytes: 0,
        };
        let machine = Machine::new(Arc::clone(&script.not_finite));
        Ok(Box::new(Fake { facts, script, machine, queue: VecDeque::new(), notify: None }) as Box<dyn Backend>)
    })
}

impl Machine {
    /// No slot bound.
    pub fn new(not_finite: NotFinite) -> Self {
        Self { memory: HashMap::new(), slots: HashMap::new(), last_id: 0, not_finite }
    }

    /// Computes one step.
    pub fn run(&mut self, step: &Step) -> StepOutput {
        assert_eq!(step.id, self.last_id + 1, "ids ascend by one");
        assert!(!step.rows.is_empty());
        self.last_id = step.id;
        for binding in &step.bindings {
            let (request, pages) = (binding.request, binding.pages.clone());
            let old = self.slots.insert(binding.slot, Slot { request, len: 0, pages, last: None });
            assert!(old.is_none_or(|o| o.request != request), "a slot is bound once per request");
        }
        let mut tokens = step.tokens.iter().copied();
        let rows = step.rows.iter().filter_map(|row| self.run_row(row, &mut tokens)).collect();
        assert!(tokens.next().is_none(), "every token belongs to a row");
        let download_bytes = 4 * step.rows.len() as u64;
        let timing = StepTiming { download_bytes, counts: counted(self.last_id), ..StepTiming::default() };
        StepOutput { step: step.id, rows, timing }
    }

    fn run_row(&mut self, row: &Row, tokens: &mut impl Iterator<Item = u32>) -> Option<RowOutput> {
        let slot = self.slots.get_mut(&row.slot).expect("a bound slot");
        assert_eq!(slot.request, row.request, "the slot belongs to the row's request");
        let inputs: Vec<u32> = match (row.start, row.input) {
            (Start::Host(position), Input::Tokens) => {
                assert_eq!(position as usize, slot.len, "slices are consecutive");
                tokens.take(row.len as usize).collect()
            }
            (Start::Device, Input::DeviceLast) => vec![slot.last.take().expect("a selected token")],
            other => panic!("rows are prefill or decode, not {other:?}"),
        };
        assert_eq!(inputs.len(), row.len as usize);
        assert!(slot.len + inputs.len() <= slot.pages.len() * PAGE, "positions stay inside the lease");
        for input in inputs {
            self.memory.insert((slot.pages[slot.len / PAGE], slot.len % PAGE), input);
            slot.len += 1;
        }
        if row.want == Want::None {
            return None;
        }
        let history: Vec<_> = (0..slot.len).map(|p| self.memory[&(slot.pages[p / PAGE], p % PAGE)]).collect();
        let first = if row.want == Want::All { slot.len - row.len as usize } else { slot.len - 1 };
        let ends = first + 1..=slot.len;
        let tokens: Vec<u32> = ends.clone().map(|end| next_token(&history[..end])).collect();
        slot.last = tokens.last().copied();
        let wanted = row.logprobs.map(|top| tokens.iter().map(|&t| logprobs(t, top)).collect());
        let host = row.host_logits == HostLogits::Yes;
        Some(RowOutput {
            request: row.request,
            tokens,
            logprobs: wanted.unwrap_or_default(),
            logits: if host { ends.map(|end| logits(&history[..end])).collect() } else { Vec::new() },
            finite: !(self.not_finite)(row.request, row.sampling.token_index),
        })
    }
}

impl Fake {
    fn notify_at(&self, ready_at: Option<Instant>) {
        let (Some(notify), Some(ready_at)) = (self.notify.clone(), ready_at) else { return };
        let hold = Arc::clone(&self.script.hold);
        std::thread::spawn(move || {
            while Instant::now() < ready_at || hold.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_micros(50));
            }
            notify();
        });
    }
}

impl Backend for Fake {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn counts(&self) -> DeviceCounts {
        counted(self.machine.last_id)
    }

    fn completion(&self) -> Completion {
        self.script.completion
    }

    fn on_completion(&mut self, notify: Arc<dyn Fn() + Send + Sync>) {
        self.notify = Some(notify);
    }

    fn submit(&mut self, step: ValidStep) -> Result<(), BackendError> {
        if self.queue.len() >= STEPS_IN_FLIGHT {
            return Err(BackendError::Overrun);
        }
        let step = step.into_step();
        let fault = (self.script.fault)(step.id);
        let failed = || BackendError::Failed { backend: "fake", reason: "scripted".into() };
        match fault {
            Fault::Panic => panic!("scripted panic of the backend"),
            Fault::FailAtSubmit => return Err(failed()),
            Fault::BlockInSubmit => never_return(),
            _ => {}
        }
        assert!(step.token_rows() <= self.facts.max_step_tokens);
        let output = self.machine.run(&step);
        let output = if fault == Fault::FailAtPoll { Err("scripted".into()) } else { Ok(output) };
        self.script.seen.lock().unwrap().push(step);
        let last_ready = self.queue.back().and_then(|p| p.ready_at).unwrap_or_else(Instant::now);
        let ready_at = (fault != Fault::Hang).then(|| last_ready.max(Instant::now()) + self.script.step_time);
        self.queue.push_back(Pending { output, ready_at, blocks: fault == Fault::BlockInPoll });
        self.notify_at(ready_at);
        Ok(())
    }

    fn poll(&mut self) -> Result<Option<StepOutput>, BackendError> {
        self.script.polls.fetch_add(1, Ordering::Relaxed);
        let held = self.script.hold.load(Ordering::Acquire);
        let ready = self.queue.front().and_then(|p| p.ready_at).is_some_and(|at| at <= Instant::now());
        if held || !ready {
            return Ok(None);
        }
        let Some(done) = self.queue.pop_front() else { return Ok(None) };
        if done.blocks {
            never_return();
        }
        done.output.map(Some).map_err(|reason| BackendError::Failed { backend: "fake", reason })
    }
}
