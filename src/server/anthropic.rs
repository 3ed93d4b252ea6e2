//! POST /v1/messages and /v1/messages/count_tokens.

use actix_web::HttpRequest;
use bytes::Bytes;
use serde_json::{Value, json};

use super::respond::{Asked, Draft, Transport};
use super::{Service, random_bits, text};
use crate::actors::session::FieldNames;
use crate::admission::Dialect;
use crate::protocol::anthropic::Conversation;
use crate::protocol::anthropic::messages::{MessageFormat, MessagesRequest};
use crate::protocol::errors::{ApiError, ErrorDialect};

/// POST /v1/messages.
///
/// # Errors
/// The first thing that is wrong with the request.
pub async fn messages(service: &Service, _: &HttpRequest, body: Bytes) -> Result<Asked, ApiError> {
    let asked = text::parsed(body, MessagesRequest::parse).await?;
    let Conversation { model, turns, end } = asked.conversation;
    service.check_model(&model)?;
    let prompt = text::chat(service, turns, end).await?;
    let serial = service.serial();
    let (name, request_id) = (format!("msg_{serial}"), format!("req_{serial}"));
    // Without a seed the dialect promises no repetition.
    let seed = asked.seed.unwrap_or_else(random_bits);
    tracing::debug!(name, seed, user = asked.user.as_deref().unwrap_or(""), "seed");
    let draft = Draft {
        max_new_tokens: asked.max_tokens,
        sampling: asked.sampling,
        adjust: None,
        seed,
        ignore_eos: asked.ignore_eos,
        logprobs: None,
        score_prompt: false,
        dialect: Dialect::Anthropic,
    };
    let id = (ErrorDialect::Anthropic.id_header(), request_id.clone());
    let format = MessageFormat { id: name.clone(), request_id, model, input_tokens: prompt.len() };
    Ok(Asked {
        specs: draft.specs(service, &prompt, 1).collect(),
        stop: asked.stop,
        prompt_tokens: prompt.len(),
        name,
        id,
        names: FieldNames { prompt: "messages", max_tokens: "max_tokens" },
        format: Box::new(format),
        transport: if asked.stream { Transport::Stream } else { Transport::Whole },
    })
}

/// POST /v1/messages/count_tokens: what `usage.input_tokens` would be.
///
/// # Errors
/// The first thing that is wrong with the request.
pub async fn count_tokens(service: &Service, body: Bytes) -> Result<Value, ApiError> {
    let Conversation { model, turns, end } = text::parsed(body, Conversation::parse).await?;
    service.check_model(&model)?;
    let prompt = text::chat(service, turns, end).await?;
    Ok(json!({"input_tokens": prompt.len()}))
}
