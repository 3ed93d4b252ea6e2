//! POST /v1/generate and /v1/generate/stream.

use actix_web::HttpRequest;
use actix_web::http::header;
use bytes::Bytes;

use super::respond::{Asked, Draft, Transport};
use super::{Service, text};
use crate::actors::session::FieldNames;
use crate::admission::Dialect;
use crate::protocol::errors::{ApiError, ErrorDialect};
use crate::protocol::native::{Generate, NativeFormat, Prompt};

/// POST /v1/generate.
///
/// # Errors
/// The first thing that is wrong with the request.
pub async fn whole(service: &Service, request: &HttpRequest, body: Bytes) -> Result<Asked, ApiError> {
    translate(service, body, Transport::Whole, surface(request)).await
}

/// POST /v1/generate/stream.
///
/// # Errors
/// The first thing that is wrong with the request.
pub async fn stream(service: &Service, request: &HttpRequest, body: Bytes) -> Result<Asked, ApiError> {
    translate(service, body, Transport::Stream, surface(request)).await
}

/// The terminal client says who it is; the account tells its requests from others of this dialect.
fn surface(request: &HttpRequest) -> Dialect {
    let agent = request.headers().get(header::USER_AGENT).and_then(|agent| agent.to_str().ok());
    if agent.is_some_and(|agent| agent.starts_with("crucible-tui/")) { Dialect::Tui } else { Dialect::Native }
}

async fn translate(service: &Service, body: Bytes, transport: Transport, dialect: Dialect) -> Result<Asked, ApiError> {
    let asked = text::parsed(body, Generate::parse).await?;
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
        dialect,
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
