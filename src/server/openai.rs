//! POST /v1/chat/completions and /v1/completions, GET /v1/models.

use std::sync::Arc;

use actix_web::{HttpRequest, HttpResponse, web};

use super::generate::{Work, stream, whole};
use super::{Service, WorkerHub, intake, random_bits, text, unix_seconds};
use crate::actors::session::FieldNames;
use crate::admission::{Dialect, RequestSpec};
use crate::model::chat_template::GenerationPrompt;
use crate::model::tokenizer::SpecialText;
use crate::protocol::choice::Vocabulary;
use crate::protocol::errors::{ApiError, Code};
use crate::protocol::openai::chat::{self, ChatRequest, ChatStream};
use crate::protocol::openai::completions::{self, CompletionRequest, CompletionStream};
use crate::protocol::openai::{Common, Delivery, Head, models};

/// Sequences of one completion request at most.
const MAX_SEQUENCES: usize = 1_024;

impl Service {
    /// # Errors
    /// The model named is not the one that is served.
    fn check_model(&self, named: &str) -> Result<(), ApiError> {
        if named == self.config.model.id {
            return Ok(());
        }
        let text = format!("the model `{named}` does not exist; this server has `{}`", self.config.model.id);
        Err(ApiError::about(Code::ModelNotFound, "model", text))
    }

    fn head(&self, prefix: &str) -> Head {
        Head {
            id: self.public_id(prefix),
            created: unix_seconds(),
            model: self.config.model.id.clone(),
            fingerprint: format!("crucible-{}-{}", env!("CARGO_PKG_VERSION"), self.config.model.profile.name()),
        }
    }

    fn vocabulary(&self) -> Arc<dyn Vocabulary> {
        Arc::new(self.tokenizer.clone())
    }
}

/// The sequences of one prompt: the same draw seed, told apart by their choice index.
fn specs(
    service: &Service,
    common: &Common,
    prompt: &Arc<[u32]>,
    seed: u64,
    base: RequestSpecBase,
) -> impl Iterator<Item = RequestSpec> {
    let eos = if common.ignore_eos { Arc::from([]) } else { service.tokenizer.eos_ids() };
    let (rule, adjust, prompt) = (common.sampling.rule(), common.adjust.clone(), Arc::clone(prompt));
    (0..common.n as u32).map(move |choice| RequestSpec {
        prompt: Arc::clone(&prompt),
        max_new_tokens: base.max_new_tokens,
        rule,
        adjust: adjust.clone(),
        seed,
        choice,
        eos: Arc::clone(&eos),
        logprobs: base.logprobs,
        dialect: base.dialect,
    })
}

/// What the sequences of a request have in common beside `Common`.
#[derive(Clone, Copy)]
struct RequestSpecBase {
    max_new_tokens: usize,
    logprobs: Option<u8>,
    dialect: Dialect,
}

/// The seed that the client names, or a fresh one: OpenAI's dialect promises no repetition without a seed.
fn seed_of(common: &Common, name: &str) -> u64 {
    let seed = common.seed.unwrap_or_else(random_bits);
    tracing::debug!(name, seed, user = common.user.as_deref().unwrap_or(""), "seed");
    seed
}

/// POST /v1/chat/completions.
pub async fn chat_completions(
    request: HttpRequest,
    payload: web::Payload,
    service: web::Data<Service>,
    hub: web::Data<WorkerHub>,
) -> HttpResponse {
    let answered = answer_chat(&request, payload, &service, &hub);
    answered.await.unwrap_or_else(|e| intake::refuse(&service, &request, &e))
}

async fn answer_chat(
    request: &HttpRequest,
    payload: web::Payload,
    service: &Service,
    hub: &WorkerHub,
) -> Result<HttpResponse, ApiError> {
    service.accepting()?;
    let body = intake::body(service, request, payload).await?;
    let ChatRequest { common, messages, max_tokens, logprobs } = ChatRequest::parse(&body)?;
    service.check_model(&common.model)?;
    let prompt = text::chat(service, messages, GenerationPrompt::Add).await?;
    let max_new_tokens = max_tokens.unwrap_or_else(|| room(service, prompt.len()));
    let head = service.head("chatcmpl");
    let seed = seed_of(&common, &head.id);
    let base = RequestSpecBase { max_new_tokens, logprobs, dialect: Dialect::OpenaiChat };
    let work = Work {
        specs: specs(service, &common, &prompt, seed, base).collect(),
        stop: common.stop,
        prompt_tokens: prompt.len(),
        name: head.id.clone(),
        names: FieldNames { prompt: "messages", max_tokens: "max_tokens" },
    };
    let vocabulary = service.vocabulary();
    if common.delivery != Delivery::Whole {
        let format = ChatStream { head, n: common.n, delivery: common.delivery, logprobs, vocabulary };
        return stream(service, hub, work, Box::new(format));
    }
    let (answers, usage) = whole(service, hub, work).await?;
    let body = chat::response(&head, &answers, usage, logprobs, &*vocabulary);
    Ok(HttpResponse::Ok().insert_header(("x-request-id", head.id)).json(body))
}

/// Tokens for a chat that names no number: the configured default, or what is left of the context and the pool. At least one, so
/// that a prompt that leaves no room is refused for that reason.
fn room(service: &Service, prompt: usize) -> usize {
    let limits = service.engine.limits();
    let pool = (limits.pages * limits.page_tokens + 1).saturating_sub(prompt);
    let context = limits.context.saturating_sub(prompt);
    service.config.limits.default_new_tokens.min(limits.max_new_tokens).min(pool).min(context).max(1)
}

/// POST /v1/completions.
pub async fn completions(
    request: HttpRequest,
    payload: web::Payload,
    service: web::Data<Service>,
    hub: web::Data<WorkerHub>,
) -> HttpResponse {
    let answered = answer_completions(&request, payload, &service, &hub);
    answered.await.unwrap_or_else(|e| intake::refuse(&service, &request, &e))
}

async fn answer_completions(
    request: &HttpRequest,
    payload: web::Payload,
    service: &Service,
    hub: &WorkerHub,
) -> Result<HttpResponse, ApiError> {
    service.accepting()?;
    let body = intake::body(service, request, payload).await?;
    let CompletionRequest { common, prompts, max_tokens, echo, logprobs } = CompletionRequest::parse(&body)?;
    service.check_model(&common.model)?;
    if prompts.len() * common.n > MAX_SEQUENCES {
        let text = format!("{} prompts with n = {} are more than {MAX_SEQUENCES} answers", prompts.len(), common.n);
        return Err(ApiError::about(Code::InvalidValue, "n", text));
    }
    let head = service.head("cmpl");
    let seed = seed_of(&common, &head.id);
    let base = RequestSpecBase { max_new_tokens: max_tokens, logprobs, dialect: Dialect::OpenaiCompletions };
    let mut work = Work {
        specs: Vec::with_capacity(prompts.len() * common.n),
        stop: common.stop.clone(),
        prompt_tokens: 0,
        name: head.id.clone(),
        names: FieldNames { prompt: "prompt", max_tokens: "max_tokens" },
    };
    let mut before = Vec::new();
    for prompt in prompts {
        let ids = text::prompt(service, prompt, "prompt").await?;
        work.prompt_tokens += ids.len();
        work.specs.extend(specs(service, &common, &ids, seed, base));
        // A prompt over the context is refused at the launch: its text is not copied for every answer before that.
        if echo && ids.len() <= service.engine.limits().context {
            let text = service.tokenizer.decode(&ids, SpecialText::Show);
            before.extend(std::iter::repeat_n(text, common.n));
        }
    }
    let vocabulary = service.vocabulary();
    if common.delivery != Delivery::Whole {
        let offsets = vec![0; work.specs.len()];
        let format = CompletionStream { head, echo: before, delivery: common.delivery, logprobs, vocabulary, offsets };
        return stream(service, hub, work, Box::new(format));
    }
    let (answers, usage) = whole(service, hub, work).await?;
    let body = completions::response(&head, &answers, &before, usage, logprobs, &*vocabulary);
    Ok(HttpResponse::Ok().insert_header(("x-request-id", head.id)).json(body))
}

/// GET /v1/models.
pub async fn list_models(service: web::Data<Service>) -> HttpResponse {
    HttpResponse::Ok().json(models::list(&service.config.model.id, service.created))
}

/// GET /v1/models/{id}.
pub async fn one_model(request: HttpRequest, service: web::Data<Service>, id: web::Path<String>) -> HttpResponse {
    match service.check_model(&id) {
        Ok(()) => HttpResponse::Ok().json(models::model(&id, service.created)),
        Err(error) => intake::refuse(&service, &request, &error),
    }
}
