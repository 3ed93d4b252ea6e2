//! Requests and answers of OpenAI's dialect, as all checks write and read them.

use serde_json::{Value, json};

use crate::expected::{keys, merge};
use crate::http_support::client::Response;

/// POST of chats.
pub const CHAT: &str = "/v1/chat/completions";
/// POST of completions.
pub const TEXT: &str = "/v1/completions";

/// A valid chat with these fields on top.
pub fn chat(fields: Value) -> Value {
    let messages = json!([{"role": "user", "content": "hi"}]);
    merge(json!({"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": messages}), fields)
}

/// A valid completion with these fields on top.
pub fn text(fields: Value) -> Value {
    merge(json!({"model": "tiny", "max_tokens": 12, "temperature": 0, "prompt": "hi"}), fields)
}

/// The chunks of a stream, without its `[DONE]`.
pub fn chunks(response: &Response) -> Vec<Value> {
    assert_eq!(response.status, 200, "{}", response.text());
    let events = response.events();
    let (last, rest) = events.split_last().expect("events");
    assert_eq!(last.1, "[DONE]");
    rest.iter().map(|(_, data)| serde_json::from_str(data).expect("JSON")).collect()
}

/// The concatenated text of one choice of a stream.
pub fn streamed(chunks: &[Value], index: usize) -> String {
    let choices = chunks.iter().flat_map(|c| c["choices"].as_array().expect("choices"));
    let of = choices.filter(|c| c["index"] == index);
    of.filter_map(|c| c["delta"]["content"].as_str().or_else(|| c["text"].as_str())).collect()
}

/// An error in OpenAI's body.
pub fn refused(response: &Response, status: u16, kind: &str, code: &str, param: Option<&str>) {
    let body = response.json();
    assert_eq!(response.status, status, "{body}");
    assert_eq!(keys(&body), ["error"]);
    assert_eq!(keys(&body["error"]), ["code", "message", "param", "type"]);
    let error = &body["error"];
    assert_eq!((&error["type"], &error["code"]), (&json!(kind), &json!(code)), "{body}");
    assert_eq!(error["param"], json!(param), "{body}");
    assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()));
    assert!(response.header("x-request-id").expect("a request id").starts_with("req_"));
}
