//! /v1/messages.

use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::sync::LazyLock;

use bytes::Bytes;
use serde_json::{Value, json};

use super::{Conversation, one_of};
use crate::protocol::body::{Body, Unserved, wrong_type};
use crate::protocol::choice::{Answer, ChoiceEnd, Delta, FinishReason};
use crate::protocol::errors::ApiError;
use crate::protocol::format::{Format, Usage, json_bytes};
use crate::protocol::sampling::{MAX_TOKENS, SEEDS, SHARE, Sampling};
use crate::protocol::sse;

/// Stop sequences of one request at most.
pub const MAX_STOPS: usize = 16;
/// `temperature`.
pub const TEMPERATURE: RangeInclusive<f64> = 0.0..=1.0;
/// `top_k`; 0 keeps every token, as without one.
pub const TOP_K: RangeInclusive<u64> = 0..=u32::MAX as u64;
/// `service_tier`: there is one tier.
pub const TIERS: [&str; 2] = ["auto", "standard_only"];
/// Fields of this endpoint that are not served.
pub static UNSERVED: LazyLock<Unserved> = LazyLock::new(|| {
    vec![("container", vec![]), ("diagnostics", vec![]), ("inference_geo", vec![]), ("fallbacks", vec![])]
});

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub struct MessagesRequest {
    /// What to continue, and with which model.
    pub conversation: Conversation,
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// Selection.
    pub sampling: Sampling,
    /// Seed of the draws, when the client names one.
    pub seed: Option<u64>,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// Whether end-of-sequence tokens are tokens like others.
    pub ignore_eos: bool,
    /// Whether the answer is a stream.
    pub stream: bool,
    /// The client's name for its user; goes to the log only.
    pub user: Option<String>,
}

impl MessagesRequest {
    /// Reads a request body.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let conversation = Conversation::read(&mut body)?;
        let max_tokens = body.integer("max_tokens", MAX_TOKENS)?;
        let request = Self {
            conversation,
            max_tokens: body.require("max_tokens", max_tokens)? as usize,
            sampling: sampling(&mut body)?,
            seed: body.integer("seed", SEEDS)?,
            stop: stop_sequences(&mut body)?,
            ignore_eos: body.boolean("ignore_eos")?.unwrap_or(false),
            stream: body.boolean("stream")?.unwrap_or(false),
            user: user(&mut body)?,
        };
        if let Some(tier) = body.string("service_tier")? {
            one_of(&body, "service_tier", &tier, &TIERS)?;
        }
        body.refuse(&UNSERVED)?;
        body.finish()?;
        Ok(request)
    }
}

fn sampling(body: &mut Body) -> Result<Sampling, ApiError> {
    let top_k = body.integer("top_k", TOP_K)?;
    Ok(Sampling {
        temperature: body.number("temperature", TEMPERATURE)?.unwrap_or(1.0),
        top_k: top_k.and_then(|k| NonZeroU32::new(k as u32)),
        top_p: body.number("top_p", SHARE)?.unwrap_or(1.0),
        min_p: body.number("min_p", SHARE)?.unwrap_or(0.0),
    })
}

fn stop_sequences(body: &mut Body) -> Result<Vec<String>, ApiError> {
    match body.peek("stop_sequences") {
        Some(text @ Value::String(_)) => Err(wrong_type(&body.path("stop_sequences"), "an array of strings", text)),
        _ => body.stop_strings("stop_sequences", MAX_STOPS),
    }
}

fn user(body: &mut Body) -> Result<Option<String>, ApiError> {
    let Some(metadata) = body.value("metadata") else { return Ok(None) };
    let mut metadata = Body::nested(metadata, "metadata")?;
    let user = metadata.string("user_id")?;
    metadata.finish()?;
    Ok(user)
}

/// One response: a message with one block of text, empty when nothing was said.
pub struct MessageFormat {
    /// `msg_…`.
    pub id: String,
    /// `req_…`.
    pub request_id: String,
    /// The model's id.
    pub model: String,
    /// Tokens of the prompt.
    pub input_tokens: usize,
}

/// `stop_reason` and `stop_sequence`.
fn stop_of(reason: &FinishReason) -> (&'static str, Option<&str>) {
    match reason {
        FinishReason::Eos => ("end_turn", None),
        FinishReason::StopString(stop) => ("stop_sequence", Some(stop)),
        FinishReason::Length => ("max_tokens", None),
    }
}

fn text_block(text: &str) -> Value {
    json!({"type": "text", "text": text, "citations": null})
}

impl MessageFormat {
    fn message(&self, content: Value, stop: Option<&FinishReason>, output_tokens: usize) -> Value {
        let (reason, sequence) = stop.map(stop_of).unzip();
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence.flatten(),
            "stop_details": null,
            "container": null,
            "diagnostics": null,
            "usage": {
                "input_tokens": self.input_tokens,
                "output_tokens": output_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
                "output_tokens_details": null,
                "server_tool_use": null,
                "service_tier": "standard",
                "inference_geo": null,
                "speed": "standard",
            },
        })
    }

    fn delta(text: &str) -> Bytes {
        let delta = json!({"type": "text_delta", "text": text});
        event("content_block_delta", json!({"index": 0, "delta": delta}))
    }
}

/// An event whose data repeats its name.
fn event(name: &str, mut data: Value) -> Bytes {
    data["type"] = json!(name);
    sse::event(name, &data)
}

impl Format for MessageFormat {
    fn whole(&self, answers: &[Answer], usage: Usage) -> Bytes {
        let Some(answer) = answers.first() else { return Bytes::from_static(b"null") };
        json_bytes(&self.message(json!([text_block(&answer.text)]), Some(&answer.reason), usage.completion_tokens))
    }

    fn open(&mut self) -> Option<Bytes> {
        let message = event("message_start", json!({"message": self.message(json!([]), None, 0)}));
        let block = event("content_block_start", json!({"index": 0, "content_block": text_block("")}));
        Some([message, block].concat().into())
    }

    fn token(&mut self, _choice: usize, delta: &Delta) -> Option<Bytes> {
        (!delta.text.is_empty()).then(|| Self::delta(&delta.text))
    }

    fn end(&mut self, _choice: usize, end: &ChoiceEnd) -> Bytes {
        let (reason, sequence) = stop_of(&end.reason);
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence, "stop_details": null, "container": null});
        let usage = json!({
            "input_tokens": self.input_tokens,
            "output_tokens": end.tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens_details": null,
            "server_tool_use": null,
        });
        let tail = if end.tail.is_empty() { Bytes::new() } else { Self::delta(&end.tail) };
        let stop = event("content_block_stop", json!({"index": 0}));
        [tail, stop, event("message_delta", json!({"delta": delta, "usage": usage}))].concat().into()
    }

    fn close(&mut self, _usage: Usage) -> Option<Bytes> {
        Some(event("message_stop", json!({})))
    }

    fn failed(&mut self, error: &ApiError) -> Bytes {
        sse::event("error", &error.anthropic_body(&self.request_id))
    }

    fn keep_alive(&self) -> Bytes {
        event("ping", json!({}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::chat_template::{ChatMessage, GenerationPrompt};
    use crate::protocol::errors::Code;

    fn parse(fields: Value) -> Result<MessagesRequest, ApiError> {
        let mut body = json!({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]});
        for (name, value) in fields.as_object().expect("an object") {
            body[name] = value.clone();
        }
        MessagesRequest::parse(body.to_string().as_bytes())
    }

    fn turns(messages: Value) -> (Vec<(String, String)>, GenerationPrompt) {
        let conversation = parse(json!({"messages": messages})).expect("valid").conversation;
        let pair = |ChatMessage { role, content }| (role, content);
        (conversation.turns.into_iter().map(pair).collect(), conversation.end)
    }

    fn owned(turns: &[(&str, &str)]) -> Vec<(String, String)> {
        turns.iter().map(|&(role, content)| (role.to_owned(), content.to_owned())).collect()
    }

    #[test]
    fn neighbours_of_one_role_are_one_turn() {
        let blocks = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let messages = json!([{"role": "user", "content": blocks}, {"role": "user", "content": "c"}]);
        assert_eq!(turns(messages), (owned(&[("user", "abc")]), GenerationPrompt::Add));
    }

    #[test]
    fn a_last_message_of_the_assistant_begins_the_answer_unless_it_is_empty() {
        let user = json!({"role": "user", "content": "q"});
        let begun = turns(json!([user, {"role": "assistant", "content": "It is"}]));
        assert_eq!(begun, (owned(&[("user", "q"), ("assistant", "It is")]), GenerationPrompt::Continue));
        let empty = turns(json!([user, {"role": "assistant", "content": ""}]));
        assert_eq!(empty, (owned(&[("user", "q")]), GenerationPrompt::Add));
        let space = parse(json!({"messages": [user, {"role": "assistant", "content": "It is "}]}));
        assert_eq!(space.expect_err("white space").param.as_deref(), Some("messages[1].content"));
        let inside = parse(json!({"messages": [{"role": "assistant", "content": ""}, user]}));
        assert_eq!(inside.expect_err("empty").param.as_deref(), Some("messages[0].content"));
    }

    #[test]
    fn the_defaults_are_those_of_anthropic() {
        let request = parse(json!({})).expect("valid");
        assert_eq!(request.sampling, Sampling { temperature: 1.0, top_k: None, top_p: 1.0, min_p: 0.0 });
        assert_eq!((request.seed, request.stream), (None, false));
    }

    #[test]
    fn values_that_change_nothing_pass() {
        for (name, value) in [
            ("output_config", json!({"effort": null, "format": null})),
            ("output_config", json!({"format": null})),
            ("tool_choice", json!({"type": "auto", "disable_parallel_tool_use": false})),
            ("tool_choice", json!({"type": "auto", "disable_parallel_tool_use": true})),
        ] {
            assert!(parse(json!({name: value})).is_ok(), "{name} {value}");
        }
    }

    #[test]
    fn what_is_not_served_is_refused_by_name() {
        for (name, value) in [
            ("tools", json!([{"name": "f", "input_schema": {}}])),
            ("thinking", json!({"type": "enabled", "budget_tokens": 1024})),
            ("container", json!("c")),
            ("output_config", json!({"effort": "low"})),
        ] {
            let error = parse(json!({name: value})).expect_err(name);
            assert_eq!((error.code, error.param.as_deref()), (Code::UnsupportedParameter, Some(name)));
        }
    }
}
