//! A session: one HTTP request and the one or several sequences that answer it. It turns their tokens into the response, finds stop
//! strings, notices a client that is gone or too slow, and ends exactly once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::{Actor, ActorContext, ActorFutureExt, Addr, AsyncContext, Context, Handler, Message, WrapFuture};

use super::hub::SessionHub;
use super::messages::{SessionEnd, SessionFailure, TokenEntry};
use super::output::{Output, SlowReader};
use super::registry::{Registered, Registry};
use crate::actors::admission::messages::Submit;
use crate::actors::topology::EngineHandle;
use crate::admission::{Dialect, RequestId, RequestSpec, ValidRequest};
use crate::protocol::choice::{ChoiceDecoder, ChoiceEnd, FinishReason};
use crate::protocol::errors::{ApiError, Code};
use crate::protocol::sse;
use crate::protocol::stream::Usage;

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

struct Choice {
    request: RequestId,
    decoder: ChoiceDecoder,
    live: bool,
}

/// The session actor.
pub struct Session {
    name: String,
    engine: EngineHandle,
    registry: Arc<Registry>,
    choices: Vec<Choice>,
    output: Output,
    prompt_tokens: usize,
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
    let check = |spec| ValidRequest::new(engine.next_id(), spec, engine.limits());
    let requests: Vec<ValidRequest> = specs
        .into_iter()
        .map(check)
        .collect::<Result<_, _>>()
        .map_err(|e| ApiError::validation(&e, plan.names.prompt, plan.names.max_tokens))?;
    let limit = engine.permits().limit();
    if requests.len() > limit {
        let text = format!("the request asks for {} answers, the waiting queue holds {limit}", requests.len());
        return Err(ApiError::about(Code::InvalidValue, "n", text));
    }
    let permits: Vec<_> = requests.iter().map_while(|_| engine.try_permit()).collect();
    if permits.len() < requests.len() {
        return Err(ApiError::queue_full(limit));
    }
    let choices = requests
        .iter()
        .zip(decoders)
        .map(|(request, decoder)| Choice { request: request.id(), decoder, live: true })
        .collect();
    let now = Instant::now();
    let session = Session {
        name: plan.name,
        engine: engine.clone(),
        registry: Arc::clone(registry),
        choices,
        output: plan.output,
        prompt_tokens: plan.prompt_tokens,
        dialect,
        keep_alive: plan.keep_alive,
        started: now,
        last_frame: now,
    }
    .start();
    for request in &requests {
        registry.insert(request.id(), Registered { hub: hub.clone(), session: session.clone() });
    }
    for (request, permit) in requests.into_iter().zip(permits) {
        engine.submit(Submit { request, permit, hub: hub.clone().recipient() });
    }
    Ok(SessionGuard(session))
}

impl Session {
    fn news(&mut self, entry: TokenEntry, ctx: &mut Context<Self>) -> Result<(), SlowReader> {
        let Some(at) = self.choices.iter().position(|c| c.request == entry.request && c.live) else { return Ok(()) };
        for token in entry.tokens {
            let index = token.index;
            let delta = self.choices[at].decoder.push(token);
            let stopped = delta.stopped;
            self.output.token(at, delta)?;
            self.last_frame = Instant::now();
            if stopped {
                self.engine.stop_hit(entry.request, index);
                let end = self.choices[at].decoder.stop();
                return self.end(at, &end, ctx);
            }
        }
        let reason = match entry.end {
            None => return Ok(()),
            Some(SessionEnd::Failed(failure)) => {
                self.choices[at].live = false;
                self.fail(&failure, ctx);
                return Ok(());
            }
            Some(SessionEnd::Eos) => FinishReason::Stop,
            Some(SessionEnd::Length) => FinishReason::Length,
        };
        let end = self.choices[at].decoder.finish(reason);
        self.end(at, &end, ctx)
    }

    fn end(&mut self, at: usize, end: &ChoiceEnd, ctx: &mut Context<Self>) -> Result<(), SlowReader> {
        self.choices[at].live = false;
        self.registry.remove(self.choices[at].request);
        self.output.end(at, end)?;
        if self.choices.iter().any(|c| c.live) {
            return Ok(());
        }
        self.log(end.reason.name());
        self.output.close(self.usage())?;
        ctx.stop();
        Ok(())
    }

    fn fail(&mut self, failure: &SessionFailure, ctx: &mut Context<Self>) {
        self.log(&failure.to_string());
        self.output.fail(&ApiError::from(failure));
        ctx.stop();
    }

    fn cut(&mut self, ctx: &mut Context<Self>) {
        self.log("cut: the client reads too slowly");
        ctx.stop();
    }

    fn usage(&self) -> Usage {
        let completion_tokens = self.choices.iter().map(|c| c.decoder.tokens() as usize).sum();
        Usage { prompt_tokens: self.prompt_tokens, completion_tokens }
    }

    fn log(&self, outcome: &str) {
        let usage = self.usage();
        tracing::info!(
            name = self.name,
            request = %self.choices.first().map_or(RequestId(0), |c| c.request),
            choices = self.choices.len(),
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
            session.fail(&SessionFailure::Engine(reason), ctx);
        }));
    }
}

impl Actor for Session {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.watch_engine(ctx);
        if self.output.open().is_err() {
            return self.cut(ctx);
        }
        if matches!(self.output, Output::Frames(_)) {
            ctx.run_interval(self.keep_alive, |session, ctx| {
                let silent = session.last_frame.elapsed() >= session.keep_alive;
                if silent && session.output.keep_alive(sse::KEEP_ALIVE).is_err() {
                    session.cut(ctx);
                }
            });
        }
    }

    /// Whatever ended the session: the engine hears of what it need not compute any more.
    fn stopped(&mut self, _: &mut Self::Context) {
        for choice in &self.choices {
            self.registry.remove(choice.request);
            if choice.live {
                self.engine.cancel(choice.request);
            }
        }
    }
}

impl Handler<News> for Session {
    type Result = ();

    fn handle(&mut self, News(entry): News, ctx: &mut Self::Context) {
        #[cfg(feature = "fault-injection")]
        crate::faults::panics(crate::faults::Point::Session);
        if self.news(entry, ctx).is_err() {
            self.cut(ctx);
        }
    }
}

impl Handler<ClientGone> for Session {
    type Result = ();

    fn handle(&mut self, _: ClientGone, ctx: &mut Self::Context) {
        self.log("cancelled: the client is gone");
        ctx.stop();
    }
}
