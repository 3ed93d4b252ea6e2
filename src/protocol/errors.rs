//! What a client is told when its request is not served: one error, rendered in the body of each dialect.

use std::borrow::Cow;
use std::time::Duration;

use actix_web::http::{StatusCode, header};
use actix_web::{HttpRequest, HttpResponse, HttpResponseBuilder};
use serde_json::{Value, json};

use crate::actors::session::messages::SessionFailure;
use crate::admission::ValidationError;

/// The shape of error bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorDialect {
    /// `{"error": {"code", "message", "param"}}`.
    Native,
    /// `{"error": {"message", "type", "param", "code"}}`.
    Openai,
    /// `{"type": "error", "error": {"type", "message", "details": {"error_code", "param"}}, "request_id"}`.
    Anthropic,
}

/// The header that says that a client speaks Anthropic's dialect; it decides on the paths that both public dialects have.
pub const ANTHROPIC_VERSION: &str = "anthropic-version";

impl ErrorDialect {
    /// The dialect of a request: by its path, and by the header on the paths of /v1 that are nobody's own.
    pub fn of_request(request: &HttpRequest) -> Self {
        let path = request.path();
        let own = |prefix: &str| path.starts_with(prefix);
        match path.strip_prefix("/v1/") {
            None => Self::Native,
            Some(_) if own("/v1/generate") => Self::Native,
            Some(_) if own("/v1/messages") => Self::Anthropic,
            Some(_) if own("/v1/chat/") || own("/v1/completions") => Self::Openai,
            Some(_) if request.headers().contains_key(ANTHROPIC_VERSION) => Self::Anthropic,
            Some(_) => Self::Openai,
        }
    }

    /// The header that carries the id of a request.
    pub const fn id_header(self) -> &'static str {
        match self {
            Self::Native | Self::Openai => "x-request-id",
            Self::Anthropic => "request-id",
        }
    }
}

/// Characters of a client's own text that a refusal repeats at most.
const QUOTED_CHARACTERS: usize = 200;

/// What a refusal repeats of a text of the client, such as a path or the name of a field: all of it unless it is long.
pub fn beginning(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(QUOTED_CHARACTERS) {
        None => Cow::Borrowed(text),
        Some((at, _)) => Cow::Owned(format!("{}…", &text[..at])),
    }
}

/// The stable codes. Metrics count refusals by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// The body is no JSON object.
    InvalidJson,
    /// A field that no such request has.
    UnknownParameter,
    /// A field that exists in the dialect and is not served.
    UnsupportedParameter,
    /// A field is missing.
    MissingParameter,
    /// A field has a wrong type or value.
    InvalidValue,
    /// Prompt and answer do not fit the model's context or the pool.
    ContextLengthExceeded,
    /// A key is configured and the client has none or a wrong one.
    InvalidApiKey,
    /// No such model.
    ModelNotFound,
    /// No such path.
    NotFound,
    /// The path has other methods.
    MethodNotAllowed,
    /// The body did not arrive in time.
    RequestTimeout,
    /// The body is over the limit.
    PayloadTooLarge,
    /// The body is no JSON by its content type.
    UnsupportedMediaType,
    /// The waiting queue is full.
    QueueFull,
    /// The server is shutting down.
    Draining,
    /// The engine is dead.
    EngineFailed,
    /// The model produced a non-finite logit.
    NonFinite,
}

impl Code {
    /// Every code, in the order of the refusal counters.
    pub const ALL: [Code; 17] = [
        Code::InvalidJson,
        Code::UnknownParameter,
        Code::UnsupportedParameter,
        Code::MissingParameter,
        Code::InvalidValue,
        Code::ContextLengthExceeded,
        Code::InvalidApiKey,
        Code::ModelNotFound,
        Code::NotFound,
        Code::MethodNotAllowed,
        Code::RequestTimeout,
        Code::PayloadTooLarge,
        Code::UnsupportedMediaType,
        Code::QueueFull,
        Code::Draining,
        Code::EngineFailed,
        Code::NonFinite,
    ];

    /// As it stands in bodies and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Code::InvalidJson => "invalid_json",
            Code::UnknownParameter => "unknown_parameter",
            Code::UnsupportedParameter => "unsupported_parameter",
            Code::MissingParameter => "missing_required_parameter",
            Code::InvalidValue => "invalid_value",
            Code::ContextLengthExceeded => "context_length_exceeded",
            Code::InvalidApiKey => "invalid_api_key",
            Code::ModelNotFound => "model_not_found",
            Code::NotFound => "not_found",
            Code::MethodNotAllowed => "method_not_allowed",
            Code::RequestTimeout => "request_timeout",
            Code::PayloadTooLarge => "payload_too_large",
            Code::UnsupportedMediaType => "unsupported_media_type",
            Code::QueueFull => "queue_full",
            Code::Draining => "draining",
            Code::EngineFailed => "engine_failed",
            Code::NonFinite => "non_finite_logits",
        }
    }

    /// Its HTTP status.
    pub const fn status(self) -> StatusCode {
        match self {
            Code::InvalidApiKey => StatusCode::UNAUTHORIZED,
            Code::ModelNotFound | Code::NotFound => StatusCode::NOT_FOUND,
            Code::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Code::RequestTimeout => StatusCode::REQUEST_TIMEOUT,
            Code::PayloadTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Code::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Code::QueueFull => StatusCode::TOO_MANY_REQUESTS,
            Code::Draining | Code::EngineFailed => StatusCode::SERVICE_UNAVAILABLE,
            Code::NonFinite => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::BAD_REQUEST,
        }
    }

    /// Its HTTP status in a dialect: Anthropic's has one of its own for a server that has no room.
    pub fn status_in(self, dialect: ErrorDialect) -> StatusCode {
        let overloaded = || StatusCode::from_u16(529).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
        match (dialect, self) {
            (ErrorDialect::Anthropic, Code::QueueFull) => overloaded(),
            _ => self.status(),
        }
    }

    /// Anthropic's `type`.
    const fn anthropic_type(self) -> &'static str {
        match self {
            Code::InvalidApiKey => "authentication_error",
            Code::ModelNotFound | Code::NotFound => "not_found_error",
            Code::PayloadTooLarge => "request_too_large",
            Code::RequestTimeout => "timeout_error",
            Code::QueueFull | Code::Draining => "overloaded_error",
            Code::EngineFailed | Code::NonFinite => "api_error",
            _ => "invalid_request_error",
        }
    }

    /// OpenAI's `type`.
    const fn openai_type(self) -> &'static str {
        match self {
            Code::QueueFull => "rate_limit_error",
            Code::InvalidApiKey => "authentication_error",
            Code::Draining | Code::EngineFailed | Code::NonFinite => "server_error",
            _ => "invalid_request_error",
        }
    }
}

/// When a client that met a full queue should come back.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A refusal or a failure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Stable code.
    pub code: Code,
    /// For people.
    pub message: String,
    /// The field to blame.
    pub param: Option<String>,
}

impl ApiError {
    /// An error without a field to blame.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), param: None }
    }

    /// An error about a field.
    pub fn about(code: Code, param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), param: Some(param.into()) }
    }

    /// The name of item `at` of a field that holds `count`: the field itself when it holds one.
    pub fn one_of(field: &str, at: usize, count: usize) -> Cow<'_, str> {
        if count == 1 { Cow::Borrowed(field) } else { Cow::Owned(format!("{field}[{at}]")) }
    }

    /// The waiting queue is full.
    pub fn queue_full(limit: usize) -> Self {
        Self::new(Code::QueueFull, format!("the waiting queue is full ({limit} requests); retry after a second"))
    }

    /// Why a checked request was refused; `prompt` and `max_tokens` are the field names of the dialect.
    pub fn validation(error: &ValidationError, prompt: &str, max_tokens: &str) -> Self {
        use ValidationError as E;
        let (code, param) = match error {
            E::EmptyPrompt | E::TokenOutOfRange { .. } => (Code::InvalidValue, prompt),
            E::ZeroMaxTokens | E::TooManyNewTokens { .. } => (Code::InvalidValue, max_tokens),
            E::TooManyBiases { .. } | E::BiasOutOfRange { .. } | E::BiasRepeated { .. } => {
                (Code::InvalidValue, "logit_bias")
            }
            E::PromptTooLong { .. } => (Code::ContextLengthExceeded, prompt),
            E::ContextOverflow { .. } | E::PoolTooSmall { .. } => (Code::ContextLengthExceeded, max_tokens),
        };
        Self::about(code, param, error.to_string())
    }

    /// The body in a dialect.
    pub fn body(&self, dialect: ErrorDialect) -> Value {
        let (code, message, param) = (self.code.name(), &self.message, &self.param);
        match dialect {
            ErrorDialect::Native => json!({"error": {"code": code, "message": message, "param": param}}),
            ErrorDialect::Openai => {
                json!({"error": {"message": message, "type": self.code.openai_type(), "param": param, "code": code}})
            }
            ErrorDialect::Anthropic => {
                let details = json!({"error_code": code, "param": param});
                let error = json!({"type": self.code.anthropic_type(), "message": message, "details": details});
                json!({"type": "error", "error": error})
            }
        }
    }

    /// The body in Anthropic's dialect, which repeats the id of the request.
    pub fn anthropic_body(&self, request_id: &str) -> Value {
        let mut body = self.body(ErrorDialect::Anthropic);
        body["request_id"] = json!(request_id);
        body
    }

    /// The whole response to the request of this id.
    pub fn response(&self, dialect: ErrorDialect, request_id: &str) -> HttpResponse {
        let mut builder = HttpResponseBuilder::new(self.code.status_in(dialect));
        builder.insert_header((dialect.id_header(), request_id));
        if self.code == Code::QueueFull {
            builder.insert_header((header::RETRY_AFTER, RETRY_AFTER.as_secs().to_string()));
        }
        if self.code == Code::InvalidApiKey {
            builder.insert_header((header::WWW_AUTHENTICATE, "Bearer"));
        }
        if matches!(self.code, Code::PayloadTooLarge | Code::RequestTimeout | Code::Draining) {
            builder.insert_header((header::CONNECTION, "close"));
        }
        match dialect {
            ErrorDialect::Native | ErrorDialect::Openai => builder.json(self.body(dialect)),
            ErrorDialect::Anthropic => builder.json(self.anthropic_body(request_id)),
        }
    }
}

impl From<&SessionFailure> for ApiError {
    fn from(failure: &SessionFailure) -> Self {
        let code = match failure {
            SessionFailure::NonFinite => Code::NonFinite,
            SessionFailure::Engine(_) => Code::EngineFailed,
            SessionFailure::DrainDeadline | SessionFailure::Draining => Code::Draining,
        };
        Self::new(code, failure.to_string())
    }
}
