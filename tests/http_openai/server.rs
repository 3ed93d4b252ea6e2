//! Models, the protocol below the dialect, keys, overload, and the end of a server.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use crate::checks::Checks;
use crate::dialect::{CHAT, TEXT, chat, refused, text};
use crate::engine_support::fake::{Fault, Script};
use crate::expected::keys;
use crate::http_support::client::{get, post, send, send_json};
use crate::http_support::until;
use crate::scripted::{Full, Scripted};

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Scripted) {
    models(checks, server);
    the_protocol_below(checks, server);
    who_has_the_key(checks);
    a_full_queue(checks);
    a_silent_stream(checks);
    a_drain(checks);
    a_dead_engine(checks);
}

fn models(checks: &mut Checks, server: &Scripted) {
    let body = get(server.address, "/v1/models").json();
    checks.check("the list of models is a list with one model", || {
        assert_eq!(keys(&body), ["data", "object"]);
        assert_eq!((&body["object"], body["data"].as_array().map(Vec::len)), (&json!("list"), Some(1)));
    });
    checks.check("a model has exactly the fields of the published schema", || {
        let model = &body["data"][0];
        assert_eq!(keys(model), ["created", "id", "object", "owned_by"]);
        assert_eq!((&model["id"], &model["object"]), (&json!("tiny"), &json!("model")));
    });
    checks.check("one model by its id is the model of the list", || {
        assert_eq!(get(server.address, "/v1/models/tiny").json(), body["data"][0]);
    });
    checks.check("an unknown model of the list is a 404", || {
        let response = get(server.address, "/v1/models/a/b");
        refused(&response, 404, "invalid_request_error", "model_not_found", Some("model"));
    });
}

fn the_protocol_below(checks: &mut Checks, server: &Scripted) {
    let raw = |method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]| {
        send(server.address, method, path, headers, body).response()
    };
    let bad = "invalid_request_error";
    checks.check("an unknown model of a chat is a 404", || {
        let response = post(server.address, CHAT, &chat(json!({"model": "gpt"})));
        refused(&response, 404, bad, "model_not_found", Some("model"));
    });
    checks.check("a body that is no JSON is refused", || {
        refused(&raw("POST", CHAT, &[], b"{"), 400, bad, "invalid_json", None);
    });
    checks.check("a field that stands there twice is refused", || {
        refused(&raw("POST", TEXT, &[], br#"{"n": 1, "n": 2}"#), 400, bad, "invalid_json", None);
    });
    checks.check("GET on a chat is 405 and names POST", || {
        let response = raw("GET", CHAT, &[], b"");
        refused(&response, 405, bad, "method_not_allowed", None);
        assert_eq!(response.header("allow"), Some("POST"));
    });
    checks.check("another content type is 415", || {
        let response = raw("POST", TEXT, &[("content-type", "text/plain")], b"{}");
        refused(&response, 415, bad, "unsupported_media_type", None);
    });
    checks.check("a body over the limit is 413", || {
        refused(&raw("POST", CHAT, &[], &vec![b' '; 70_000]), 413, bad, "payload_too_large", None);
    });
    checks.check("an unknown path below /v1 has OpenAI's body", || {
        refused(&raw("GET", "/v1/files", &[], b""), 404, bad, "not_found", None);
    });
    checks.check("the header anthropic-version does not change a chat's dialect", || {
        let response = raw("POST", CHAT, &[("anthropic-version", "2023-06-01")], b"{");
        refused(&response, 400, bad, "invalid_json", None);
    });
    checks.check("the server is well after every bad request", || {
        assert_eq!(get(server.address, "/health").status, 200);
    });
    checks.check("the account tells both endpoints apart", || {
        let metrics = get(server.address, "/metrics").text();
        for dialect in ["openai_chat", "openai_completions"] {
            let name = format!("crucible_accepted_requests_total{{dialect=\"{dialect}\"}}");
            let line = metrics.lines().find(|l| l.starts_with(&name)).expect("a counter");
            assert!(line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() > 20.0, "{line}");
        }
    });
}

fn who_has_the_key(checks: &mut Checks) {
    let locked = Scripted::start(Script::default(), &["server.api_key=secret"]);
    let body = chat(json!({})).to_string();
    let with = |headers: &[(&str, &str)]| send(locked.address, "POST", CHAT, headers, body.as_bytes()).response();
    checks.check("without the key there is a 401 with its challenge", || {
        let response = with(&[]);
        refused(&response, 401, "authentication_error", "invalid_api_key", None);
        assert_eq!(response.header("www-authenticate"), Some("Bearer"));
    });
    checks.check("a wrong bearer token is a 401", || {
        let response = with(&[("authorization", "Bearer secre7")]);
        refused(&response, 401, "authentication_error", "invalid_api_key", None);
    });
    checks.check("the right bearer token is let in", || {
        assert_eq!(with(&[("authorization", "Bearer secret")]).status, 200);
    });
}

fn a_full_queue(checks: &mut Checks) {
    let Full { server: full, script, waiting } = Scripted::full(CHAT, &chat(json!({})));
    checks.check("a full queue is 429 with retry-after", || {
        let response = post(full.address, CHAT, &chat(json!({})));
        refused(&response, 429, "rate_limit_error", "queue_full", None);
        assert_eq!(response.header("retry-after"), Some("1"));
    });
    checks.check("a full queue refuses a completion, too", || {
        refused(&post(full.address, TEXT, &text(json!({}))), 429, "rate_limit_error", "queue_full", None);
    });
    script.hold.store(false, Ordering::Release);
    checks.check("those who waited are answered", || {
        for pending in waiting {
            assert_eq!(pending.response().status, 200);
        }
    });
}

fn a_silent_stream(checks: &mut Checks) {
    let script = Script::default();
    script.hold.store(true, Ordering::Release);
    let server = Scripted::start(script.clone(), &["server.sse_keep_alive_ms=20"]);
    let mut stream = send_json(server.address, CHAT, &chat(json!({"stream": true})));
    stream.head();
    stream.read_events(1);
    checks.check("a silent stream gets comments", || {
        assert_eq!(stream.chunk().unwrap().unwrap(), b": keep-alive\n\n");
    });
    script.hold.store(false, Ordering::Release);
}

fn a_drain(checks: &mut Checks) {
    let bodies = [chat(json!({"stream": true, "max_tokens": 5000}))];
    let (server, streams) = Scripted::draining("server.drain_deadline_ms=60000", CHAT, &bodies);
    until("it drains", || get(server.address, "/ready").status == 503);
    checks.check("a draining server refuses new work with 503", || {
        refused(&post(server.address, CHAT, &chat(json!({}))), 503, "server_error", "draining", None);
    });
    drop(streams);
    let (_server, mut streams) = Scripted::draining("server.drain_deadline_ms=400", CHAT, &bodies);
    checks.check("a stream cut by the deadline ends with an error and without [DONE]", || {
        let events = streams.remove(0).response().events();
        let body: Value = serde_json::from_str(&events.last().unwrap().1).unwrap();
        assert_eq!(body["error"]["type"], "server_error");
        assert!(events.iter().all(|(_, data)| data != "[DONE]"));
    });
}

fn a_dead_engine(checks: &mut Checks) {
    let at = |step| if step == 20 { Fault::FailAtPoll } else { Fault::Nothing };
    let script = Script { step_time: Duration::from_millis(2), fault: Arc::new(at), ..Script::default() };
    let server = Scripted::start(script, &["server.fatal_linger_ms=2000"]);
    let unary = send_json(server.address, TEXT, &text(json!({"max_tokens": 5000})));
    checks.check("a dead engine fails a whole answer with 503", || {
        refused(&unary.response(), 503, "server_error", "engine_failed", None);
    });
    let script = Script { not_finite: Arc::new(|request, index| request.0 == 1 && index == 3), ..Script::default() };
    let server = Scripted::start(script, &[]);
    checks.check("a logit that is not finite is a 500", || {
        refused(&post(server.address, CHAT, &chat(json!({}))), 500, "server_error", "non_finite_logits", None);
    });
}
