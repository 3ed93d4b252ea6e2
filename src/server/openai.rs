//! POST /v1/chat/completions and /v1/completions.

use std::sync::Arc;

use actix_web::HttpRequest;
use bytes::Bytes;

use super::respond::{Asked, Draft, Transport};
use super::{Service, random_bits, text, unix_seconds};
use crate::actors::session::{FieldNames, fits_the_queue};
use crate::admission::Dialect;
use crate::backend::LogprobsWanted;
use crate::model::chat_template::GenerationPrompt;
use crate::protocol::errors::{ApiError, Code, ErrorDialect};
use crate::protocol::openai::chat::{ChatFormat, ChatRequest};
use crate::protocol::openai::completions::{CompletionFormat, CompletionRequest, Echo};
use crate::protocol::openai::envelope::Envelope;
use crate::protocol::openai::{Common, Delivery, MaxTokens, most_choices};

/// Sequences of one completion request at most.
const MAX_SEQUENCES: usize = 1_024;
/// Tokens for a completion that names no number, as OpenAI has it.
const COMPLETION_TOKENS: usize = 16;

/// POST /v1/chat/completions.
///
/// # Errors
/// The first thing that is wrong with the request.
pub async fn chat(service: &Service, _: &HttpRequest, body: Bytes) -> Result<Asked, ApiError> {
    let most = most_choices(service.engine.permits().limit());
    let parse = move |bytes: &[u8]| ChatRequest::parse(bytes, most);
    let ChatRequest { common, messages, max_tokens, logprobs } = text::parsed(body, parse).await?;
    service.check_model(&common.model)?;
    let prompt = text::chat(service, messages, GenerationPrompt::Add).await?;
    let max_new_tokens = max_tokens.map_or_else(|| room(service, prompt.len()), |limit| limit.tokens);
    let envelope = envelope(service, "chatcmpl-", common.delivery);
    let name = envelope.id.clone();
    Ok(Asked {
        specs: draft(&common, &name, max_new_tokens, logprobs, Dialect::OpenaiChat)
            .specs(service, &prompt, common.n)
            .collect(),
        stop: common.stop,
        prompt_tokens: prompt.len(),
        id: (ErrorDialect::Openai.id_header(), name.clone()),
        name,
        names: names("messages", max_tokens),
        format: Box::new(ChatFormat { envelope, n: common.n, logprobs }),
        transport: transport(common.delivery),
    })
}

/// POST /v1/completions.
///
/// # Errors
/// The first thing that is wrong with the request.
pub async fn completions(service: &Service, _: &HttpRequest, body: Bytes) -> Result<Asked, ApiError> {
    let most = most_choices(service.engine.permits().limit());
    let parse = move |bytes: &[u8]| CompletionRequest::parse(bytes, most);
    let CompletionRequest { common, prompts, max_tokens, echo, logprobs } = text::parsed(body, parse).await?;
    service.check_model(&common.model)?;
    let sequences = prompts.len() * common.n;
    if sequences > MAX_SEQUENCES {
        let text = format!("{} prompts with n = {} are more than {MAX_SEQUENCES} answers", prompts.len(), common.n);
        let field = if prompts.len() > MAX_SEQUENCES { "prompt" } else { "n" };
        return Err(ApiError::about(Code::InvalidValue, field, text));
    }
    fits_the_queue(&service.engine, prompts.len(), common.n)?;
    let envelope = envelope(service, "cmpl-", common.delivery);
    let name = envelope.id.clone();
    let max_new_tokens = max_tokens.map_or(COMPLETION_TOKENS, |limit| limit.tokens);
    let draft = draft(&common, &name, max_new_tokens, logprobs, Dialect::OpenaiCompletions);
    let draft = Draft { score_prompt: echo && logprobs.is_some(), ..draft };
    let (mut specs, mut before, mut prompt_tokens) = (Vec::with_capacity(sequences), Vec::new(), 0);
    for ids in text::prompts(service, prompts, "prompt").await? {
        prompt_tokens += ids.len();
        specs.extend(draft.specs(service, &ids, common.n));
        // A prompt over the context is refused at the launch: its text is not copied for every answer before that.
        if echo && ids.len() <= service.engine.limits().context {
            before.extend(std::iter::repeat_n(Echo::new(ids, &service.tokenizer), common.n));
        }
    }
    Ok(Asked {
        specs,
        stop: common.stop,
        prompt_tokens,
        id: (ErrorDialect::Openai.id_header(), name.clone()),
        name,
        names: names("prompt", max_tokens),
        format: Box::new(CompletionFormat::new(envelope, sequences, before, logprobs)),
        transport: transport(common.delivery),
    })
}

fn envelope(service: &Service, prefix: &str, delivery: Delivery) -> Envelope {
    let model = &service.config.model;
    Envelope {
        id: format!("{prefix}{}", service.serial()),
        created: unix_seconds(),
        model: model.id.clone(),
        fingerprint: format!("crucible-{}-{}", env!("CARGO_PKG_VERSION"), model.profile.name()),
        delivery,
        vocabulary: Arc::new(service.tokenizer.clone()),
    }
}

/// OpenAI's dialect promises no repetition without a seed: a request that names none gets a fresh one.
fn draft(common: &Common, name: &str, max_new_tokens: usize, logprobs: LogprobsWanted, dialect: Dialect) -> Draft {
    let seed = common.seed.unwrap_or_else(random_bits);
    tracing::debug!(name, seed, user = common.user.as_deref().unwrap_or(""), "seed");
    Draft {
        max_new_tokens,
        sampling: common.sampling,
        adjust: common.adjust.clone(),
        seed,
        ignore_eos: common.ignore_eos,
        logprobs,
        score_prompt: false,
        dialect,
    }
}

/// Fields that a refusal names: for the length what the client sent, or its prompt when that alone set the length.
fn names(prompt: &'static str, max_tokens: Option<MaxTokens>) -> FieldNames {
    FieldNames { prompt, max_tokens: max_tokens.map_or(prompt, |limit| limit.field) }
}

fn transport(delivery: Delivery) -> Transport {
    match delivery {
        Delivery::Whole => Transport::Whole,
        Delivery::Stream | Delivery::StreamWithUsage => Transport::Stream,
    }
}

/// Tokens for a chat that names no number: the configured default, or what is left of the context and the pool. At least one, so
/// that a prompt that leaves no room is refused for that reason.
fn room(service: &Service, prompt: usize) -> usize {
    service.config.limits.default_new_tokens.min(service.engine.limits().room(prompt)).max(1)
}
