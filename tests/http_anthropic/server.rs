//! The protocol below the dialect, keys, overload, clients that leave, and the end of a server.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use crate::checks::Checks;
use crate::dialect::{COUNT, PATH, ask, count, hi, post, refused, streamed_text};
use crate::engine_support::fake::{Fault, Script};
use crate::expected::keys;
use crate::http_support::client::{events, get, send, send_json};
use crate::http_support::{at_rest, until};
use crate::scripted::{Full, Scripted};

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Scripted) {
    the_protocol_below(checks, server);
    who_has_the_key(checks);
    a_full_queue(checks);
    a_silent_stream(checks);
    clients_that_leave(checks);
    a_drain(checks);
    a_dead_engine(checks);
    a_logit_that_is_not_finite(checks);
}

fn the_protocol_below(checks: &mut Checks, server: &Scripted) {
    let raw = |method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]| {
        send(server.address, method, path, headers, body).response()
    };
    let bad = "invalid_request_error";
    checks.check("an unknown model is a 404 not_found_error", || {
        let response = post(server, PATH, &ask(json!({"model": "claude"})));
        refused(&response, 404, "not_found_error", "model_not_found", Some("model"));
    });
    checks.check("a body that is no JSON is refused", || {
        refused(&raw("POST", PATH, &[], b"{"), 400, bad, "invalid_json", None);
    });
    checks.check("a body that is no object is refused", || {
        refused(&raw("POST", PATH, &[], b"[1]"), 400, bad, "invalid_json", None);
    });
    checks.check("no body is refused", || refused(&raw("POST", PATH, &[], b""), 400, bad, "invalid_json", None));
    checks.check("a field that stands there twice is refused", || {
        let body = br#"{"model": "tiny", "model": "tiny", "max_tokens": 1, "messages": []}"#;
        refused(&raw("POST", PATH, &[], body), 400, bad, "invalid_json", None);
    });
    checks.check("GET on messages is 405 and names POST", || {
        let response = raw("GET", PATH, &[], b"");
        refused(&response, 405, bad, "method_not_allowed", None);
        assert_eq!(response.header("allow"), Some("POST"));
    });
    checks.check("another content type is 415", || {
        let response = raw("POST", PATH, &[("content-type", "text/plain")], b"{}");
        refused(&response, 415, bad, "unsupported_media_type", None);
    });
    checks.check("a body over the limit is 413 request_too_large", || {
        let response = raw("POST", PATH, &[], &vec![b' '; 70_000]);
        refused(&response, 413, "request_too_large", "payload_too_large", None);
    });
    checks.check("an unknown path below messages is a not_found_error", || {
        refused(&raw("POST", "/v1/messages/batches", &[], b"{}"), 404, "not_found_error", "not_found", None);
    });
    checks.check("an unknown path with the header anthropic-version has Anthropic's body", || {
        let response = raw("GET", "/v1/files", &[("anthropic-version", "2023-06-01")], b"");
        refused(&response, 404, "not_found_error", "not_found", None);
    });
    checks.check("an error has exactly the fields of the published schema", || {
        let body = post(server, PATH, &json!({})).json();
        assert_eq!(keys(&body), ["error", "request_id", "type"]);
        assert_eq!(keys(&body["error"]), ["details", "message", "type"]);
    });
    checks.check("the query beta=true of the SDK is no obstacle", || {
        assert_eq!(post(server, "/v1/messages?beta=true", &ask(json!({}))).status, 200);
    });
    checks.check("messages are served without the header anthropic-version", || {
        let body = ask(json!({})).to_string();
        assert_eq!(raw("POST", PATH, &[], body.as_bytes()).status, 200);
    });
    checks.check("the server is well after every bad request", || {
        assert_eq!(get(server.address, "/health").status, 200);
        assert_eq!(post(server, PATH, &ask(json!({}))).status, 200);
    });
    checks.check("the account knows the dialect", || {
        let metrics = get(server.address, "/metrics").text();
        let line = metrics.lines().find(|l| l.starts_with("crucible_accepted_requests_total{dialect=\"anthropic\"}"));
        let accepted: f64 = line.and_then(|l| l.rsplit(' ').next()).and_then(|v| v.parse().ok()).expect("a counter");
        assert!(accepted > 50.0, "{accepted}");
    });
}

fn who_has_the_key(checks: &mut Checks) {
    let locked = Scripted::start(Script::default(), &["server.api_key=secret"]);
    let body = ask(json!({})).to_string();
    let with = |headers: &[(&str, &str)]| send(locked.address, "POST", PATH, headers, body.as_bytes()).response();
    let (kind, code) = ("authentication_error", "invalid_api_key");
    checks.check("without the key there is an authentication_error", || refused(&with(&[]), 401, kind, code, None));
    checks.check("a wrong x-api-key is an authentication_error", || {
        refused(&with(&[("x-api-key", "secre7")]), 401, kind, code, None);
    });
    checks.check("the right x-api-key is let in", || assert_eq!(with(&[("x-api-key", "secret")]).status, 200));
    checks.check("a bearer token is let in, too", || {
        assert_eq!(with(&[("authorization", "Bearer secret")]).status, 200);
    });
    checks.check("count_tokens asks for the key", || {
        refused(&send(locked.address, "POST", COUNT, &[], b"{}").response(), 401, kind, code, None);
    });
}

fn a_full_queue(checks: &mut Checks) {
    let Full { server: full, script, waiting } = Scripted::full(PATH, &ask(json!({})));
    checks.check("a full queue is 529 overloaded_error with retry-after", || {
        let response = post(&full, PATH, &ask(json!({})));
        refused(&response, 529, "overloaded_error", "queue_full", None);
        assert_eq!(response.header("retry-after"), Some("1"));
    });
    checks.check("a full queue refuses a stream before it begins", || {
        refused(&post(&full, PATH, &ask(json!({"stream": true}))), 529, "overloaded_error", "queue_full", None);
    });
    checks.check("a full queue counts tokens all the same", || {
        assert_eq!(post(&full, COUNT, &count(json!({}))).status, 200);
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
    let mut stream = send_json(server.address, PATH, &ask(json!({"stream": true, "temperature": 0})));
    stream.head();
    let early = stream.read_events(4);
    script.hold.store(false, Ordering::Release);
    checks.check("a silent stream gets ping events, not comments", || {
        assert!(early[2..].iter().all(|(name, data)| name == "ping" && data == r#"{"type":"ping"}"#), "{early:?}");
    });
    let mut rest = String::new();
    while let Some(chunk) = stream.chunk().expect("a stream") {
        rest.push_str(&String::from_utf8(chunk).unwrap());
    }
    checks.check("pings are no part of the text", || {
        let one = |(_, data): (String, String)| serde_json::from_str::<Value>(&data).unwrap();
        assert_eq!(streamed_text(&events(&rest).into_iter().map(one).collect::<Vec<_>>()), hi(12));
    });
}

fn clients_that_leave(checks: &mut Checks) {
    let script = Script { step_time: Duration::from_millis(2), ..Script::default() };
    let server = Scripted::start(script, &[]);
    let mut stream = send_json(server.address, PATH, &ask(json!({"stream": true, "max_tokens": 5000})));
    stream.head();
    stream.read_events(4);
    drop(stream);
    checks.check("a client that hangs up is cancelled and its pages are back", || {
        until("it is cancelled", || get(server.address, "/stats").json()["cancelled_requests"] == 1);
        until("rest", || at_rest(server.address));
    });
    let unary = send_json(server.address, PATH, &ask(json!({"max_tokens": 5000})));
    until("it is in", || get(server.address, "/stats").json()["active_requests"] == 1);
    drop(unary);
    checks.check("a client that hangs up on a whole answer is cancelled, too", || {
        until("it is cancelled", || get(server.address, "/stats").json()["cancelled_requests"] == 2);
    });
}

fn a_drain(checks: &mut Checks) {
    let bodies = [json!({"stream": true, "max_tokens": 5000}), json!({"max_tokens": 5000})].map(ask);
    let (server, pending) = Scripted::draining("server.drain_deadline_ms=60000", PATH, &bodies);
    until("it drains", || get(server.address, "/ready").status == 503);
    checks.check("a draining server refuses new work with 503 overloaded_error", || {
        refused(&post(&server, PATH, &ask(json!({}))), 503, "overloaded_error", "draining", None);
    });
    drop(pending);
    let (_server, pending) = Scripted::draining("server.drain_deadline_ms=400", PATH, &bodies);
    let [stream, unary] = pending.try_into().ok().expect("two answers");
    checks.check("a stream cut by the deadline ends with an error event", || {
        let events = stream.response().events();
        let (name, data) = events.last().unwrap();
        let body: Value = serde_json::from_str(data).unwrap();
        assert_eq!((name.as_str(), &body["type"]), ("error", &json!("error")));
        assert_eq!(body["error"]["type"], "overloaded_error");
        assert!(body["request_id"].as_str().unwrap().starts_with("req_"));
    });
    checks.check("a whole answer cut by the deadline is 503 overloaded_error", || {
        refused(&unary.response(), 503, "overloaded_error", "draining", None);
    });
}

fn a_dead_engine(checks: &mut Checks) {
    let at = |step| if step == 20 { Fault::FailAtPoll } else { Fault::Nothing };
    let script = Script { step_time: Duration::from_millis(2), fault: Arc::new(at), ..Script::default() };
    let server = Scripted::start(script, &["server.fatal_linger_ms=2000"]);
    let stream = send_json(server.address, PATH, &ask(json!({"stream": true, "max_tokens": 5000})));
    let unary = send_json(server.address, PATH, &ask(json!({"max_tokens": 5000})));
    checks.check("a dead engine ends a stream with an api_error event", || {
        let events = stream.response().events();
        let (name, data) = events.last().unwrap();
        let body: Value = serde_json::from_str(data).unwrap();
        assert_eq!((name.as_str(), &body["error"]["type"]), ("error", &json!("api_error")));
        assert!(!events.iter().any(|(name, _)| name == "message_stop"));
    });
    checks.check("a dead engine fails a whole answer with 503 api_error", || {
        refused(&unary.response(), 503, "api_error", "engine_failed", None);
    });
    checks.check("a dead engine refuses new work with 503 api_error", || {
        refused(&post(&server, PATH, &ask(json!({}))), 503, "api_error", "engine_failed", None);
    });
}

fn a_logit_that_is_not_finite(checks: &mut Checks) {
    let script = Script { not_finite: Arc::new(|request, index| request.0 == 1 && index == 3), ..Script::default() };
    let server = Scripted::start(script, &[]);
    checks.check("a logit that is not finite is a 500 api_error", || {
        refused(&post(&server, PATH, &ask(json!({}))), 500, "api_error", "non_finite_logits", None);
    });
    checks.check("and the next request is answered", || assert_eq!(post(&server, PATH, &ask(json!({}))).status, 200));
}
