//! Schemas of what clients send. Fields that are only taken at a value without an effect are left out.

use serde_json::{Map, Value, json};

use super::schema;

/// The largest u64 is beyond what JSON Schema tools take for an integer everywhere; half of it is not.
const SEED_MAX: u64 = i64::MAX as u64;

/// An object with these fields and no others.
fn object(required: &[&str], fields: Value) -> Value {
    json!({"type": "object", "required": required, "properties": fields, "additionalProperties": false})
}

fn number(low: i32, high: i32) -> Value {
    json!({"type": "number", "minimum": low, "maximum": high})
}

fn integer(low: u64, high: u64) -> Value {
    json!({"type": "integer", "minimum": low, "maximum": high})
}

fn flag() -> Value {
    json!({"type": "boolean"})
}

fn text() -> Value {
    json!({"type": "string"})
}

fn ids() -> Value {
    json!({"type": "array", "items": integer(0, u32::MAX.into())})
}

fn stops(most: usize) -> Value {
    let one = json!({"type": "string", "minLength": 1, "maxLength": 256});
    json!({"anyOf": [one, {"type": "array", "items": one, "maxItems": most}]})
}

fn tokens() -> Value {
    integer(1, u32::MAX.into())
}

/// Fields of both OpenAI endpoints, with the ones given.
fn openai(fields: Value) -> Value {
    let mut all = json!({
        "model": text(),
        "max_tokens": tokens(),
        "temperature": number(0, 2),
        "top_p": number(0, 1),
        "top_k": tokens(),
        "min_p": number(0, 1),
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
            "additionalProperties": number(-100, 100),
            "maxProperties": crate::arith::MAX_BIAS,
            "description": "What is added to the logit of each token id before the selection.",
        },
        "seed": {"type": "integer", "minimum": 0, "maximum": SEED_MAX},
        "stop": stops(4),
        "n": integer(1, 128),
        "stream": flag(),
        "stream_options": object(&[], json!({"include_usage": flag()})),
        "ignore_eos": flag(),
        "user": text(),
    });
    if let (Some(all), Value::Object(fields)) = (all.as_object_mut(), fields) {
        all.extend(fields);
    }
    all
}

fn text_parts() -> Value {
    let part = object(&["type", "text"], json!({"type": {"const": "text"}, "text": text()}));
    json!({"anyOf": [text(), {"type": "array", "items": part}]})
}

fn message(roles: &[&str]) -> Value {
    object(&["role", "content"], json!({"role": {"enum": roles}, "content": text_parts()}))
}

/// A message in Anthropic's dialect with what precedes it.
fn conversation() -> Map<String, Value> {
    let messages = json!({"type": "array", "minItems": 1, "items": message(&["user", "assistant"])});
    let fields = json!({"model": text(), "messages": messages, "system": text_parts()});
    fields.as_object().cloned().unwrap_or_default()
}

/// Every schema by name.
pub fn schemas() -> Vec<(&'static str, Value)> {
    let mut generate = object(
        &[],
        json!({
            "prompt": text(),
            "prompt_tokens": ids(),
            "max_tokens": tokens(),
            "temperature": number(0, 5),
            "top_k": tokens(),
            "top_p": number(0, 1),
            "min_p": number(0, 1),
            "seed": {"type": "integer", "minimum": 0, "maximum": SEED_MAX},
            "stop": stops(16),
            "logprobs": integer(0, 20),
            "ignore_eos": flag(),
        }),
    );
    generate["oneOf"] = json!([{"required": ["prompt"]}, {"required": ["prompt_tokens"]}]);
    let sampled = json!(["temperature"]);
    generate["dependentRequired"] = json!({"top_k": sampled, "top_p": sampled, "min_p": sampled, "seed": sampled});
    let chat_messages = json!({"type": "array", "minItems": 1, "items": schema("ChatMessage")});
    let chat = openai(json!({
        "messages": chat_messages,
        "max_completion_tokens": tokens(),
        "logprobs": flag(),
        "top_logprobs": integer(0, 20),
    }));
    let one_prompt = [text(), ids()];
    let completion = openai(json!({
        "prompt": {"anyOf": [text(), ids(), {"type": "array", "items": {"anyOf": one_prompt}, "minItems": 1}]},
        "echo": flag(),
        "logprobs": integer(0, 20),
    }));
    let mut messages = conversation();
    let sampling = json!({
        "max_tokens": tokens(),
        "temperature": number(0, 1),
        "top_p": number(0, 1),
        "top_k": integer(0, u32::MAX.into()),
        "min_p": number(0, 1),
        "seed": {"type": "integer", "minimum": 0, "maximum": SEED_MAX},
        "stop_sequences": {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 256}, "maxItems": 16},
        "stream": flag(),
        "ignore_eos": flag(),
        "metadata": object(&[], json!({"user_id": text()})),
    });
    messages.extend(sampling.as_object().cloned().unwrap_or_default());
    let tokenize = object(
        &[],
        json!({
            "text": text(),
            "special_tokens": flag(),
            "messages": chat_messages,
            "add_generation_prompt": flag(),
        }),
    );
    vec![
        ("Generate", generate),
        ("ChatMessage", message(&["system", "developer", "user", "assistant"])),
        ("ChatCompletionRequest", object(&["model", "messages"], chat)),
        ("CompletionRequest", object(&["model", "prompt"], completion)),
        ("MessagesRequest", object(&["model", "messages", "max_tokens"], Value::Object(messages))),
        ("CountTokensRequest", object(&["model", "messages"], Value::Object(conversation()))),
        ("Tokenize", tokenize),
        ("Detokenize", object(&["tokens"], json!({"tokens": ids(), "special_tokens": flag()}))),
    ]
}
