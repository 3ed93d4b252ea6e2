//! POST /v1/generate and /v1/generate/stream.

use actix_web::{HttpRequest, HttpResponse, web};
use bytes::Bytes;

use super::respond::{Asked, Draft, Transport, answer};
use super::{Service, WorkerHub, text};
use crate::actors::session::FieldNames;
use crate::admission::Dialect;
use crate::protocol::errors::{ApiError, ErrorDialect};
use crate::protocol::native::{Generate, NativeFormat, Prompt};

/// POST /v1/generate.
pub async fn generate(
    request: HttpRequest,
    payload: web::Payload,
    service: web::Data<Service>,
    hub: web::Data<WorkerHub>,
) -> HttpResponse {
    answer(request, payload, service, hub, async |service, body| translate(service, body, Transport::Whole).await).await
}

/// POST /v1/generate/stream.
pub async fn generate_stream(
    request: HttpRequest,
    payload: web::Payload,
    service: web::Data<Service>,
    hub: web::Data<WorkerHub>,
) -> HttpResponse {
    answer(request, payload, service, hub, async |service, body| translate(service, body, Transport::Stream).await)
        .await
}

async fn translate(service: &Service, body: Bytes, transport: Transport) -> Result<Asked, ApiError> {
    let asked = Generate::parse(&body)?;
    let field = match asked.prompt {
        Prompt::Text(_) => "prompt",
        Prompt::Tokens(_) => "prompt_tokens",
    };
    let prompt = text::prompt(service, asked.prompt, field).await?;
    let draft = Draft {
        max_new_tokens: asked.max_tokens,
        sampling: asked.sampling,
        adjust: None,
        seed: asked.seed,
        ignore_eos: asked.ignore_eos,
        logprobs: asked.logprobs,
        score_prompt: false,
        dialect: Dialect::Native,
    };
    let name = format!("gen-{}", service.serial());
    Ok(Asked {
        specs: draft.specs(service, &prompt, 1).collect(),
        stop: asked.stop,
        prompt_tokens: prompt.len(),
        id: (ErrorDialect::Native.id_header(), name.clone()),
        name,
        names: FieldNames { prompt: field, max_tokens: "max_tokens" },
        format: Box::new(NativeFormat { logprobs: asked.logprobs }),
        transport,
    })
}
