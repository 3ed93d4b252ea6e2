//! A whole message, and how its tokens were selected.

use std::num::NonZeroU32;

use crucible::backend::Rule;
use crucible::protocol::sampling::Sampling;
use serde_json::{Value, json};

use crate::checks::Checks;
use crate::dialect::{PATH, ask, hi, post};
use crate::engine_support::fake::Script;
use crate::expected::{chatml, ids, keys, selections};
use crate::scripted::Scripted;

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Scripted) {
    a_message(checks, server);
    the_usage_of_a_message(checks, server);
    the_ids_of_messages(checks, server);
    how_tokens_are_selected(checks);
}

fn a_message(checks: &mut Checks, server: &Scripted) {
    let response = post(server, PATH, &ask(json!({"temperature": 0})));
    let body = response.json();
    checks.check("a message is answered with 200 and JSON", || {
        assert_eq!((response.status, response.header("content-type")), (200, Some("application/json")));
    });
    checks.check("a message has exactly the fields of the published schema", || {
        let expected = [
            "container",
            "content",
            "diagnostics",
            "id",
            "model",
            "role",
            "stop_details",
            "stop_reason",
            "stop_sequence",
            "type",
            "usage",
        ];
        assert_eq!(keys(&body), expected);
    });
    checks.check("the id of a message begins with msg_", || assert!(body["id"].as_str().unwrap().starts_with("msg_")));
    checks.check("the type of a message is message", || assert_eq!(body["type"], "message"));
    checks.check("the role of a message is assistant", || assert_eq!(body["role"], "assistant"));
    checks.check("the model of a message is the configured id", || assert_eq!(body["model"], "tiny"));
    checks.check("the content is one block of text with the model's answer", || {
        assert_eq!(body["content"], json!([{"type": "text", "text": hi(12), "citations": null}]));
    });
    checks.check("a message that used up max_tokens says so", || assert_eq!(body["stop_reason"], "max_tokens"));
    checks.check("without a stop sequence stop_sequence is null", || assert!(body["stop_sequence"].is_null()));
    checks.check("stop_details, container and diagnostics are null", || {
        assert!(["stop_details", "container", "diagnostics"].iter().all(|f| body[*f].is_null()));
    });
}

fn the_usage_of_a_message(checks: &mut Checks, server: &Scripted) {
    let body = post(server, PATH, &ask(json!({"temperature": 0}))).json();
    checks.check("usage has exactly the fields of the published schema", || {
        let expected = [
            "cache_creation",
            "cache_creation_input_tokens",
            "cache_read_input_tokens",
            "inference_geo",
            "input_tokens",
            "output_tokens",
            "output_tokens_details",
            "server_tool_use",
            "service_tier",
            "speed",
        ];
        assert_eq!(keys(&body["usage"]), expected);
    });
    checks.check("input_tokens are the tokens of the rendered conversation", || {
        assert_eq!(body["usage"]["input_tokens"], ids(&chatml(&[("user", "hi")])).len());
    });
    checks.check("output_tokens are the generated tokens", || assert_eq!(body["usage"]["output_tokens"], 12));
    checks.check("usage says that nothing was cached", || {
        let usage = &body["usage"];
        assert_eq!((&usage["cache_creation_input_tokens"], &usage["cache_read_input_tokens"]), (&json!(0), &json!(0)));
        let creation = json!({"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0});
        assert_eq!(usage["cache_creation"], creation);
    });
    checks.check("the service tier is standard", || assert_eq!(body["usage"]["service_tier"], "standard"));
}

fn the_ids_of_messages(checks: &mut Checks, server: &Scripted) {
    let response = post(server, PATH, &ask(json!({"temperature": 0})));
    let body = response.json();
    checks.check("the answer has a request-id header", || {
        assert!(response.header("request-id").expect("an id").starts_with("req_"));
    });
    checks.check("request id and message id share their serial", || {
        let serial = |id: &str| id[4..].to_owned();
        assert_eq!(serial(response.header("request-id").unwrap()), serial(body["id"].as_str().unwrap()));
    });
    let again = post(server, PATH, &ask(json!({"temperature": 0})));
    checks.check("two requests have two ids", || {
        assert_ne!(again.json()["id"], body["id"]);
        assert_ne!(again.header("request-id"), response.header("request-id"));
    });
    checks.check("the same request has the same content", || assert_eq!(again.json()["content"], body["content"]));
    checks.check("max_tokens of 1 is one token", || {
        let body = post(server, PATH, &ask(json!({"max_tokens": 1, "temperature": 0}))).json();
        assert_eq!(body["usage"]["output_tokens"], 1);
        assert_eq!(body["content"][0]["text"], json!(hi(1)));
    });
}

fn how_tokens_are_selected(checks: &mut Checks) {
    let script = Script::default();
    let server = Scripted::start(script.clone(), &[]);
    // What the backend is told for a request with these fields.
    let selection = |fields: Value| {
        script.seen.lock().unwrap().clear();
        let response = post(&server, PATH, &ask(fields));
        assert_eq!(response.status, 200, "{}", response.text());
        selections(&script)[0]
    };
    let rule = |sampling: Sampling| sampling.rule();
    let hot = Sampling { temperature: 1.0, ..Sampling::GREEDY };
    checks.check("the default temperature is 1 without filters", || {
        assert_eq!(selection(json!({})).rule, rule(hot));
    });
    checks.check("temperature 0 is greedy", || {
        assert_eq!(selection(json!({"temperature": 0, "top_k": 5})).rule, Rule::Greedy);
    });
    checks.check("temperature reaches the selection", || {
        let expected = rule(Sampling { temperature: 0.5, ..hot });
        assert_eq!(selection(json!({"temperature": 0.5})).rule, expected);
    });
    checks.check("top_p reaches the selection", || {
        assert_eq!(selection(json!({"top_p": 0.25})).rule, rule(Sampling { top_p: 0.25, ..hot }));
    });
    checks.check("top_k reaches the selection", || {
        let expected = rule(Sampling { top_k: NonZeroU32::new(7), ..hot });
        assert_eq!(selection(json!({"top_k": 7})).rule, expected);
    });
    checks.check("top_k of 0 keeps every token", || assert_eq!(selection(json!({"top_k": 0})).rule, rule(hot)));
    checks.check("min_p, ours, reaches the selection", || {
        assert_eq!(selection(json!({"min_p": 0.125})).rule, rule(Sampling { min_p: 0.125, ..hot }));
    });
    checks.check("a seed, ours, reaches the draws", || assert_eq!(selection(json!({"seed": 77})).seed, 77));
    checks.check("without a seed every request draws its own", || {
        assert_ne!(selection(json!({})).seed, selection(json!({})).seed);
    });
    checks.check("an answer is choice 0", || assert_eq!(selection(json!({})).choice, 0));
}
