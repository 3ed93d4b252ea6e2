//! Counts of tokens and the list of models.

use serde_json::{Value, json};

use crate::checks::Checks;
use crate::dialect::{COUNT, PATH, ask, count, models, post, refused};
use crate::expected::keys;
use crate::http_support::client::get;
use crate::scripted::Scripted;

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Scripted) {
    token_counts(checks, server);
    the_list_of_models(checks, server);
    pages_of_the_list(checks, server);
}

fn token_counts(checks: &mut Checks, server: &Scripted) {
    let counted = |fields: Value| {
        let response = post(server, COUNT, &count(fields));
        assert_eq!(response.status, 200, "{}", response.text());
        response.json()["input_tokens"].clone()
    };
    checks.check("count_tokens answers exactly input_tokens", || {
        assert_eq!(keys(&post(server, COUNT, &count(json!({}))).json()), ["input_tokens"]);
    });
    checks.check("count_tokens has a request-id header", || {
        let response = post(server, COUNT, &count(json!({})));
        assert!(response.header("request-id").unwrap().starts_with("req_"));
    });
    let block = json!([{"type": "text", "text": "渔船 "}, {"type": "text", "text": "🎉"}]);
    for (sentence, fields) in [
        ("count_tokens is input_tokens for one message", json!({})),
        ("count_tokens is input_tokens with a system prompt", json!({"system": "be brief"})),
        ("count_tokens is input_tokens with blocks", json!({"messages": [{"role": "user", "content": block}]})),
        (
            "count_tokens is input_tokens with a beginning of the answer",
            json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]}),
        ),
    ] {
        checks.check(sentence, || {
            let reported = post(server, PATH, &ask(fields.clone())).json()["usage"]["input_tokens"].clone();
            assert_eq!(counted(fields), reported);
        });
    }
    checks.check("a conversation that no prompt can hold is refused like its request", || {
        let long = json!({"messages": [{"role": "user", "content": "x".repeat(20_000)}]});
        let response = post(server, COUNT, &count(long));
        refused(&response, 400, "invalid_request_error", "context_length_exceeded", Some("messages"));
    });
    checks.check("count_tokens takes the no-op fields of a request", || {
        let fields = json!({"tools": [], "thinking": {"type": "disabled"}, "cache_control": {"type": "ephemeral"}});
        assert_eq!(counted(fields), counted(json!({})));
    });
    let mut refuse = |sentence: &str, body: Value, status: u16, kind: &str, code: &str, param: &str| {
        checks.check(sentence, || refused(&post(server, COUNT, &body), status, kind, code, Some(param)));
    };
    let (bad, unknown) = ("invalid_request_error", "unknown_parameter");
    refuse("count_tokens has no max_tokens", count(json!({"max_tokens": 3})), 400, bad, unknown, "max_tokens");
    refuse("count_tokens has no temperature", count(json!({"temperature": 0})), 400, bad, unknown, "temperature");
    let tools = json!({"tools": [{"name": "f"}]});
    refuse("count_tokens counts no tools", count(tools), 400, bad, "unsupported_parameter", "tools");
    let missing = "missing_required_parameter";
    refuse("count_tokens needs messages", json!({"model": "tiny"}), 400, bad, missing, "messages");
    let other = count(json!({"model": "other"}));
    refuse("count_tokens knows one model", other, 404, "not_found_error", "model_not_found", "model");
}

fn the_list_of_models(checks: &mut Checks, server: &Scripted) {
    let response = models(server, "/v1/models");
    let body = response.json();
    checks.check("the list of models is a page with one model", || {
        assert_eq!(keys(&body), ["data", "first_id", "has_more", "last_id"]);
        assert_eq!((&body["has_more"], body["data"].as_array().map(Vec::len)), (&json!(false), Some(1)));
    });
    checks.check("first_id and last_id are the model", || {
        assert_eq!((&body["first_id"], &body["last_id"]), (&json!("tiny"), &json!("tiny")));
    });
    checks.check("the list has a request-id header", || assert!(response.header("request-id").is_some()));
    let model = &body["data"][0];
    checks.check("a model has exactly the fields of the published schema", || {
        let expected = [
            "capabilities",
            "created_at",
            "deprecated_at",
            "display_name",
            "id",
            "lifecycle",
            "line",
            "max_input_tokens",
            "max_tokens",
            "retires_at",
            "type",
        ];
        assert_eq!(keys(model), expected);
    });
    checks.check("the type of a model is model", || assert_eq!(model["type"], "model"));
    checks.check("the model is active and has no date of its end", || {
        assert_eq!(model["lifecycle"], "active");
        assert!(model["deprecated_at"].is_null() && model["retires_at"].is_null());
    });
    checks.check("created_at is a moment of this century in RFC 3339", || {
        let at = model["created_at"].as_str().unwrap();
        assert!(at.len() == 20 && at.starts_with("20") && at.ends_with('Z') && &at[10..11] == "T", "{at}");
    });
    checks.check("the limits of a model are those of requests", || {
        assert_eq!(model["max_tokens"], 8192);
        assert!(model["max_input_tokens"].as_u64() > Some(0));
    });
    checks.check("one model by its id is the model of the list", || {
        assert_eq!(models(server, "/v1/models/tiny").json(), *model);
    });
    checks.check("an unknown model is a not_found_error", || {
        let response = models(server, "/v1/models/other");
        refused(&response, 404, "not_found_error", "model_not_found", Some("model"));
    });
    checks.check("without the header anthropic-version the list is OpenAI's", || {
        assert_eq!(get(server.address, "/v1/models").json()["object"], "list");
    });
}

fn pages_of_the_list(checks: &mut Checks, server: &Scripted) {
    let body = models(server, "/v1/models").json();
    let page = |query: &str| models(server, &format!("/v1/models?{query}"));
    checks.check("nothing comes after the only model", || {
        let body = page("after_id=tiny").json();
        assert_eq!(body, json!({"data": [], "has_more": false, "first_id": null, "last_id": null}));
    });
    checks.check("nothing comes before the only model", || {
        assert_eq!(page("before_id=tiny").json()["data"], json!([]));
    });
    checks.check("a limit of 1 has room for the model", || assert_eq!(page("limit=1").json(), body));
    checks.check("no retired model is listed", || {
        assert_eq!(page("lifecycle[]=retired&lifecycle[]=deprecated").json()["data"], json!([]));
    });
    for (sentence, query, code, param) in [
        ("a limit of 0 is refused", "limit=0", "invalid_value", "limit"),
        ("a limit over 1000 is refused", "limit=1001", "invalid_value", "limit"),
        ("a cursor that names no model is refused", "after_id=other", "invalid_value", "after_id"),
        ("two cursors are refused", "after_id=tiny&before_id=tiny", "invalid_value", "before_id"),
        ("an unknown lifecycle is refused", "lifecycle=new", "invalid_value", "lifecycle"),
        ("an unknown parameter of the list is refused", "order=desc", "unknown_parameter", "order"),
    ] {
        checks.check(sentence, || refused(&page(query), 400, "invalid_request_error", code, Some(param)));
    }
}
