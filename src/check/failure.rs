//! A device that fails under live requests (rule 6): on the GPU a kernel raises an exception in the engine's own context, on the CPU a
//! compute thread panics. Every session must get its typed end, what it got before must be a prefix of the undisturbed answer, later
//! requests are refused, the account balances, and the engine can be dropped: all within a bound.
//!
//! A context that has failed stays failed for the life of the process, so a run on the GPU breaks it once.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use actix::{Actor, Addr, Context, Handler};
use tokio::sync::oneshot;

use super::models::{Setup, Subject, Which};
use super::suites::{Failure, Options};
use super::{Dice, Tally};
use crate::actors::admission::messages::Submit;
use crate::actors::session::messages::{SessionEnd, SessionFailure, TokenBatch};
use crate::actors::topology::{Engine, EngineConfig, EngineHandle};
use crate::admission::{Dialect, Outcome, RequestId, RequestSpec, ValidRequest};
use crate::backend::cuda::GraphLimits;
use crate::backend::cuda::trap::Trap;
use crate::backend::{
    Backend, BackendError, BackendFactory, Completion, DeviceCounts, Facts, Input, Rule, Step, StepLimits, StepOutput,
    StepValidator, ValidStep,
};
use crate::model::{MatrixFormat, Profile};

/// Time for everything that follows a failure.
const BOUND: Duration = Duration::from_secs(20);
/// Slots: fewer than requests, so that some wait when the device fails.
const SLOTS: usize = 8;
const REQUESTS: usize = 12;
const GENERATE: usize = 60;

/// What the backend does to itself at one step.
enum Sabotage {
    None,
    /// Springs the trap before this step.
    Trap(Trap),
    /// Gives a compute thread a token that no embedding has. The second validator follows the steps and lets it pass.
    Forge(StepValidator),
}

/// A backend that works until a step.
struct Doomed {
    subject: Subject,
    at: u64,
    sabotage: Sabotage,
}

fn broken(error: impl ToString) -> BackendError {
    BackendError::Failed { backend: "check", reason: error.to_string() }
}

impl Doomed {
    /// A healthy backend for `at` 0.
    fn new(subject: Subject, at: u64) -> Result<Self, BackendError> {
        let sabotage = match (&subject, at) {
            (_, 0) => Sabotage::None,
            (Subject::Cuda(cuda), _) => Sabotage::Trap(Trap::set(cuda.device()).map_err(broken)?),
            (Subject::Cpu(cpu), _) => {
                let limits = StepLimits { vocab: usize::MAX, ..cpu.facts().step_limits() };
                Sabotage::Forge(StepValidator::new(limits))
            }
        };
        Ok(Self { subject, at, sabotage })
    }
}

/// The step with a token that no model has, as the first row's input.
fn forged(mut step: Step) -> Step {
    let Some(row) = step.rows.first_mut() else { return step };
    if row.input == Input::DeviceLast {
        row.input = Input::Tokens;
        step.tokens.insert(0, u32::MAX);
    } else if let Some(token) = step.tokens.first_mut() {
        *token = u32::MAX;
    }
    step
}

impl Backend for Doomed {
    fn facts(&self) -> &Facts {
        self.subject.facts()
    }

    fn counts(&self) -> DeviceCounts {
        self.subject.counts()
    }

    fn completion(&self) -> Completion {
        self.subject.completion()
    }

    fn on_completion(&mut self, notify: Arc<dyn Fn() + Send + Sync>) {
        self.subject.on_completion(notify);
    }

    fn submit(&mut self, step: ValidStep) -> Result<(), BackendError> {
        let now = step.step().id == self.at;
        match &mut self.sabotage {
            Sabotage::None => self.subject.submit(step),
            Sabotage::Trap(trap) => {
                if now {
                    trap.spring().map_err(broken)?;
                }
                self.subject.submit(step)
            }
            Sabotage::Forge(validator) => {
                let step = step.into_step();
                let step = if now { forged(step) } else { step };
                self.subject.submit(validator.check(step).map_err(broken)?)
            }
        }
    }

    fn poll(&mut self) -> Result<Option<StepOutput>, BackendError> {
        self.subject.poll()
    }
}

/// Passes what sessions would get to the thread that checks it.
struct Listener(Sender<TokenBatch>);

impl Actor for Listener {
    type Context = Context<Self>;
}

impl Handler<TokenBatch> for Listener {
    type Result = ();
    fn handle(&mut self, batch: TokenBatch, _: &mut Self::Context) {
        // The check may have given up; then nobody listens.
        let _ = self.0.send(batch);
    }
}

/// A listener on an actix thread of its own, as an HTTP worker would have it.
struct Hub {
    address: Addr<Listener>,
    batches: Receiver<TokenBatch>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Hub {
    fn start() -> Result<Self, Failure> {
        let (sender, batches) = channel();
        let (started, address) = channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            actix::System::new().block_on(async move {
                let _ = started.send(Listener(sender).start());
                let _ = stopped.await;
            });
        });
        Ok(Self { address: address.recv()?, batches, stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        let _ = self.stop.take().map(|stop| stop.send(()));
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

/// What one session got.
#[derive(Debug, Default)]
struct Got {
    tokens: Vec<u32>,
    end: Option<SessionEnd>,
}

fn engine_config() -> EngineConfig {
    EngineConfig {
        max_batch: SLOTS,
        max_queue: 64,
        token_budget: 128,
        chunk_cap: None,
        prefill_max_requests: SLOTS,
        packing: true,
        step_time_target: None,
        max_prompt_tokens: 1024,
        max_new_tokens: 1024,
        // Longer than the bound: a failure must be seen as one, not as a hung step.
        step_timeout: 3 * BOUND,
        pin: None,
        step_trace: None,
    }
}

fn factory(options: &Options, profile: Profile, at: u64) -> BackendFactory {
    let setup = Setup {
        which: options.which,
        pages: 1024,
        slots: SLOTS,
        tokens: 256,
        logit_rows: SLOTS + 1,
        graphs: GraphLimits::default(),
        libraries: options.libraries.clone(),
        kernels: options.kernels.clone(),
        cache_dir: options.cache_dir.clone(),
    };
    let source = options.source.clone();
    Box::new(move || {
        let weights = source.weights(profile, MatrixFormat::Q8_0).map_err(broken)?;
        Ok(Box::new(Doomed::new(Subject::open(weights, profile, &setup)?, at)?) as Box<dyn Backend>)
    })
}

fn submit(engine: &EngineHandle, hub: &Hub, prompt: &[u32], seed: u64) -> Result<RequestId, Failure> {
    let spec = RequestSpec {
        prompt: Arc::from(prompt),
        max_new_tokens: GENERATE,
        rule: Rule::Greedy,
        seed,
        choice: 0,
        eos: Arc::from([]),
        // Half of the rows have log-probabilities: the host's part of a step fails with it.
        logprobs: seed.is_multiple_of(2).then_some(3),
        adjust: None,
        score_prompt: false,
        dialect: Dialect::Internal,
    };
    let permit = engine.try_permit().ok_or("the queue is full")?;
    let id = engine.next_id();
    let request = ValidRequest::new(id, spec, engine.limits())?;
    engine.submit(Submit { request, permit, hub: hub.address.clone().recipient() });
    Ok(id)
}

/// Collects until every session has its end, or the bound.
fn collect(hub: &Hub, ids: &[RequestId]) -> HashMap<RequestId, Got> {
    let mut sessions: HashMap<RequestId, Got> = ids.iter().map(|&id| (id, Got::default())).collect();
    let deadline = Instant::now() + BOUND;
    while sessions.values().any(|got| got.end.is_none()) {
        let Ok(batch) = hub.batches.recv_timeout(deadline.saturating_duration_since(Instant::now())) else { break };
        for entry in batch.entries {
            if let Some(got) = sessions.get_mut(&entry.request).filter(|got| got.end.is_none()) {
                got.tokens.extend(entry.tokens.iter().map(|t| t.id));
                got.end = entry.end;
            }
        }
    }
    sessions
}

/// The reason of a typed engine failure.
fn typed(end: Option<&SessionEnd>) -> Result<&str, String> {
    match end {
        Some(SessionEnd::Failed(SessionFailure::Engine(reason))) => Ok(reason),
        Some(other) => Err(format!("it ended with {other:?}")),
        None => Err(format!("it had no end within {} s", BOUND.as_secs())),
    }
}

/// The answers of a healthy engine, in the order of the prompts.
fn undisturbed(options: &Options, profile: Profile, prompts: &[Vec<u32>]) -> Result<Vec<Vec<u32>>, Failure> {
    let (engine, hub) = (Engine::start(engine_config(), factory(options, profile, 0))?, Hub::start()?);
    let handle = engine.handle();
    let ids = submit_all(&handle, &hub, prompts)?;
    let mut sessions = collect(&hub, &ids);
    let answers: Vec<Vec<u32>> = ids.iter().filter_map(|id| sessions.remove(id)).map(|got| got.tokens).collect();
    if answers.iter().any(|tokens| tokens.len() != GENERATE) {
        return Err("the healthy engine did not answer".into());
    }
    Ok(answers)
}

fn submit_all(handle: &EngineHandle, hub: &Hub, prompts: &[Vec<u32>]) -> Result<Vec<RequestId>, Failure> {
    (0..).zip(prompts).map(|(seed, prompt)| submit(handle, hub, prompt, seed)).collect()
}

fn check(condition: bool, reason: impl FnOnce() -> String) -> Result<(), String> {
    if condition { Ok(()) } else { Err(reason()) }
}

/// Breaks the device at step `at` and checks all that must follow.
fn breaks(
    options: &Options,
    profile: Profile,
    at: u64,
    prompts: &[Vec<u32>],
    want: &[Vec<u32>],
    tally: &mut Tally,
) -> Result<(), Failure> {
    let (engine, hub) = (Engine::start(engine_config(), factory(options, profile, at))?, Hub::start()?);
    let handle = engine.handle();
    let began = Instant::now();
    let ids = submit_all(&handle, &hub, prompts)?;
    let sessions = collect(&hub, &ids);
    let reason = handle.fatal().borrow().clone();
    let mut before = 0;
    for (id, want) in ids.iter().zip(want) {
        let got = &sessions[id];
        before += got.tokens.len();
        let same_reason = typed(got.end.as_ref()).and_then(|said| {
            check(Some(said) == reason.as_deref(), || format!("it was told {said:?}, the flag says {reason:?}"))
        });
        let prefix = check(want.starts_with(&got.tokens), || "its tokens are no prefix of the healthy answer".into());
        tally.case(same_reason.and(prefix).map_err(|e| format!("step {at}: {id}: {e}")));
    }
    let expected = if options.which == Which::Cpu { "cpu step failed" } else { "cuda step failed" };
    let said = reason.as_deref().unwrap_or("nothing");
    tally.case(check(said.contains(expected), || format!("step {at}: the flag says {said:?}")));
    let late = submit(&handle, &hub, &prompts[0], 0)?;
    let refused = collect(&hub, &[late]);
    tally.case(typed(refused[&late].end.as_ref()).map(|_| ()).map_err(|e| format!("a later request: {e}")));
    tally.case(settled(&handle, began + BOUND).map_err(|e| format!("step {at}: {e}")));
    drop(engine);
    let took = began.elapsed();
    tally.case(check(took < BOUND, || format!("step {at}: it took {took:?} until the engine was gone")));
    say!("  step {at}: {before} tokens before it, gone after {} ms: {said}", took.as_millis());
    Ok(())
}

/// Nothing is live, every page and permit is back, and everybody accepted has failed.
fn settled(handle: &EngineHandle, deadline: Instant) -> Result<(), String> {
    loop {
        let account = handle.snapshot().account.clone();
        let at_rest = account.live() == 0 && account.kv_pages_used == 0 && handle.permits().held() == 0;
        if at_rest && account.balances() && account.ended_as(Outcome::Failed) == account.accepted {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(format!("the account does not come to rest: {account:?}"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs the suite; returns the failures.
///
/// # Errors
/// An engine that does not start.
pub fn run(options: &Options) -> Result<u64, Failure> {
    let (profiles, steps): (&[Profile], &[u64]) = match options.which {
        Which::Cpu => (&options.profiles, &[1, 2, 7, 30]),
        // The context is lost for this process with the first failure.
        Which::Cuda => (options.profiles.get(..1).unwrap_or_default(), &[30]),
    };
    let mut failures = 0;
    for &profile in profiles {
        let mut dice = Dice::new(options.seed ^ 0xfa11);
        let vocab = options.source.weights(profile, MatrixFormat::Q8_0)?.geometry.vocab;
        let prompts: Vec<Vec<u32>> =
            (0..REQUESTS).map(|_| (0..dice.between(1, 60)).map(|_| dice.below(vocab) as u32).collect()).collect();
        let name = format!("Failure {} {} {:?}", profile.name(), options.source.name(), options.which);
        let mut tally = Tally::new(name, options.seed);
        let want = undisturbed(options, profile, &prompts)?;
        for &at in steps {
            breaks(options, profile, at, &prompts, &want, &mut tally)?;
        }
        if options.which == Which::Cuda {
            let again = Engine::start(engine_config(), factory(options, profile, 0));
            let said = again.err().map(|e| e.to_string());
            tally.case(said.map(|_| ()).ok_or_else(|| "a lost device was opened again".into()));
        }
        tally.print();
        failures += tally.failures();
    }
    Ok(failures)
}
