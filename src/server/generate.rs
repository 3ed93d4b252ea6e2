//! POST /v1/generate and /v1/generate/stream, and what all generating endpoints share: from a checked request to its response.

use std::sync::Arc;

use actix_web::http::header;
use actix_web::{HttpRequest, HttpResponse, web};

use super::{Service, WorkerHub, intake, text};
use crate::actors::session::{FieldNames, FrameBody, Output, Plan, launch};
use crate::admission::{Dialect, RequestSpec};
use crate::protocol::choice::{Answer, ChoiceDecoder};
use crate::protocol::errors::{ApiError, Code};
use crate::protocol::native::{self, Generate, NativeStream};
use crate::protocol::stream::{StreamFormat, Usage};

/// A request as every dialect ends up: what to compute and what to call it.
pub struct Work {
    /// One for each choice.
    pub specs: Vec<RequestSpec>,
    /// Stop strings of every choice.
    pub stop: Vec<String>,
    /// Prompt tokens, each prompt once.
    pub prompt_tokens: usize,
    /// Public id.
    pub name: String,
    /// Field names for errors.
    pub names: FieldNames,
}

impl Work {
    fn plan(self, service: &Service, output: Output) -> Plan {
        let decoder = || ChoiceDecoder::new(Box::new(service.tokenizer.detokenizer()), &self.stop);
        Plan {
            name: self.name,
            choices: self.specs.into_iter().map(|spec| (spec, decoder())).collect(),
            output,
            prompt_tokens: self.prompt_tokens,
            names: self.names,
            keep_alive: service.config.server.sse_keep_alive,
        }
    }
}

/// Computes whole answers. Dropping the future, as a closed connection does, cancels the work.
///
/// # Errors
/// The request is refused or fails.
pub async fn whole(service: &Service, hub: &WorkerHub, work: Work) -> Result<(Vec<Answer>, Usage), ApiError> {
    let (output, outcome) = Output::whole(work.specs.len());
    let plan = work.plan(service, output);
    let guard = start(service, hub, plan)?;
    let outcome = outcome.await;
    drop(guard);
    outcome.unwrap_or_else(|_| Err(ApiError::new(Code::EngineFailed, "the session ended without an answer")))
}

/// Starts a stream of events.
///
/// # Errors
/// The request is refused.
pub fn stream(
    service: &Service,
    hub: &WorkerHub,
    work: Work,
    format: Box<dyn StreamFormat>,
) -> Result<HttpResponse, ApiError> {
    let (output, frames) = Output::frames(format, service.config.server.stream_buffer_bytes);
    let name = work.name.clone();
    let guard = start(service, hub, work.plan(service, output))?;
    Ok(HttpResponse::Ok()
        .content_type("text/event-stream; charset=utf-8")
        .insert_header((header::CACHE_CONTROL, "no-cache"))
        .insert_header(("x-accel-buffering", "no"))
        .insert_header(("x-request-id", name))
        .streaming(FrameBody::new(frames, guard)))
}

fn start(service: &Service, hub: &WorkerHub, plan: Plan) -> Result<crate::actors::session::SessionGuard, ApiError> {
    service.accepting()?;
    service.metrics.arrived(&service.engine);
    launch(&service.engine, &service.registry, hub.address(service), plan)
}

/// POST /v1/generate.
pub async fn generate(
    request: HttpRequest,
    payload: web::Payload,
    service: web::Data<Service>,
    hub: web::Data<WorkerHub>,
) -> HttpResponse {
    let answered = async {
        let (asked, work) = read(&service, &request, payload).await?;
        let name = work.name.clone();
        let (answers, usage) = whole(&service, &hub, work).await?;
        let answer = answers.first().ok_or_else(|| ApiError::new(Code::EngineFailed, "there is no answer"))?;
        let body = native::response(answer, usage.prompt_tokens, asked.logprobs);
        Ok(HttpResponse::Ok().insert_header(("x-request-id", name)).json(body))
    };
    answered.await.unwrap_or_else(|e| intake::refuse(&service, &request, &e))
}

/// POST /v1/generate/stream.
pub async fn generate_stream(
    request: HttpRequest,
    payload: web::Payload,
    service: web::Data<Service>,
    hub: web::Data<WorkerHub>,
) -> HttpResponse {
    let answered = async {
        let (_, work) = read(&service, &request, payload).await?;
        stream(&service, &hub, work, Box::new(NativeStream))
    };
    answered.await.unwrap_or_else(|e: ApiError| intake::refuse(&service, &request, &e))
}

async fn read(service: &Service, request: &HttpRequest, payload: web::Payload) -> Result<(Generate, Work), ApiError> {
    service.accepting()?;
    let body = intake::body(service, request, payload).await?;
    let mut asked = Generate::parse(&body)?;
    let prompt = std::mem::replace(&mut asked.prompt, native::Prompt::Tokens(Vec::new()));
    let field = match prompt {
        native::Prompt::Text(_) => "prompt",
        native::Prompt::Tokens(_) => "prompt_tokens",
    };
    let prompt = text::prompt(service, prompt, field).await?;
    let spec = RequestSpec {
        prompt: Arc::clone(&prompt),
        max_new_tokens: asked.max_tokens,
        rule: asked.sampling.rule(),
        adjust: None,
        seed: asked.seed,
        choice: 0,
        eos: if asked.ignore_eos { Arc::from([]) } else { service.tokenizer.eos_ids() },
        logprobs: asked.logprobs,
        dialect: Dialect::Native,
    };
    let work = Work {
        specs: vec![spec],
        stop: asked.stop.clone(),
        prompt_tokens: prompt.len(),
        name: service.public_id("gen"),
        names: FieldNames { prompt: field, max_tokens: "max_tokens" },
    };
    Ok((asked, work))
}
