//! Starts the engine arbiter with its five actors and the scorer's thread, and is the only file that knows every address.

use std::collections::VecDeque;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use actix::{Addr, AsyncContext, Context};
use tokio::sync::{oneshot, watch};

use super::admission::AdmissionActor;
use super::admission::messages::{Cancel, Drain, EngineFailed, StopHit, Submit};
use super::board::Board;
use super::clock::Clock;
use super::executor::{ExecutorActor, Flight, StepTrace};
use super::fatal::FatalFlag;
use super::pages::PagesActor;
use super::pages::messages::Release;
use super::planner::PlannerActor;
use super::sampler::SamplerActor;
use super::scorer::ScorerThread;
use super::session::messages::{SessionEnd, SessionFailure, TokenBatch, TokenEntry};
use super::watchdog::{StepTimer, Watchdog};
use super::{executor, planner};
use crate::admission::{Admission, FinishedSample, Limits, QueuePermit, QueuePermits, RequestId, RequestIds, Snapshot};
use crate::backend::{Backend, BackendError, BackendFactory, Facts, StepValidator};
use crate::pages::{PageHome, Pool};
use crate::planner::{Planner, PlannerConfig};
use crate::sampler::Sampler;

/// What the engine is started with; every value checked by the configuration.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Resident requests at most (`limits.max_batch`).
    pub max_batch: usize,
    /// Waiting requests at most (`limits.max_queue`).
    pub max_queue: usize,
    /// Prompt tokens per prefill plan (`prefill.token_budget`).
    pub token_budget: usize,
    /// Step time that the budget adapts to (`prefill.step_time_target_us`); absent is off.
    pub step_time_target: Option<Duration>,
    /// Prompt tokens per request and plan (`prefill.chunk_cap`); absent is off.
    pub chunk_cap: Option<usize>,
    /// Requests per prefill plan (`prefill.max_requests`).
    pub prefill_max_requests: usize,
    /// Whether a prefill plan may hold several requests (`prefill.packing`); off is one request a plan.
    pub packing: bool,
    /// `limits.max_prompt_tokens`.
    pub max_prompt_tokens: usize,
    /// `limits.max_new_tokens`.
    pub max_new_tokens: usize,
    /// A step that takes longer is fatal (`executor.step_timeout_ms`).
    pub step_timeout: Duration,
    /// CPU of the engine thread (`executor.pin`).
    pub pin: Option<usize>,
    /// JSON lines, one per step (`telemetry.step_trace`).
    pub step_trace: Option<std::path::PathBuf>,
}

/// Why the engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The backend refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A thread of the engine could not be made or ended at once.
    #[error("a thread of the engine did not start: {0}")]
    Thread(String),
    /// The configuration and the backend do not fit each other.
    #[error("{0}")]
    Mismatch(String),
    /// `telemetry.step_trace` cannot be written.
    #[error("cannot create the step trace {path}: {source}")]
    Trace {
        /// The file.
        path: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// Finished samples not yet taken into the histograms, under the same lock as the snapshot: whoever renders takes both at once.
pub struct Published {
    /// The latest account.
    pub snapshot: Arc<Snapshot>,
    /// Samples of every request that the snapshot counts as finished and no earlier `take_published` returned.
    pub samples: Vec<FinishedSample>,
}

/// What HTTP workers hold of the engine: cheap to clone, safe to use from any thread.
#[derive(Clone)]
pub struct EngineHandle {
    admission: Addr<AdmissionActor>,
    board: Arc<Board>,
    ids: Arc<RequestIds>,
    permits: QueuePermits,
    limits: Arc<Limits>,
    facts: Arc<Facts>,
    fatal: FatalFlag,
}

impl EngineHandle {
    /// A fresh request id; register the session under it before `submit`.
    pub fn next_id(&self) -> RequestId {
        self.ids.next()
    }

    /// A place in the waiting queue, or none: answer 429 at once.
    pub fn try_permit(&self) -> Option<QueuePermit> {
        self.permits.try_take()
    }

    /// `n` places in the waiting queue at once, or none.
    pub fn try_permits(&self, n: usize) -> Option<Vec<QueuePermit>> {
        self.permits.try_take_many(n)
    }

    /// The queue's counters.
    pub fn permits(&self) -> &QueuePermits {
        &self.permits
    }

    /// Bounds for `ValidRequest::new`.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The backend.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Sends a request to Admission. A dead engine answers through the hub.
    pub fn submit(&self, submit: Submit) {
        if self.admission.connected() {
            return self.admission.do_send(submit);
        }
        let reason = self.fatal.reason().unwrap_or_else(|| Arc::from("it was stopped"));
        let end = Some(SessionEnd::Failed(SessionFailure::Engine(reason)));
        let entry = TokenEntry { request: submit.request.id(), prompt_scores: Vec::new(), tokens: Vec::new(), end };
        submit.hub.do_send(TokenBatch { entries: vec![entry] });
    }

    /// Ends a request: the client is gone. Idempotent.
    pub fn cancel(&self, request: RequestId) {
        self.admission.do_send(Cancel { request });
    }

    /// Ends a request at a stop string. Idempotent.
    pub fn stop_hit(&self, request: RequestId, token_index: u32) {
        self.admission.do_send(StopHit { request, token_index });
    }

    /// The latest published account.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.board.snapshot()
    }

    /// The latest account together with the samples that belong to it; each sample is returned once.
    pub fn take_published(&self) -> Published {
        self.board.take()
    }

    /// Turns to the error's text once, when the engine dies; every session watches it.
    pub fn fatal(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.fatal.watch()
    }

    /// Refuses new work from now on and completes when nothing is live; at the deadline what is left fails in the typed way.
    /// An error from the receiver says that the engine is gone.
    pub fn drain(&self, deadline: Duration) -> oneshot::Receiver<()> {
        let (done, drained) = oneshot::channel();
        self.admission.do_send(Drain { done, deadline });
        drained
    }
}

/// Time that the thread of a dead engine has to end. It may be stuck in a call of the backend for good, and is then left behind.
const DEAD_THREAD_PATIENCE: Duration = Duration::from_secs(2);

/// The running engine; dropping it stops the arbiter and joins its thread.
pub struct Engine {
    handle: EngineHandle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    /// Dropped after the thread has ended.
    _watchdog: Watchdog,
}

impl Engine {
    /// Makes the backend on a new thread and starts the actors there.
    ///
    /// # Errors
    /// What the backend said, or why the thread did not start.
    pub fn start(config: EngineConfig, backend: BackendFactory) -> Result<Self, EngineError> {
        let (stop, stopped) = oneshot::channel();
        let (started, starting) = mpsc::channel();
        let fatal = FatalFlag::new();
        let no_thread = |error: std::io::Error| EngineError::Thread(error.to_string());
        let watchdog = Watchdog::start(config.step_timeout, fatal.clone()).map_err(no_thread)?;
        let timer = watchdog.timer().ok_or_else(|| EngineError::Thread("the watchdog has ended".into()))?;
        let on_thread = fatal.clone();
        let body = move || {
            on_thread.guard_this_thread();
            actix::System::new().block_on(live(config, backend, (on_thread, timer), started, stopped));
        };
        let thread = std::thread::Builder::new().name("crucible-engine".into()).spawn(body).map_err(no_thread)?;
        match starting.recv() {
            Ok(started) => Ok(Self { handle: started?, stop: Some(stop), thread: Some(thread), _watchdog: watchdog }),
            Err(_) => {
                let reason = fatal.reason().map_or_else(|| "it ended at once".to_owned(), |r| r.to_string());
                Err(EngineError::Thread(reason))
            }
        }
    }

    /// For the HTTP workers.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        let Some(thread) = self.thread.take() else { return };
        let mut dead_since = None;
        while !thread.is_finished() {
            if self.handle.fatal.reason().is_some() {
                let since: Instant = *dead_since.get_or_insert_with(Instant::now);
                if since.elapsed() > DEAD_THREAD_PATIENCE {
                    return tracing::warn!("the engine's thread does not answer and is left behind");
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = thread.join();
    }
}

/// The engine thread's life: start the actors, close them when the flag is raised, end when told to.
async fn live(
    config: EngineConfig,
    backend: BackendFactory,
    (fatal, timer): (FatalFlag, StepTimer),
    started: mpsc::Sender<Result<EngineHandle, EngineError>>,
    mut stopped: oneshot::Receiver<()>,
) {
    let engine = backend().map_err(EngineError::from).and_then(|b| start_actors(&config, b, &fatal, timer));
    let engine = match engine.and_then(|engine| pin_this_thread(config.pin).map(|()| engine)) {
        Ok(engine) => engine,
        Err(error) => {
            let _ = started.send(Err(error));
            return;
        }
    };
    let mut flag = fatal.watch();
    let _ = started.send(Ok(engine.handle.clone()));
    tokio::select! {
        _ = &mut stopped => return,
        _ = flag.wait_for(Option::is_some) => engine.close(&fatal),
    }
    let _ = stopped.await;
}

/// Pins the engine thread, after the backend has made its own threads: they would inherit the mask.
fn pin_this_thread(cpu: Option<usize>) -> Result<(), EngineError> {
    match cpu {
        Some(id) if !core_affinity::set_for_current(core_affinity::CoreId { id }) => {
            Err(EngineError::Mismatch(format!("executor.pin is {id}: this process may not run on that CPU")))
        }
        _ => Ok(()),
    }
}

/// Every address that the topology needs after the start.
struct Running {
    handle: EngineHandle,
    planner: Addr<PlannerActor>,
    executor: Addr<ExecutorActor>,
    _scorer: ScorerThread,
}

impl Running {
    /// Nothing limps on: no step is submitted, no plan is made, every session is told. A panicked actor's mailbox is gone; the
    /// others do their part.
    fn close(&self, fatal: &FatalFlag) {
        let reason = fatal.reason().unwrap_or_else(|| Arc::from("unknown"));
        self.executor.do_send(executor::messages::Close);
        self.handle.admission.do_send(EngineFailed { reason });
        self.planner.do_send(planner::messages::Close);
    }
}

fn check_fit(config: &EngineConfig, facts: &Facts) -> Result<(), EngineError> {
    let mismatch = |text: String| Err(EngineError::Mismatch(text));
    let (batch, budget) = (config.max_batch, config.token_budget);
    if batch == 0 || batch > facts.slots {
        return mismatch(format!("limits.max_batch is {batch}, the backend has {} slots", facts.slots));
    }
    if facts.max_step_tokens <= batch {
        let most = facts.max_step_tokens;
        return mismatch(format!("limits.max_batch is {batch}, a step takes {most} tokens: one more is needed"));
    }
    if batch >= facts.host_logit_rows {
        let most = facts.host_logit_rows;
        return mismatch(format!(
            "limits.max_batch is {batch}, the backend gives the host logits of {most} rows a step: one more is needed"
        ));
    }
    if budget == 0 || config.chunk_cap == Some(0) || config.prefill_max_requests == 0 {
        return mismatch("prefill.token_budget, chunk_cap and max_requests must be at least 1".into());
    }
    Ok(())
}

fn planner_config(config: &EngineConfig, facts: &Facts) -> PlannerConfig {
    PlannerConfig {
        slots: config.max_batch,
        token_budget: config.token_budget,
        step_time_target: config.step_time_target,
        chunk_cap: config.chunk_cap.unwrap_or(usize::MAX),
        max_requests: if config.packing { config.prefill_max_requests } else { 1 },
        scored_positions: facts.host_logit_rows.saturating_sub(config.max_batch),
        max_step_tokens: facts.max_step_tokens,
    }
}

fn make_handle(
    config: &EngineConfig,
    facts: &Facts,
    admission: Addr<AdmissionActor>,
    fatal: &FatalFlag,
) -> EngineHandle {
    let limits = Limits {
        context: facts.context,
        max_prompt_tokens: config.max_prompt_tokens,
        max_new_tokens: config.max_new_tokens,
        vocab: facts.vocab,
        pages: facts.pages,
        page_tokens: facts.page_tokens,
    };
    EngineHandle {
        admission,
        board: Arc::new(Board::default()),
        ids: Arc::default(),
        permits: QueuePermits::new(config.max_queue),
        limits: Arc::new(limits),
        facts: Arc::new(facts.clone()),
        fatal: fatal.clone(),
    }
}

/// The five actors know each other in a ring, so their addresses are made before any of them runs. The scorer runs at once: nothing
/// comes before the sampler's first step.
fn start_actors(
    config: &EngineConfig,
    backend: Box<dyn Backend>,
    fatal: &FatalFlag,
    timer: StepTimer,
) -> Result<Running, EngineError> {
    let facts = backend.facts().clone();
    check_fit(config, &facts)?;
    let trace = config
        .step_trace
        .as_ref()
        .map(|path| StepTrace::create(path).map_err(|source| EngineError::Trace { path: path.clone(), source }));
    let (trace, clock) = (trace.transpose()?, Clock::start());
    let (admission_ctx, pages_ctx, planner_ctx) = (Context::new(), Context::<PagesActor>::new(), Context::new());
    let (executor_ctx, sampler_ctx) = (Context::<ExecutorActor>::new(), Context::new());
    let (admission, pages) = (admission_ctx.address(), pages_ctx.address());
    let (planner, executor, sampler) = (planner_ctx.address(), executor_ctx.address(), sampler_ctx.address());
    let handle = make_handle(config, &facts, admission.clone(), fatal);
    let no_thread = |error: std::io::Error| EngineError::Thread(error.to_string());
    let (_scorer, scorer) = ScorerThread::start(planner.clone(), fatal.clone()).map_err(no_thread)?;

    let mut core = Admission::new(config.max_batch, facts.pages);
    let mut planner_core = Planner::new(planner_config(config, &facts));
    planner_core.start_from(backend.counts());
    core.progressed(planner_core.counters().clone(), 0);
    handle.board.publish(core.account(), Vec::new());
    let (board, drains) = (Arc::clone(&handle.board), Vec::new());
    admission_ctx.run(AdmissionActor { core, pages: pages.clone(), planner: planner.clone(), board, clock, drains });

    let home: PageHome = Arc::new(move |returned| pages.do_send(Release(returned)));
    pages_ctx.run(PagesActor { pool: Pool::new(facts.pages), home, admission: admission.clone() });

    let core = planner_core;
    let (to_executor, to_sampler, to_admission) = (executor.clone(), sampler.clone(), admission.clone());
    planner_ctx.run(PlannerActor { core, executor: to_executor, sampler: to_sampler, admission: to_admission, clock });

    let (outbox, to_planner) = (VecDeque::new(), planner.clone());
    sampler_ctx.run(SamplerActor { core: Sampler::default(), planner: to_planner, admission, scorer, outbox });

    let validator = StepValidator::new(facts.step_limits());
    let (flight, fatal) = (Flight::default(), fatal.clone());
    executor_ctx.run(ExecutorActor { backend, validator, sampler, fatal, clock, timer, trace, flight });
    Ok(Running { handle, planner, executor, _scorer })
}
