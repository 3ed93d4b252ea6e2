//! /v1/chat/completions.

use std::sync::LazyLock;

use bytes::Bytes;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::envelope::Envelope;
use super::{Common, MaxTokens};
use crate::actors::session::messages::GeneratedToken;
use crate::model::chat_template::ChatMessage;
use crate::protocol::anthropic::MAX_MESSAGES;
use crate::protocol::body::{Body, Unserved, wrong_type};
use crate::protocol::choice::{Answer, ChoiceEnd, Delta, Vocabulary};
use crate::protocol::content;
use crate::protocol::errors::{ApiError, Code};
use crate::protocol::format::{Format, Usage};
use crate::protocol::sampling::{LOGPROBS, MAX_TOKENS};

const CHUNK: &str = "chat.completion.chunk";

/// Fields of a request that are not served.
pub static UNSERVED: LazyLock<Unserved> = LazyLock::new(|| {
    vec![
        ("tools", vec![json!([])]),
        ("functions", vec![json!([])]),
        ("tool_choice", vec![json!("none"), json!("auto")]),
        ("function_call", vec![json!("none"), json!("auto")]),
        ("parallel_tool_calls", vec![json!(true), json!(false)]),
        ("response_format", vec![json!({"type": "text"})]),
        ("modalities", vec![json!(["text"])]),
        ("service_tier", vec![json!("auto"), json!("default")]),
        ("store", vec![json!(false)]),
        ("metadata", vec![json!({})]),
        ("prompt_cache_retention", vec![json!("in_memory")]),
        ("prompt_cache_options", vec![json!({})]),
        ("audio", vec![]),
        ("prediction", vec![]),
        ("reasoning_effort", vec![json!("none")]),
        ("verbosity", vec![json!("medium")]),
        ("web_search_options", vec![]),
        ("moderation", vec![]),
    ]
});
/// Fields of a part of text that are not served; a hint where a cache could end changes no answer.
pub static UNSERVED_OF_PART: LazyLock<Unserved> =
    LazyLock::new(|| vec![("prompt_cache_breakpoint", vec![json!({"mode": "explicit"})])]);
/// Fields of a message that are not served.
pub static UNSERVED_OF_MESSAGE: LazyLock<Unserved> = LazyLock::new(|| {
    vec![
        ("tool_calls", vec![json!([])]),
        ("annotations", vec![json!([])]),
        ("name", vec![]),
        ("refusal", vec![]),
        ("audio", vec![]),
        ("function_call", vec![]),
        ("tool_call_id", vec![]),
    ]
});
/// Who speaks; a developer is the system.
pub const ROLES: [&str; 4] = ["system", "developer", "user", "assistant"];
/// Names for a cache and for the user, which change no answer.
pub const IGNORED: [&str; 2] = ["prompt_cache_key", "safety_identifier"];

/// A chat request.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// Fields of both OpenAI endpoints.
    pub common: Common,
    /// The conversation.
    pub messages: Vec<ChatMessage>,
    /// Most tokens to generate, when the client names a number.
    pub max_tokens: Option<MaxTokens>,
    /// Log-probabilities wanted, with so many alternatives.
    pub logprobs: Option<u8>,
}

impl ChatRequest {
    /// Reads a request body; `n` may be `most_choices` at most.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn parse(bytes: &[u8], most_choices: u64) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let messages = body.value("messages");
        let request = Self {
            common: Common::parse(&mut body, most_choices)?,
            messages: turns(body.require("messages", messages)?)?,
            max_tokens: max_tokens(&mut body)?,
            logprobs: logprobs(&mut body)?,
        };
        body.refuse(&UNSERVED)?;
        for name in IGNORED {
            body.string(name)?;
        }
        body.finish()?;
        Ok(request)
    }
}

/// The `messages` of a request.
///
/// # Errors
/// Another shape, an unknown role, or content that is no text.
pub fn turns(value: Value) -> Result<Vec<ChatMessage>, ApiError> {
    let Value::Array(items) = value else { return Err(wrong_type("messages", "an array of messages", &value)) };
    if items.is_empty() || items.len() > MAX_MESSAGES {
        let text = format!("messages must hold 1 to {MAX_MESSAGES} messages, not {}", items.len());
        return Err(ApiError::about(Code::InvalidValue, "messages", text));
    }
    items.into_iter().enumerate().map(|(at, item)| turn(item, &format!("messages[{at}]"))).collect()
}

fn turn(item: Value, path: &str) -> Result<ChatMessage, ApiError> {
    let mut body = Body::nested(item, path)?;
    let role = body.string("role")?;
    let role = body.require("role", role)?;
    let role = match role.as_str() {
        "developer" => "system".to_owned(),
        known if ROLES.contains(&known) => role,
        "tool" | "function" => {
            let text = format!("role {role} is not supported: tools are not");
            return Err(ApiError::about(Code::UnsupportedParameter, body.path("role"), text));
        }
        _ => {
            let text = format!("{} must be {}", body.path("role"), ROLES.join(" or "));
            return Err(ApiError::about(Code::InvalidValue, body.path("role"), text));
        }
    };
    let content = body.value("content");
    let content = content::text(body.require("content", content)?, &body.path("content"), part)?;
    body.refuse(&UNSERVED_OF_MESSAGE)?;
    body.finish()?;
    Ok(ChatMessage { role, content })
}

/// What a part of text has besides its text.
fn part(body: &mut Body) -> Result<(), ApiError> {
    body.refuse(&UNSERVED_OF_PART)
}

fn max_tokens(body: &mut Body) -> Result<Option<MaxTokens>, ApiError> {
    let old = body.integer("max_tokens", MAX_TOKENS)?;
    let new = body.integer("max_completion_tokens", MAX_TOKENS)?;
    if let (Some(a), Some(b)) = (old, new)
        && a != b
    {
        let text = "max_tokens and max_completion_tokens differ; send one of them";
        return Err(ApiError::about(Code::InvalidValue, "max_completion_tokens", text));
    }
    let limit = |tokens, field| MaxTokens { tokens: tokens as usize, field };
    Ok(new.map(|n| limit(n, "max_completion_tokens")).or(old.map(|n| limit(n, "max_tokens"))))
}

fn logprobs(body: &mut Body) -> Result<Option<u8>, ApiError> {
    let wanted = body.boolean("logprobs")?.unwrap_or(false);
    let top = body.integer("top_logprobs", LOGPROBS)?;
    if top.is_some() && !wanted {
        let text = "top_logprobs needs logprobs = true";
        return Err(ApiError::about(Code::InvalidValue, "top_logprobs", text));
    }
    Ok(wanted.then(|| top.unwrap_or(0) as u8))
}

/// Log-probabilities of tokens, as chat bodies have them.
#[derive(Serialize)]
struct Logprobs<'a> {
    content: Content<'a>,
    refusal: Option<&'a str>,
}

/// One entry for each token; made while it is written, for there may be very many.
struct Content<'a> {
    tokens: &'a [GeneratedToken],
    vocabulary: &'a dyn Vocabulary,
}

/// A token and its log-probability.
#[derive(Serialize)]
struct Entry {
    token: String,
    logprob: f64,
    bytes: Vec<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<Entry>>,
}

impl Content<'_> {
    fn entry(&self, id: u32, logprob: f64) -> Entry {
        let (token, bytes) = (self.vocabulary.token_text(id), self.vocabulary.token_bytes(id));
        Entry { token, logprob, bytes, top_logprobs: None }
    }
}

impl Serialize for Content<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.tokens.iter().filter_map(|token| {
            let values = token.logprobs.as_ref()?;
            let top = values.top.iter().map(|&(id, logprob)| self.entry(id, logprob)).collect();
            Some(Entry { top_logprobs: Some(top), ..self.entry(token.id, values.chosen) })
        }))
    }
}

/// One response.
pub struct ChatFormat {
    /// What is around the choices.
    pub envelope: Envelope,
    /// Choices.
    pub n: usize,
    /// Whether choices carry log-probabilities.
    pub logprobs: Option<u8>,
}

#[derive(Serialize)]
struct WholeChoice<'a> {
    index: usize,
    message: Said<'a>,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct Said<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<&'a str>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: ChunkDelta<'a>,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize, Default)]
struct ChunkDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

impl ChatFormat {
    fn logprobs_of<'a>(&'a self, tokens: &'a [GeneratedToken]) -> Option<Logprobs<'a>> {
        let content = Content { tokens, vocabulary: &*self.envelope.vocabulary };
        self.logprobs.map(|_| Logprobs { content, refusal: None })
    }

    fn choice<'a>(&'a self, index: usize, answer: &'a Answer) -> WholeChoice<'a> {
        let message = Said { role: "assistant", content: &answer.text, refusal: None };
        let logprobs = self.logprobs_of(&answer.tokens);
        WholeChoice { index, message, logprobs, finish_reason: answer.reason.name() }
    }

    fn chunk(&self, choice: ChunkChoice<'_>) -> Bytes {
        self.envelope.chunk(CHUNK, choice)
    }

    fn content(&self, index: usize, text: &str, logprobs: Option<Logprobs<'_>>) -> Bytes {
        let delta = ChunkDelta { role: None, content: Some(text) };
        self.chunk(ChunkChoice { index, delta, logprobs, finish_reason: None })
    }
}

impl Format for ChatFormat {
    fn whole(&self, answers: &[Answer], usage: Usage) -> Bytes {
        let choices: Vec<_> = answers.iter().enumerate().map(|(index, answer)| self.choice(index, answer)).collect();
        self.envelope.whole("chat.completion", &choices, usage)
    }

    fn open(&mut self) -> Option<Bytes> {
        let delta = || ChunkDelta { role: Some("assistant"), content: Some("") };
        let first = |index| self.chunk(ChunkChoice { index, delta: delta(), logprobs: None, finish_reason: None });
        Some((0..self.n).flat_map(first).collect())
    }

    fn token(&mut self, choice: usize, delta: &Delta) -> Option<Bytes> {
        let logprobs = self.logprobs_of(std::slice::from_ref(&delta.token));
        (logprobs.is_some() || !delta.text.is_empty()).then(|| self.content(choice, &delta.text, logprobs))
    }

    fn end(&mut self, choice: usize, end: &ChoiceEnd) -> Bytes {
        let finish_reason = Some(end.reason.name());
        let last =
            self.chunk(ChunkChoice { index: choice, delta: ChunkDelta::default(), logprobs: None, finish_reason });
        if end.tail.is_empty() {
            return last;
        }
        [self.content(choice, &end.tail, None), last].concat().into()
    }

    fn close(&mut self, usage: Usage) -> Option<Bytes> {
        Some(self.envelope.close(CHUNK, usage))
    }

    fn failed(&mut self, error: &ApiError) -> Bytes {
        Envelope::failed(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::openai::{Delivery, MAX_CHOICES};

    fn parse(fields: Value) -> Result<ChatRequest, ApiError> {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        for (name, value) in fields.as_object().expect("an object") {
            body[name] = value.clone();
        }
        ChatRequest::parse(body.to_string().as_bytes(), MAX_CHOICES)
    }

    #[test]
    fn content_parts_of_text_are_joined_and_other_parts_are_refused() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let request = parse(json!({"messages": [{"role": "developer", "content": parts}]})).expect("valid");
        assert_eq!(request.messages, [ChatMessage { role: "system".into(), content: "ab".into() }]);
        let image = json!([{"type": "image_url", "image_url": {"url": "x"}}]);
        let error = parse(json!({"messages": [{"role": "user", "content": image}]})).expect_err("an image");
        assert_eq!(error.param.as_deref(), Some("messages[0].content[0].type"));
    }

    #[test]
    fn a_cache_breakpoint_of_a_part_changes_nothing_and_has_one_shape() {
        let with = |hint: Value| {
            let part = json!({"type": "text", "text": "a", "prompt_cache_breakpoint": hint});
            parse(json!({"messages": [{"role": "user", "content": [part]}]}))
        };
        let plain = parse(json!({"messages": [{"role": "user", "content": "a"}]})).expect("valid");
        for hint in [json!({"mode": "explicit"}), json!(null)] {
            assert_eq!(with(hint).expect("valid"), plain);
        }
        for hint in [json!({}), json!({"mode": "x"}), json!({"mode": "explicit", "a": 1}), json!(true)] {
            let error = with(hint).expect_err("another shape");
            assert_eq!(error.param.as_deref(), Some("messages[0].content[0].prompt_cache_breakpoint"));
        }
    }

    #[test]
    fn no_op_values_of_unserved_parameters_pass_and_others_are_refused_by_name() {
        let passing = json!({
            "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "tool_choice": "none",
            "response_format": {"type": "text"}, "n": 1, "store": false, "user": "me", "audio": null,
            "reasoning_effort": "none", "verbosity": "medium",
        });
        assert!(parse(passing).is_ok());
        for (name, value) in [
            ("tools", json!([{"type": "function"}])),
            ("response_format", json!({"type": "json_object"})),
            ("reasoning_effort", json!("low")),
        ] {
            let error = parse(json!({name: value})).expect_err(name);
            assert_eq!((error.code, error.param.as_deref()), (Code::UnsupportedParameter, Some(name)));
        }
    }

    #[test]
    fn the_defaults_are_those_of_openai() {
        let request = parse(json!({})).expect("valid");
        assert_eq!((request.common.sampling.temperature, request.common.seed), (1.0, None));
        assert_eq!((request.max_tokens, request.common.delivery), (None, Delivery::Whole));
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(parse(json!({"max_tokens": 3, "max_completion_tokens": 4})).is_err());
        assert!(parse(json!({"top_logprobs": 3})).is_err());
        assert!(parse(json!({"stream_options": {"include_usage": true}})).is_err());
        assert!(parse(json!({"seed": 1.5})).is_err());
        assert!(parse(json!({"messages": []})).is_err());
        let many = vec![json!({"role": "user", "content": ""}); MAX_MESSAGES + 1];
        assert_eq!(parse(json!({"messages": many})).expect_err("too many").param.as_deref(), Some("messages"));
        assert!(parse(json!({"temperature": 2.1})).is_err());
    }

    #[test]
    fn a_negative_seed_is_a_seed() {
        assert_eq!(parse(json!({"seed": -1})).expect("valid").common.seed, Some(u64::MAX));
    }
}
