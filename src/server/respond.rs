//! The one way from a request of any dialect to its response: read the body, have the dialect translate it, launch a session, answer
//! as one body or as a stream. A dialect's own part is `Asked`: what to compute, and how the answer reads. What needs no engine is
//! answered at once.

use std::sync::Arc;

use actix_web::http::header::{self, ContentType};
use actix_web::{HttpRequest, HttpResponse, Route, web};
use bytes::Bytes;
use serde_json::Value;

use super::connection::holding;
use super::socket::Client;
use super::{Service, WorkerHub, intake};
use crate::actors::session::{FieldNames, FrameBody, Output, Plan, launch};
use crate::admission::{Dialect, RequestSpec};
use crate::backend::{Adjust, LogprobsWanted};
use crate::protocol::choice::ChoiceDecoder;
use crate::protocol::errors::{ApiError, Code, ErrorDialect};
use crate::protocol::format::Format;
use crate::protocol::sampling::Sampling;

/// Entries of an answer that is one body, at most: a token or one of its alternatives, of every choice. The body is built on the
/// worker, about a hundred bytes an entry with log-probabilities.
pub const WHOLE_ENTRIES_MAX: usize = 1 << 20;

/// How an answer travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// One JSON body.
    Whole,
    /// Events.
    Stream,
}

/// A request as every dialect ends up.
pub struct Asked {
    /// One for each choice.
    pub specs: Vec<RequestSpec>,
    /// Stop strings of every choice.
    pub stop: Vec<String>,
    /// Prompt tokens, each prompt once.
    pub prompt_tokens: usize,
    /// The public name of the request, for the log.
    pub name: String,
    /// The header that tells the client an id.
    pub id: (&'static str, String),
    /// Field names for errors.
    pub names: FieldNames,
    /// How the answer reads.
    pub format: Box<dyn Format>,
    /// How it travels.
    pub transport: Transport,
}

/// What the sequences of a request have in common.
pub struct Draft {
    /// Most tokens to generate.
    pub max_new_tokens: usize,
    /// Selection.
    pub sampling: Sampling,
    /// Penalties and bias before it.
    pub adjust: Option<Arc<Adjust>>,
    /// Seed of the draws.
    pub seed: u64,
    /// Whether end-of-sequence tokens are tokens like others.
    pub ignore_eos: bool,
    /// Log-probabilities wanted.
    pub logprobs: LogprobsWanted,
    /// Whether those of the prompt's own tokens are, too.
    pub score_prompt: bool,
    /// The surface.
    pub dialect: Dialect,
}

impl Draft {
    /// The `n` sequences that continue `prompt`: one seed, told apart by their choice index, so that each has its own random stream
    /// and choice 0 is what the request gets with n = 1.
    pub fn specs(&self, service: &Service, prompt: &Arc<[u32]>, n: usize) -> impl Iterator<Item = RequestSpec> {
        let eos = if self.ignore_eos { Arc::from([]) } else { service.tokenizer.eos_ids() };
        let spec = RequestSpec {
            prompt: Arc::clone(prompt),
            max_new_tokens: self.max_new_tokens,
            rule: self.sampling.rule(),
            adjust: self.adjust.clone(),
            seed: self.seed,
            choice: 0,
            eos,
            logprobs: self.logprobs,
            score_prompt: self.score_prompt && prompt.len() > 1,
            dialect: self.dialect,
        };
        (0..n as u32).map(move |choice| RequestSpec { choice, ..spec.clone() })
    }
}

/// The route of requests that `translate` turns into work for the engine. Dropping the future of an answer, as a closed connection
/// does, cancels the work.
pub fn answering<T>(translate: T) -> Route
where
    T: AsyncFn(&Service, &HttpRequest, Bytes) -> Result<Asked, ApiError> + Clone + 'static,
{
    let answer =
        move |request: HttpRequest, payload: web::Payload, service: web::Data<Service>, hub: web::Data<WorkerHub>| {
            let translate = translate.clone();
            async move {
                let answered = async {
                    service.accepting()?;
                    let body = intake::body(&service, &request, payload).await?;
                    let waiting = Client::waits(&request);
                    let asked = translate(&service, &request, body).await?;
                    let answer = respond(&service, &hub, asked).await?;
                    Ok(answer.map(|response| response.map_body(|_, body| holding(body, waiting))))
                };
                match answered.await {
                    Ok(Ok(response)) => response,
                    Ok(Err(failure)) => intake::error(&service, &request, &failure),
                    Err(refusal) => intake::refuse(&service, &request, &refusal),
                }
            }
        };
    web::post().to(answer)
}

/// The route of requests that `tell` answers without the engine.
pub fn telling<T>(tell: T) -> Route
where
    T: AsyncFn(&Service, Bytes) -> Result<Value, ApiError> + Clone + 'static,
{
    let answer = move |request: HttpRequest, payload: web::Payload, service: web::Data<Service>| {
        let tell = tell.clone();
        async move {
            let told = async {
                let body = intake::body(&service, &request, payload).await?;
                let answer = tell(&service, body).await?;
                let id = (ErrorDialect::of_request(&request).id_header(), format!("req_{}", service.serial()));
                Ok(HttpResponse::Ok().insert_header(id).json(answer))
            };
            told.await.unwrap_or_else(|e: ApiError| intake::refuse(&service, &request, &e))
        }
    };
    web::post().to(answer)
}

/// Whether the answer, at its longest, may be one body. `longest` is the longest sequence in tokens; a request for more is refused for
/// that reason later.
///
/// # Errors
/// It may have more than `WHOLE_ENTRIES_MAX` entries.
fn fits_one_body(specs: &[RequestSpec], longest: usize, names: FieldNames) -> Result<(), ApiError> {
    let entries = |spec: &RequestSpec| {
        let scored = if spec.score_prompt { spec.prompt.len() } else { 0 };
        let tokens = spec.max_new_tokens.saturating_add(scored).min(longest);
        tokens.saturating_mul(1 + usize::from(spec.logprobs.unwrap_or(0)))
    };
    let entries = specs.iter().map(entries).fold(0, usize::saturating_add);
    if entries <= WHOLE_ENTRIES_MAX {
        return Ok(());
    }
    let text = format!(
        "the answer may have {entries} entries (choices × tokens × (1 + alternatives)), a body holds {WHOLE_ENTRIES_MAX}; \
         stream it, or ask for fewer choices, tokens or alternatives"
    );
    Err(ApiError::about(Code::InvalidValue, names.max_tokens, text))
}

/// The response, or how the request failed after the engine had been given it: the engine's account counts that one.
///
/// # Errors
/// The request was refused before.
async fn respond(service: &Service, hub: &WorkerHub, asked: Asked) -> Result<Result<HttpResponse, ApiError>, ApiError> {
    let Asked { specs, stop, prompt_tokens, name, id, names, format, transport } = asked;
    if transport == Transport::Whole {
        fits_one_body(&specs, service.engine.limits().longest_sequence(), names)?;
    }
    let decoder = || ChoiceDecoder::new(Box::new(service.tokenizer.detokenizer()), &stop);
    let choices: Vec<_> = specs.into_iter().map(|spec| (spec, decoder())).collect();
    let (count, keep_alive) = (choices.len(), service.config.server.sse_keep_alive);
    let start = |output| {
        service.accepting()?;
        service.metrics.arrived(&service.engine, count);
        let plan = Plan { name, choices, output, prompt_tokens, names, keep_alive };
        launch(&service.engine, &service.registry, hub.address(service), plan)
    };
    let mut builder = HttpResponse::Ok();
    builder.insert_header(id);
    match transport {
        Transport::Whole => {
            let (output, outcome) = Output::whole(format, count);
            let guard = start(output)?;
            let outcome = outcome.await;
            drop(guard);
            let ended = |_| {
                Err(ApiError::new(Code::EngineFailed, "the session ended without an answer; send the request again"))
            };
            Ok(outcome.unwrap_or_else(ended).map(|body| builder.content_type(ContentType::json()).body(body)))
        }
        Transport::Stream => {
            let (output, frames) = Output::frames(format, service.config.server.stream_buffer_bytes);
            let guard = start(output)?;
            builder.content_type("text/event-stream; charset=utf-8");
            builder.insert_header((header::CACHE_CONTROL, "no-cache")).insert_header(("x-accel-buffering", "no"));
            Ok(Ok(builder.streaming(FrameBody::new(frames, guard))))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Rule;

    #[test]
    fn an_answer_of_very_many_entries_is_not_one_body() {
        let spec = |max_new_tokens, logprobs, score_prompt| RequestSpec {
            prompt: vec![1; 1_000].into(),
            max_new_tokens,
            rule: Rule::Greedy,
            adjust: None,
            seed: 0,
            choice: 0,
            eos: Arc::from([]),
            logprobs,
            score_prompt,
            dialect: Dialect::OpenaiCompletions,
        };
        let names = FieldNames { prompt: "prompt", max_tokens: "max_tokens" };
        let fits = |n: usize, spec: RequestSpec| fits_one_body(&vec![spec; n], 8_192, names);
        assert!(fits(1_024, spec(1_024, None, false)).is_ok());
        assert!(fits(1_024, spec(1_025, None, false)).is_err());
        assert!(fits(48, spec(1_024, Some(20), false)).is_ok());
        // Seen: such a request made gigabytes of JSON on the worker.
        let error = fits(64, spec(1_024, Some(20), false)).expect_err("too many");
        assert_eq!((error.code, error.param.as_deref()), (Code::InvalidValue, Some("max_tokens")));
        assert!(fits(48, spec(100, Some(20), true)).is_err(), "the prompt's tokens have entries too");
        assert!(fits(6, spec(usize::MAX, Some(20), false)).is_ok(), "refused for its length later");
    }
}
