//! Schemas of what clients send, with the bounds of the parsers and of the model that is served. Fields that are never taken are left
//! out; those that are taken only at a value without an effect list these values.

use std::ops::RangeInclusive;

use serde_json::{Map, Value, json};

use super::super::tools::{MAX_IDS, MAX_TEXT_CHARS};
use super::{Bounds, schema};
use crate::arith::MAX_BIAS;
use crate::protocol::adjust::{BIAS, PENALTY};
use crate::protocol::body::{MAX_STOP_CHARS, Unserved};
use crate::protocol::sampling::{LOGPROBS, SEEDS, SHARE, TOP_K};
use crate::protocol::{anthropic, native, openai};

/// An object with these fields and no others.
fn object(required: &[&str], fields: impl Into<Value>) -> Value {
    let fields: Value = fields.into();
    json!({"type": "object", "required": required, "properties": fields, "additionalProperties": false})
}

/// The fields of several objects; of two with one name the later.
fn joined(parts: impl IntoIterator<Item = Value>) -> Map<String, Value> {
    parts
        .into_iter()
        .filter_map(|part| if let Value::Object(fields) = part { Some(fields) } else { None })
        .flatten()
        .collect()
}

fn number(range: &RangeInclusive<f64>) -> Value {
    json!({"type": "number", "minimum": range.start(), "maximum": range.end()})
}

fn integer(range: &RangeInclusive<u64>) -> Value {
    json!({"type": "integer", "minimum": range.start(), "maximum": range.end()})
}

fn flag() -> Value {
    json!({"type": "boolean"})
}

fn text() -> Value {
    json!({"type": "string"})
}

/// Between `least` and `most` ids of the vocabulary.
fn ids(bounds: &Bounds, least: usize, most: usize) -> Value {
    let id = integer(&(0..=bounds.vocab as u64 - 1));
    json!({"type": "array", "items": id, "minItems": least, "maxItems": most})
}

fn stop() -> Value {
    json!({"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS})
}

fn stops(most: usize) -> Value {
    json!({"type": "array", "items": stop(), "maxItems": most})
}

fn stop_or_stops(most: usize) -> Value {
    json!({"anyOf": [stop(), stops(most)]})
}

fn new_tokens(bounds: &Bounds) -> Value {
    integer(&(1..=bounds.new_tokens as u64))
}

/// Fields that are taken only at values without an effect.
fn unserved(table: &Unserved) -> Value {
    let taken = table.iter().filter(|(_, no_op)| !no_op.is_empty());
    let field = |(name, no_op): &(&'static str, Vec<Value>)| {
        ((*name).to_owned(), json!({"enum": no_op, "description": "Not served; taken at values without an effect."}))
    };
    Value::Object(taken.map(field).collect())
}

/// Fields of both OpenAI endpoints.
fn openai_common(bounds: &Bounds) -> Value {
    json!({
        "model": text(),
        "max_tokens": new_tokens(bounds),
        "temperature": number(&openai::TEMPERATURE),
        "top_p": number(&SHARE),
        "top_k": integer(&TOP_K),
        "min_p": number(&SHARE),
        "presence_penalty": number(&PENALTY),
        "frequency_penalty": number(&PENALTY),
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
            "additionalProperties": number(&BIAS),
            "maxProperties": MAX_BIAS,
            "description": "What is added to the logit of each token id of the vocabulary before the selection.",
        },
        "seed": {
            "type": "integer", "minimum": i64::MIN, "maximum": u64::MAX,
            "description": "Any 64-bit integer; a negative one is taken by its bits.",
        },
        "stop": stop_or_stops(openai::MAX_STOPS),
        "n": integer(&choices(bounds)),
        "stream": flag(),
        "stream_options": object(&[], json!({"include_usage": flag(), "include_obfuscation": {"enum": [false]}})),
        "ignore_eos": flag(),
        "user": text(),
    })
}

/// Choices of one prompt: those of the dialect that the waiting queue holds.
fn choices(bounds: &Bounds) -> RangeInclusive<u64> {
    1..=openai::most_choices(bounds.queue)
}

/// `wanted` is only allowed beside `field` = true.
fn only_with(wanted: &str, field: &str) -> Value {
    json!({wanted: {"required": [field], "properties": {field: {"const": true}}}})
}

/// A text, or an array of parts of type text with these further fields.
fn content(further: Value) -> Value {
    json!({"anyOf": [text(), {"type": "array", "items": part(further)}]})
}

fn part(further: Value) -> Value {
    object(&["type", "text"], joined([json!({"type": {"const": "text"}, "text": text()}), further]))
}

fn chat_message() -> Value {
    let fields =
        json!({"role": {"enum": openai::chat::ROLES}, "content": content(unserved(&openai::chat::UNSERVED_OF_PART))});
    object(&["role", "content"], joined([fields, unserved(&openai::chat::UNSERVED_OF_MESSAGE)]))
}

fn chat_messages() -> Value {
    json!({"type": "array", "minItems": 1, "maxItems": anthropic::MAX_MESSAGES, "items": schema("ChatMessage")})
}

fn chat(bounds: &Bounds) -> Value {
    let own = json!({
        "messages": chat_messages(),
        "max_completion_tokens": new_tokens(bounds),
        "logprobs": flag(),
        "top_logprobs": integer(&LOGPROBS),
    });
    let ignored = openai::chat::IGNORED.map(|name| json!({name: text()}));
    let fields = joined([openai_common(bounds), own, unserved(&openai::chat::UNSERVED)].into_iter().chain(ignored));
    let mut chat = object(&["model", "messages"], fields);
    let together = joined([only_with("stream_options", "stream"), only_with("top_logprobs", "logprobs")]);
    chat["dependentSchemas"] = Value::Object(together);
    chat["description"] = json!("max_tokens and max_completion_tokens must not differ.");
    chat
}

fn completion(bounds: &Bounds) -> Value {
    let ids = || ids(bounds, 1, bounds.prompt_tokens);
    let prompts = json!({"type": "array", "items": {"anyOf": [text(), ids()]}, "minItems": 1});
    let mut best_of = integer(&choices(bounds));
    best_of["description"] = json!("Not served; taken when it is n.");
    let own = json!({
        "prompt": {
            "anyOf": [text(), ids(), prompts],
            "description": "Prompts times n must not be more than the waiting queue holds.",
        },
        "echo": flag(),
        "logprobs": integer(&LOGPROBS),
        "best_of": best_of,
    });
    let mut completion =
        object(&["model", "prompt"], joined([openai_common(bounds), own, unserved(&openai::completions::UNSERVED)]));
    completion["dependentSchemas"] = only_with("stream_options", "stream");
    completion
}

fn cache_control() -> Value {
    let fields = json!({"type": {"enum": anthropic::CACHE_CONTROLS}, "ttl": {"enum": anthropic::CACHE_TIMES}});
    object(&["type"], fields)
}

/// A message in Anthropic's dialect. Only the assistant's may be empty, and only as the last one.
fn anthropic_message() -> Value {
    let further =
        || joined([json!({"cache_control": cache_control()}), unserved(&anthropic::UNSERVED_OF_BLOCK)]).into();
    let something = json!({"minLength": 1});
    let text = json!({"type": "string", "minLength": 1});
    let parts = json!({"type": "array", "items": part(further()), "contains": {"properties": {"text": something}}});
    let others: Vec<&str> = anthropic::ROLES.into_iter().filter(|&role| role != "assistant").collect();
    let mut assistant =
        object(&["role", "content"], json!({"role": {"const": "assistant"}, "content": content(further())}));
    assistant["description"] = json!(
        "As the last message it begins the answer: it may be empty, and must not end in white space. No other may be empty."
    );
    let other = object(&["role", "content"], json!({"role": {"enum": others}, "content": {"anyOf": [text, parts]}}));
    json!({"anyOf": [other, assistant]})
}

/// What a conversation in Anthropic's dialect is made of.
fn conversation() -> Value {
    let messages = json!({
        "type": "array", "minItems": 1, "maxItems": anthropic::MAX_MESSAGES, "items": schema("AnthropicMessage"),
    });
    let further = joined([json!({"cache_control": cache_control()}), unserved(&anthropic::UNSERVED_OF_BLOCK)]);
    let fields = json!({
        "model": text(),
        "messages": messages,
        "system": content(further.into()),
        "cache_control": cache_control(),
    });
    joined([fields, unserved(&anthropic::UNSERVED)]).into()
}

fn messages(bounds: &Bounds) -> Value {
    let own = json!({
        "max_tokens": new_tokens(bounds),
        "temperature": number(&anthropic::messages::TEMPERATURE),
        "top_p": number(&SHARE),
        "top_k": integer(&anthropic::messages::TOP_K),
        "min_p": number(&SHARE),
        "seed": integer(&SEEDS),
        "stop_sequences": stops(anthropic::messages::MAX_STOPS),
        "stream": flag(),
        "ignore_eos": flag(),
        "metadata": object(&[], json!({"user_id": text()})),
        "service_tier": {"enum": anthropic::messages::TIERS},
    });
    let fields = joined([conversation(), own, unserved(&anthropic::messages::UNSERVED)]);
    object(&["model", "messages", "max_tokens"], fields)
}

fn generate(bounds: &Bounds) -> Value {
    let fields = json!({
        "prompt": text(),
        "prompt_tokens": ids(bounds, 1, bounds.prompt_tokens),
        "max_tokens": new_tokens(bounds),
        "temperature": number(&native::TEMPERATURE),
        "top_k": integer(&TOP_K),
        "top_p": number(&SHARE),
        "min_p": number(&SHARE),
        "seed": integer(&SEEDS),
        "stop": stop_or_stops(native::MAX_STOPS),
        "logprobs": integer(&LOGPROBS),
        "ignore_eos": flag(),
    });
    let mut generate = object(&[], fields);
    generate["oneOf"] = json!([{"required": ["prompt"]}, {"required": ["prompt_tokens"]}]);
    let sampled = json!(["temperature"]);
    generate["dependentRequired"] = json!({"top_k": sampled, "top_p": sampled, "min_p": sampled, "seed": sampled});
    generate
}

fn tokenize() -> Value {
    let fields = json!({
        "text": {"type": "string", "maxLength": MAX_TEXT_CHARS},
        "special_tokens": flag(),
        "messages": chat_messages(),
        "add_generation_prompt": flag(),
    });
    let mut tokenize = object(&[], fields);
    tokenize["oneOf"] = json!([{"required": ["text"]}, {"required": ["messages"]}]);
    tokenize["dependentRequired"] = json!({"special_tokens": ["text"], "add_generation_prompt": ["messages"]});
    tokenize
}

/// Every schema by name.
pub fn schemas(bounds: &Bounds) -> Vec<(&'static str, Value)> {
    let detokenize = json!({"tokens": ids(bounds, 0, MAX_IDS), "special_tokens": flag()});
    vec![
        ("Generate", generate(bounds)),
        ("ChatMessage", chat_message()),
        ("ChatCompletionRequest", chat(bounds)),
        ("CompletionRequest", completion(bounds)),
        ("AnthropicMessage", anthropic_message()),
        ("MessagesRequest", messages(bounds)),
        ("CountTokensRequest", object(&["model", "messages"], conversation())),
        ("Tokenize", tokenize()),
        ("Detokenize", object(&["tokens"], detokenize)),
    ]
}
