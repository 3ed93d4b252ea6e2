//! Requests and answers of Anthropic's dialect, as all checks write and read them.

use serde_json::{Value, json};

use crate::expected::{answer, chatml, merge};
use crate::http_support::client::{Response, send};
use crate::scripted::Scripted;

/// POST of messages.
pub const PATH: &str = "/v1/messages";
/// POST of a count.
pub const COUNT: &str = "/v1/messages/count_tokens";

/// Posts JSON as the official client does.
pub fn post(server: &Scripted, path: &str, body: &Value) -> Response {
    let headers = [("content-type", "application/json"), ("anthropic-version", "2023-06-01")];
    send(server.address, "POST", path, &headers, body.to_string().as_bytes()).response()
}

/// Gets a path as the official client does.
pub fn models(server: &Scripted, path: &str) -> Response {
    send(server.address, "GET", path, &[("anthropic-version", "2023-06-01")], &[]).response()
}

/// A valid request with these fields on top.
pub fn ask(fields: Value) -> Value {
    merge(json!({"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": "hi"}]}), fields)
}

/// A valid request of count_tokens with these fields on top.
pub fn count(fields: Value) -> Value {
    merge(json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}), fields)
}

/// What the model answers to the usual request.
pub fn hi(tokens: usize) -> String {
    answer(&chatml(&[("user", "hi")]), tokens)
}

/// The data of every event of a stream, names checked against their types.
pub fn data(response: &Response) -> Vec<Value> {
    let one = |(name, data): (String, String)| {
        let value: Value = serde_json::from_str(&data).expect("JSON");
        assert_eq!(value["type"], json!(name), "an event is named like its type");
        value
    };
    response.events().into_iter().map(one).collect()
}

/// The text of a stream's events.
pub fn streamed_text(events: &[Value]) -> String {
    events.iter().filter_map(|e| e["delta"]["text"].as_str()).collect()
}

/// An error in Anthropic's body.
pub fn refused(response: &Response, status: u16, kind: &str, code: &str, param: Option<&str>) {
    let body = response.json();
    assert_eq!(response.status, status, "{body}");
    assert_eq!(body["type"], "error");
    assert_eq!(body["error"]["type"], kind, "{body}");
    assert_eq!(body["error"]["details"], json!({"error_code": code, "param": param}), "{body}");
    let message = body["error"]["message"].as_str().expect("a message");
    // A length over a limit is said in tokens; every other message names its field.
    let named = code == "context_length_exceeded" || param.is_none_or(|p| message.contains(p));
    assert!(!message.is_empty() && named, "{message} does not name {param:?}");
    let id = response.header("request-id").expect("a request id");
    assert!(id.starts_with("req_"), "{id}");
    assert_eq!(body["request_id"], json!(id));
}
