//! A session's actor: a thin shell over `core::SessionCore` for one HTTP request and the one or several sequences that answer it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::{Actor, ActorContext, ActorFutureExt, Addr, AsyncContext, Context, Handler, Message, WrapFuture};

use super::core::{SessionCore, SessionEffect};
use super::hub::SessionHub;
use super::messages::{SessionFailure, TokenEntry};
use super::output::Output;
use super::registry::Registry;
use crate::actors::admission::messages::Submit;
use crate::actors::topology::EngineHandle;
use crate::admission::{Dialect, RequestId, RequestSpec, ValidRequest};
use crate::protocol::choice::ChoiceDecoder;
use crate::protocol::errors::{ApiError, Code};

/// Shortest wait between two looks at a silent stream.
const TIMER_MIN: Duration = Duration::from_millis(1);

/// News of one of the session's sequences.
#[derive(Message)]
#[rtype(result = "()")]
pub struct News(pub TokenEntry);

/// The client is gone.
#[derive(Message)]
#[rtype(result = "()")]
pub struct ClientGone;

/// What the session of a request is made of.
pub struct Plan {
    /// The public name of the request, for the log.
    pub name: String,
    /// One per choice; the same dialect.
    pub choices: Vec<(RequestSpec, ChoiceDecoder)>,
    /// Where the answer goes.
    pub output: Output,
    /// Prompt tokens, each prompt once.
    pub prompt_tokens: usize,
    /// Names of the prompt and the length in the dialect, for errors.
    pub names: FieldNames,
    /// Silence after which a stream gets a comment.
    pub keep_alive: Duration,
}

/// Names of fields in a dialect.
#[derive(Clone, Copy, Debug)]
pub struct FieldNames {
    /// Of the prompt.
    pub prompt: &'static str,
    /// Of the number of tokens.
    pub max_tokens: &'static str,
}

/// Tells the session that its client is gone, unless it has ended before.
pub struct SessionGuard(Addr<Session>);

impl Drop for SessionGuard {
    fn drop(&mut self) {
        self.0.do_send(ClientGone);
    }
}

/// The session actor.
pub struct Session {
    name: String,
    engine: EngineHandle,
    registry: Arc<Registry>,
    core: SessionCore,
    dialect: Dialect,
    keep_alive: Duration,
    started: Instant,
    last_frame: Instant,
}

/// Checks a request, takes its permits, starts its session and submits it.
///
/// # Errors
/// A bound of the engine is exceeded, the queue is full, or the engine is dead. Nothing was submitted then.
pub fn launch(
    engine: &EngineHandle,
    registry: &Arc<Registry>,
    hub: &Addr<SessionHub>,
    plan: Plan,
) -> Result<SessionGuard, ApiError> {
    if let Some(reason) = engine.fatal().borrow().as_ref() {
        return Err(ApiError::from(&SessionFailure::Engine(Arc::clone(reason))));
    }
    let (specs, decoders): (Vec<_>, Vec<_>) = plan.choices.into_iter().unzip();
    let dialect = specs.first().map_or(Dialect::Internal, |s| s.dialect);
    // Choice 0 is the first of each prompt.
    let prompts = specs.iter().filter(|spec| spec.choice == 0).count();
    let mut begun = 0;
    let check = |spec: RequestSpec| {
        begun += usize::from(spec.choice == 0);
        let of_prompt = |e| {
            let prompt = ApiError::one_of(plan.names.prompt, begun.saturating_sub(1), prompts);
            ApiError::validation(&e, &prompt, plan.names.max_tokens)
        };
        ValidRequest::new(engine.next_id(), spec, engine.limits()).map_err(of_prompt)
    };
    let requests: Vec<ValidRequest> = specs.into_iter().map(check).collect::<Result<_, _>>()?;
    fits_the_queue(engine, 1, requests.len())?;
    let permits = engine.try_permits(requests.len());
    let permits = permits.ok_or_else(|| ApiError::queue_full(engine.permits().limit()))?;
    let choices = requests.iter().map(ValidRequest::id).zip(decoders);
    let now = Instant::now();
    let session = Session {
        name: plan.name,
        engine: engine.clone(),
        registry: Arc::clone(registry),
        core: SessionCore::new(choices, plan.output, plan.prompt_tokens),
        dialect,
        keep_alive: plan.keep_alive,
        started: now,
        last_frame: now,
    }
    .start();
    for request in &requests {
        registry.insert(request.id(), session.clone());
    }
    for (request, permit) in requests.into_iter().zip(permits) {
        engine.submit(Submit { request, permit, hub: hub.clone().recipient() });
    }
    Ok(SessionGuard(session))
}

/// Whether a request of so many prompts with `n` answers each can ever be queued.
///
/// # Errors
/// The waiting queue is shorter.
pub fn fits_the_queue(engine: &EngineHandle, prompts: usize, n: usize) -> Result<(), ApiError> {
    let (limit, answers) = (engine.permits().limit(), prompts * n);
    if answers <= limit {
        return Ok(());
    }
    let text = format!("the request asks for {answers} answers, the waiting queue holds {limit}");
    Err(ApiError::about(Code::InvalidValue, if prompts > limit { "prompt" } else { "n" }, text))
}

impl Session {
    /// Lets the core act and carries out what it asks for.
    fn act(&mut self, ctx: &mut Context<Self>, act: impl FnOnce(&mut SessionCore, &mut Vec<SessionEffect>)) {
        let (mut effects, sent) = (Vec::new(), self.core.frames_sent());
        act(&mut self.core, &mut effects);
        if self.core.frames_sent() > sent {
            self.last_frame = Instant::now();
        }
        for effect in effects {
            if matches!(effect, SessionEffect::Over(_)) {
                ctx.stop();
            }
            self.carry_out(effect);
        }
    }

    fn carry_out(&self, effect: SessionEffect) {
        match effect {
            SessionEffect::StopHit { request, token_index } => self.engine.stop_hit(request, token_index),
            SessionEffect::Cancel(request) => self.engine.cancel(request),
            SessionEffect::Forget(request) => self.registry.remove(request),
            SessionEffect::Over(outcome) => self.log(&outcome),
        }
    }

    /// Sends a sign of life whenever the stream has been silent for `keep_alive` since its last frame.
    fn watch_silence(&mut self, ctx: &mut Context<Self>) {
        let due = self.keep_alive.saturating_sub(self.last_frame.elapsed()).max(TIMER_MIN);
        ctx.run_later(due, |session, ctx| {
            if session.last_frame.elapsed() >= session.keep_alive {
                session.act(ctx, SessionCore::keep_alive);
            }
            session.watch_silence(ctx);
        });
    }

    fn log(&self, outcome: &str) {
        let usage = self.core.usage();
        let mut requests = self.core.requests();
        tracing::info!(
            name = self.name,
            choices = requests.len(),
            request = %requests.next().unwrap_or(RequestId(0)),
            dialect = self.dialect.name(),
            prompt_tokens = usage.prompt_tokens,
            generated_tokens = usage.completion_tokens,
            ms = self.started.elapsed().as_secs_f64() * 1e3,
            outcome,
            "request ended"
        );
    }

    fn watch_engine(&self, ctx: &mut Context<Self>) {
        let mut fatal = self.engine.fatal();
        let reason = async move {
            match fatal.wait_for(Option::is_some).await {
                Ok(reason) => reason.as_ref().map_or_else(|| Arc::from("unknown"), Arc::clone),
                Err(_) => Arc::from("it has stopped"),
            }
        };
        ctx.spawn(reason.into_actor(self).map(|reason, session, ctx| {
            let error = ApiError::from(&SessionFailure::Engine(reason));
            session.act(ctx, |core, effects| core.fail(&error, effects));
        }));
    }
}

impl Actor for Session {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.watch_engine(ctx);
        self.act(ctx, SessionCore::open);
        if self.core.streams() {
            self.watch_silence(ctx);
        }
    }
}

/// A session that its thread ends with, or that panicked, leaves like any other: the engine hears of what it need not compute any more,
/// and a client that is still there gets a typed end.
impl Drop for Session {
    fn drop(&mut self) {
        let error = ApiError::new(Code::EngineFailed, "the session of this request failed; send the request again");
        let mut effects = Vec::new();
        self.core.fail(&error, &mut effects);
        for effect in effects {
            self.carry_out(effect);
        }
    }
}

impl Handler<News> for Session {
    type Result = ();

    fn handle(&mut self, News(entry): News, ctx: &mut Self::Context) {
        #[cfg(feature = "fault-injection")]
        crate::faults::panics(crate::faults::Point::Session);
        self.act(ctx, |core, effects| core.news(entry, effects));
    }
}

impl Handler<ClientGone> for Session {
    type Result = ();

    fn handle(&mut self, _: ClientGone, ctx: &mut Self::Context) {
        self.act(ctx, SessionCore::client_gone);
    }
}
