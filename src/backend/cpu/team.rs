//! The compute threads of one backend: a leader that takes queued steps and helpers that follow it through the phases.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use super::forward::{Engine, Outcome, Scratch};
use super::pass::{Pass, Slot, remember};
use super::threads::{Gate, assert_rounding, lock};
use crate::backend::{BackendError, RowOutput, STEPS_IN_FLIGHT, Step, StepOutput, StepTiming, Want};

type Notify = Arc<dyn Fn() + Send + Sync>;

/// Steps on their way in and out.
#[derive(Default)]
struct Desk {
    queued: VecDeque<Step>,
    finished: VecDeque<StepOutput>,
    in_flight: usize,
    failure: Option<String>,
    closing: bool,
}

struct Core {
    engine: Engine,
    desk: Mutex<Desk>,
    work: Condvar,
    notify: Mutex<Option<Notify>>,
    gate: Gate,
    closing: AtomicBool,
    poisons: AtomicBool,
    pass: Mutex<Arc<Pass>>,
    outcomes: Mutex<Vec<(usize, Outcome)>>,
}

/// The threads; dropping it ends and joins them.
pub struct Team {
    core: Arc<Core>,
    threads: Vec<JoinHandle<()>>,
}

impl Team {
    /// Starts one leader and `threads − 1` helpers.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(engine: Engine, threads: usize, slots: usize) -> std::io::Result<Self> {
        let core = Arc::new(Core {
            engine,
            desk: Mutex::default(),
            work: Condvar::new(),
            notify: Mutex::default(),
            gate: Gate::default(),
            closing: AtomicBool::new(false),
            poisons: AtomicBool::new(false),
            pass: Mutex::default(),
            outcomes: Mutex::default(),
        });
        let mut team = Self { core: Arc::clone(&core), threads: Vec::new() };
        for index in 0..threads {
            let core = Arc::clone(&core);
            let body = move || if index == 0 { core.lead(vec![Slot::default(); slots]) } else { core.help() };
            team.threads.push(std::thread::Builder::new().name(format!("compute-{index}")).spawn(body)?);
        }
        Ok(team)
    }

    /// Sets the notifier.
    pub fn on_completion(&self, notify: Notify) {
        *lock(&self.core.notify) = Some(notify);
    }

    /// Poisons before every step from now on.
    pub fn poison(&self) {
        self.core.poisons.store(true, Ordering::Relaxed);
    }

    /// Queues a step.
    ///
    /// # Errors
    /// `Overrun`, `Failed`.
    pub fn submit(&self, step: Step) -> Result<(), BackendError> {
        let mut desk = lock(&self.core.desk);
        if let Some(reason) = &desk.failure {
            return Err(failed(reason));
        }
        if desk.in_flight == STEPS_IN_FLIGHT {
            return Err(BackendError::Overrun);
        }
        desk.in_flight += 1;
        desk.queued.push_back(step);
        self.core.work.notify_one();
        Ok(())
    }

    /// Takes the oldest finished step.
    ///
    /// # Errors
    /// `Failed` once a thread has panicked and what it finished before is taken.
    pub fn poll(&self) -> Result<Option<StepOutput>, BackendError> {
        let mut desk = lock(&self.core.desk);
        match (desk.finished.pop_front(), &desk.failure) {
            (Some(output), _) => {
                desk.in_flight -= 1;
                Ok(Some(output))
            }
            (None, Some(reason)) => Err(failed(reason)),
            (None, None) => Ok(None),
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        lock(&self.core.desk).closing = true;
        self.core.work.notify_all();
        for thread in self.threads.drain(..) {
            // The threads catch their panics; a join that fails has nothing to tell.
            let _ = thread.join();
        }
    }
}

fn failed(reason: &str) -> BackendError {
    BackendError::Failed { backend: "cpu", reason: reason.to_owned() }
}

fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a compute thread panicked".into())
}

impl Core {
    fn lead(&self, mut slots: Vec<Slot>) {
        let mut scratch = Scratch::default();
        let led = catch_unwind(AssertUnwindSafe(|| {
            assert_rounding();
            while let Some(step) = self.next_step() {
                let Some(output) = self.compute(step, &mut slots, &mut scratch) else { break };
                lock(&self.desk).finished.push_back(output);
                self.announce();
            }
        }));
        if let Err(panic) = led {
            self.fail(words(&*panic));
        }
        self.closing.store(true, Ordering::Release);
        self.gate.open();
    }

    fn help(&self) {
        let mut scratch = Scratch::default();
        let helped = catch_unwind(AssertUnwindSafe(|| {
            assert_rounding();
            let mut seen = 0;
            loop {
                seen = self.gate.wait_past(seen);
                if self.closing.load(Ordering::Acquire) {
                    return;
                }
                let pass = Arc::clone(&lock(&self.pass));
                if self.engine.run(&pass, &self.outcomes, &mut scratch).is_err() {
                    return;
                }
            }
        }));
        if let Err(panic) = helped {
            self.fail(words(&*panic));
        }
    }

    /// Sleeps until a step is queued; `None` when the backend is dropped.
    fn next_step(&self) -> Option<Step> {
        let mut desk = lock(&self.desk);
        loop {
            if desk.closing {
                return None;
            }
            if let Some(step) = desk.queued.pop_front() {
                return Some(step);
            }
            desk = self.work.wait(desk).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Runs one step with the helpers; `None` when one of them has panicked.
    fn compute(&self, step: Step, slots: &mut [Slot], scratch: &mut Scratch) -> Option<StepOutput> {
        let begun = Instant::now();
        let geometry = &self.engine.model().geometry;
        if self.poisons.load(Ordering::Relaxed) {
            // SAFETY: the last pass ended at its barrier, and the gate to the next one is shut.
            unsafe { self.engine.poison(&step.bindings) }
        }
        let pass = Arc::new(Pass::new(step, slots, geometry.kv_heads, self.engine.block_tokens()));
        self.engine.reset();
        *lock(&self.pass) = Arc::clone(&pass);
        let launched = Instant::now();
        self.gate.open();
        let selection_us = self.engine.run(&pass, &self.outcomes, scratch).ok()?;
        let mut outcomes = std::mem::take(&mut *lock(&self.outcomes));
        outcomes.sort_unstable_by_key(|(index, _)| *index);
        let rows = collect(&pass, outcomes, slots);
        let timing = StepTiming {
            launch_us: (launched - begun).as_secs_f64() * 1e6,
            device_us: launched.elapsed().as_secs_f64() * 1e6,
            selection_us,
            upload_bytes: 0,
            download_bytes: 0,
            ..StepTiming::default()
        };
        Some(StepOutput { step: pass.id, rows, timing })
    }

    fn announce(&self) {
        let notify = lock(&self.notify).clone();
        if let Some(notify) = notify {
            notify();
        }
    }

    /// Records the first failure, releases the other threads and tells the executor.
    fn fail(&self, reason: String) {
        lock(&self.desk).failure.get_or_insert(reason);
        self.engine.barrier().break_up();
        self.announce();
    }
}

/// Joins outcomes, in the order of `pass.wanted`, to rows; remembers each slot's last token.
fn collect(pass: &Pass, outcomes: Vec<(usize, Outcome)>, slots: &mut [Slot]) -> Vec<RowOutput> {
    let mut rows = Vec::new();
    let mut outcomes = outcomes.into_iter().map(|(_, outcome)| outcome);
    for row in pass.rows.iter().filter(|r| r.want != Want::None) {
        let count = if row.want == Want::All { row.len } else { 1 };
        let mut out =
            RowOutput { request: row.request, tokens: vec![], logprobs: vec![], logits: vec![], finite: true };
        for outcome in outcomes.by_ref().take(count) {
            out.tokens.push(outcome.token);
            out.logprobs.extend(outcome.logprobs);
            out.logits.extend(outcome.logits);
            out.finite &= outcome.finite;
            remember(slots, row, outcome.token);
        }
        rows.push(out);
    }
    rows
}
