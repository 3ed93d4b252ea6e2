//! Schemas of what the server answers.

use serde_json::{Value, json};

use super::schema;

/// An object that has these fields; it may gain others.
fn object(fields: Value) -> Value {
    let required: Vec<&String> = fields.as_object().map(|f| f.keys().collect()).unwrap_or_default();
    json!({"type": "object", "required": required, "properties": fields})
}

fn text() -> Value {
    json!({"type": "string"})
}

fn count() -> Value {
    json!({"type": "integer", "minimum": 0})
}

fn list(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

fn fixed(value: &str) -> Value {
    json!({"const": value})
}

fn errors() -> Vec<(&'static str, Value)> {
    let param = json!({"type": ["string", "null"]});
    let native = object(json!({"code": text(), "message": text(), "param": param}));
    let openai = object(json!({"code": text(), "message": text(), "param": param, "type": text()}));
    let anthropic = object(json!({"type": text(), "message": text()}));
    vec![
        ("NativeError", object(json!({"error": native}))),
        ("OpenaiError", object(json!({"error": openai}))),
        ("AnthropicError", object(json!({"type": fixed("error"), "error": anthropic}))),
    ]
}

/// A body of OpenAI's with its choices.
fn openai(object_name: &str, choice: Value) -> Value {
    let usage = object(json!({"prompt_tokens": count(), "completion_tokens": count(), "total_tokens": count()}));
    object(json!({
        "id": text(),
        "object": fixed(object_name),
        "created": count(),
        "model": text(),
        "system_fingerprint": text(),
        "choices": list(choice),
        "usage": usage,
    }))
}

/// Every schema by name.
pub fn schemas() -> Vec<(&'static str, Value)> {
    let reason = json!({"enum": ["stop", "length"]});
    let generated = object(json!({
        "text": text(),
        "tokens_generated": count(),
        "finish_reason": reason,
        "prompt_tokens": count(),
        "token_ids": list(count()),
    }));
    let logprobs = json!({"type": ["object", "null"]});
    let said = object(json!({"role": fixed("assistant"), "content": text()}));
    let chat = object(json!({"index": count(), "message": said, "logprobs": logprobs, "finish_reason": reason}));
    let continued = object(json!({"index": count(), "text": text(), "logprobs": logprobs, "finish_reason": reason}));
    let message = object(json!({
        "id": text(),
        "type": fixed("message"),
        "role": fixed("assistant"),
        "model": text(),
        "content": list(object(json!({"type": fixed("text"), "text": text()}))),
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence"]},
        "stop_sequence": {"type": ["string", "null"]},
        "usage": object(json!({"input_tokens": count(), "output_tokens": count()})),
    }));
    let openai_model = object(json!({"id": text(), "object": fixed("model"), "created": count(), "owned_by": text()}));
    let anthropic_model =
        object(json!({"type": fixed("model"), "id": text(), "display_name": text(), "created_at": text()}));
    let description = object(json!({
        "status": {"enum": ["ok", "ready", "draining", "failed"]},
        "model": text(),
        "device": text(),
        "max_batch": count(),
        "context": count(),
        "max_prompt_tokens": count(),
        "max_sequence_tokens": count(),
        "kv_pages": count(),
        "profile": text(),
        "sampling": {"type": "object"},
    }));
    let mut all = errors();
    all.extend([
        ("Generated", generated),
        ("ChatCompletion", openai("chat.completion", chat)),
        ("Completion", openai("text_completion", continued)),
        ("Message", message),
        ("TokenCount", object(json!({"input_tokens": count()}))),
        ("OpenaiModel", openai_model),
        ("OpenaiModelList", object(json!({"object": fixed("list"), "data": list(schema("OpenaiModel"))}))),
        ("AnthropicModel", anthropic_model),
        (
            "AnthropicModelList",
            object(json!({"data": list(schema("AnthropicModel")), "has_more": {"type": "boolean"}})),
        ),
        ("Tokens", object(json!({"tokens": list(count()), "count": count()}))),
        ("Text", object(json!({"text": text()}))),
        ("Description", description),
        ("Stats", json!({"type": "object", "additionalProperties": {"type": ["number", "object"]}})),
    ]);
    all
}
