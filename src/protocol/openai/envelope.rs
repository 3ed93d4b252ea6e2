//! What the bodies and chunks of both OpenAI endpoints have around their choices.

use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;

use super::Delivery;
use crate::protocol::choice::Vocabulary;
use crate::protocol::errors::{ApiError, ErrorDialect};
use crate::protocol::format::{Usage, json_bytes};
use crate::protocol::sse;

/// One response without its choices.
pub struct Envelope {
    /// `chatcmpl-…` or `cmpl-…`.
    pub id: String,
    /// Unix time of the request, seconds.
    pub created: u64,
    /// The model's id.
    pub model: String,
    /// Names what the bits of an answer depend on besides the request.
    pub fingerprint: String,
    /// With or without usage in a stream.
    pub delivery: Delivery,
    /// Names the tokens of log-probabilities.
    pub vocabulary: Arc<dyn Vocabulary>,
}

/// Token counts on the wire.
#[derive(Clone, Copy, Debug, Serialize)]
struct WireUsage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
}

impl From<Usage> for WireUsage {
    fn from(usage: Usage) -> Self {
        let Usage { prompt_tokens, completion_tokens } = usage;
        Self { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }
}

/// A frame of a stream, or a whole body: absent usage, null, or the counts, as the client asked.
#[derive(Serialize)]
struct Chunk<'a, C: Serialize> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<WireUsage>>,
}

impl Envelope {
    /// The body of whole answers.
    pub fn whole<C: Serialize>(&self, object: &'static str, choices: &[C], usage: Usage) -> Bytes {
        let usage = Some(Some(usage.into()));
        json_bytes(&Chunk { usage, ..self.frame(object, choices, None) })
    }

    /// A chunk of one choice.
    pub fn chunk<C: Serialize>(&self, object: &'static str, choice: C) -> Bytes {
        sse::data(&self.frame(object, &[choice], None))
    }

    /// The end of a stream: the usage when it was asked for, then `[DONE]`.
    pub fn close(&self, object: &'static str, usage: Usage) -> Bytes {
        if self.delivery != Delivery::StreamWithUsage {
            return sse::DONE;
        }
        let none: [Value; 0] = [];
        [sse::data(&self.frame(object, &none, Some(usage.into()))), sse::DONE].concat().into()
    }

    /// The last chunk of a stream that fails.
    pub fn failed(error: &ApiError) -> Bytes {
        sse::data(&error.body(ErrorDialect::Openai))
    }

    fn frame<'a, C: Serialize>(
        &'a self,
        object: &'static str,
        choices: &'a [C],
        usage: Option<WireUsage>,
    ) -> Chunk<'a, C> {
        let usage = (self.delivery == Delivery::StreamWithUsage).then_some(usage);
        let Self { id, created, model, fingerprint, .. } = self;
        Chunk { id, object, created: *created, model, system_fingerprint: fingerprint, choices, usage }
    }
}
