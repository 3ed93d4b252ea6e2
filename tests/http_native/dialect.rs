//! Requests and answers of the native dialect, as all checks write and read them, and the account of a server.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::common;
use crate::http_support::binary::Binary;
use crate::http_support::client::{Pending, Response, get, post, send_json};
use crate::http_support::until;

/// POST of a whole answer.
pub const WHOLE: &str = "/v1/generate";
/// POST of a stream.
pub const STREAM: &str = "/v1/generate/stream";
/// The usual prompt.
pub const SKY: &str = "The sky is";
/// Tokens of the model.
pub const VOCABULARY: u64 = 49_152;
/// Tokens of its longest sequence.
pub const CONTEXT: u64 = 8_192;

/// The server of all checks: a small budget, so that a long prompt takes many passes.
pub fn start(overrides: &[&str]) -> Binary {
    let model = format!("model.path=\"{}\"", common::default_model().display());
    let fixed = [model.as_str(), "executor.backend=cpu", "prefill.token_budget=64", "server.body_limit_bytes=65536"];
    Binary::start("config/crucible.toml", &[&fixed, overrides].concat())
}

/// The account as it is.
pub fn stats(server: &Binary) -> Value {
    get(server.address, "/stats").json()
}

/// A count of the account.
pub fn number(stats: &Value, field: &str) -> u64 {
    stats[field].as_u64().unwrap_or_else(|| panic!("{field} of {stats}"))
}

/// The account once nobody is inside and every page is back: a client has its answer before the account has closed it.
pub fn at_rest(server: &Binary) -> Value {
    let rest = |stats: &Value| {
        ["active_requests", "queued_requests", "prefilling_requests", "kv_pages_used"].iter().all(|f| stats[f] == 0)
    };
    until("everything is back", || rest(&stats(server)));
    stats(server)
}

/// How much counters grew between two accounts.
pub fn gained<const N: usize>(before: &Value, after: &Value, fields: [&str; N]) -> [u64; N] {
    fields.map(|field| number(after, field) - number(before, field))
}

/// `{"prompt": SKY, "max_tokens": 8}` with these fields on top.
pub fn ask(fields: Value) -> Value {
    let mut body = json!({"prompt": SKY, "max_tokens": 8});
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// A whole answer to `ask`.
pub fn answer(server: &Binary, fields: Value) -> Value {
    let response = post(server.address, WHOLE, &ask(fields));
    assert_eq!(response.status, 200, "{}", response.text());
    response.json()
}

/// The events of a stream, their data parsed.
pub fn data(response: &Response) -> Vec<(String, Value)> {
    assert_eq!(response.status, 200, "{}", response.text());
    let parse = |(name, data): (String, String)| (name, serde_json::from_str(&data).expect("JSON"));
    response.events().into_iter().map(parse).collect()
}

/// The events of a stream of `ask`.
pub fn streamed(server: &Binary, fields: Value) -> Vec<(String, Value)> {
    data(&post(server.address, STREAM, &ask(fields)))
}

/// The text of a stream: of its tokens and of what `done` still held.
pub fn text(events: &[(String, Value)]) -> String {
    events.iter().filter_map(|(_, data)| data["text"].as_str()).collect()
}

/// The ids of a stream.
pub fn ids(events: &[(String, Value)]) -> Vec<u64> {
    events
        .iter()
        .filter(|(name, _)| name == "token")
        .map(|(_, data)| data["token_id"].as_u64().expect("an id"))
        .collect()
}

/// The ids of a text.
pub fn tokens(server: &Binary, text: &str) -> Value {
    post(server.address, "/tokenize", &json!({"text": text})).json()["tokens"].clone()
}

/// A stream that is being computed and goes on for long after the test has done what it wants beside it.
pub fn endless(server: &Binary) -> Pending {
    let body = json!({"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": true});
    let mut stream = send_json(server.address, STREAM, &body);
    assert_eq!(stream.head().status, 200);
    stream.read_events(3);
    stream
}

/// An error in the native body.
pub fn refused(response: &Response, status: u16, code: &str, param: Option<&str>) {
    let body = response.json();
    assert_eq!(response.status, status, "{body}");
    let fields: BTreeSet<&str> = body["error"].as_object().expect("an error").keys().map(String::as_str).collect();
    assert_eq!(fields, BTreeSet::from(["code", "message", "param"]));
    assert_eq!((&body["error"]["code"], &body["error"]["param"]), (&json!(code), &json!(param)), "{body}");
    assert!(body["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
}
