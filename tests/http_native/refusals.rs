//! Fields and bodies that are wrong: refused by name, and nothing reaches the engine.

use serde_json::{Value, json};

use crate::checks::Checks;
use crate::dialect::{CONTEXT, STREAM, VOCABULARY, WHOLE, ask, at_rest, gained, refused};
use crate::http_support::binary::Binary;
use crate::http_support::client::{get, post, send};

const INVALID: &str = "invalid_value";

/// Checks that each of these bodies is refused, whole and streamed, with a code and the field to blame.
fn wrong(checks: &mut Checks, server: &Binary) -> impl FnMut(&str, &[(Value, &str, &str)]) {
    move |sentence, cases| {
        checks.check(sentence, || {
            for (fields, code, param) in cases {
                for path in [WHOLE, STREAM] {
                    refused(&post(server.address, path, &ask(fields.clone())), 400, code, Some(param));
                }
            }
        });
    }
}

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Binary) {
    let before = at_rest(server);
    prompts_and_lengths(checks, server);
    fields_of_the_selection(checks, server);
    other_fields(checks, server);
    checks.check("not one of these reached the engine", || {
        let after = at_rest(server);
        let fields = ["accepted_requests", "failed_requests", "rejected_requests", "prefill_tokens"];
        assert_eq!(gained(&before, &after, fields), [0; 4]);
    });
    bodies_that_are_wrong(checks, server);
}

fn prompts_and_lengths(checks: &mut Checks, server: &Binary) {
    let mut wrong = wrong(checks, server);
    wrong(
        "a prompt is text, and not empty",
        &[
            (json!({"prompt": 3}), INVALID, "prompt"),
            (json!({"prompt": ["a"]}), INVALID, "prompt"),
            (json!({"prompt": ""}), INVALID, "prompt"),
            (json!({"prompt": null}), "missing_required_parameter", "prompt"),
        ],
    );
    wrong(
        "prompt tokens are ids of the vocabulary, and exclude a text",
        &[
            (json!({"prompt": null, "prompt_tokens": []}), INVALID, "prompt_tokens"),
            (json!({"prompt": null, "prompt_tokens": "1"}), INVALID, "prompt_tokens"),
            (json!({"prompt": null, "prompt_tokens": [1, -1]}), INVALID, "prompt_tokens"),
            (json!({"prompt": null, "prompt_tokens": [1.5]}), INVALID, "prompt_tokens"),
            (json!({"prompt": null, "prompt_tokens": [VOCABULARY]}), INVALID, "prompt_tokens"),
            (json!({"prompt": null, "prompt_tokens": [u64::MAX]}), INVALID, "prompt_tokens"),
            (json!({"prompt_tokens": [1]}), INVALID, "prompt_tokens"),
        ],
    );
    wrong(
        "max_tokens is a whole number from 1",
        &[
            (json!({"max_tokens": 0}), INVALID, "max_tokens"),
            (json!({"max_tokens": -1}), INVALID, "max_tokens"),
            (json!({"max_tokens": 1.5}), INVALID, "max_tokens"),
            (json!({"max_tokens": "8"}), INVALID, "max_tokens"),
            (json!({"max_tokens": true}), INVALID, "max_tokens"),
        ],
    );
    wrong(
        "prompt and answer fit the context together",
        &[
            (json!({"max_tokens": CONTEXT}), "context_length_exceeded", "max_tokens"),
            (json!({"max_tokens": CONTEXT + 1}), INVALID, "max_tokens"),
            (json!({"prompt": "word ".repeat(9000), "max_tokens": 1}), "context_length_exceeded", "prompt"),
        ],
    );
}

fn fields_of_the_selection(checks: &mut Checks, server: &Binary) {
    let mut wrong = wrong(checks, server);
    wrong(
        "a temperature is a number from 0 to 5",
        &[
            (json!({"temperature": -0.1}), INVALID, "temperature"),
            (json!({"temperature": 5.1}), INVALID, "temperature"),
            (json!({"temperature": "1"}), INVALID, "temperature"),
            (json!({"temperature": []}), INVALID, "temperature"),
        ],
    );
    wrong(
        "top_k is a whole number from 1",
        &[
            (json!({"temperature": 1, "top_k": 0}), INVALID, "top_k"),
            (json!({"temperature": 1, "top_k": -1}), INVALID, "top_k"),
            (json!({"temperature": 1, "top_k": 1.5}), INVALID, "top_k"),
            (json!({"temperature": 1, "top_k": 1_u64 << 32}), INVALID, "top_k"),
        ],
    );
    wrong(
        "top_p and min_p are numbers from 0 to 1",
        &[
            (json!({"temperature": 1, "top_p": 1.1}), INVALID, "top_p"),
            (json!({"temperature": 1, "top_p": -0.1}), INVALID, "top_p"),
            (json!({"temperature": 1, "top_p": "all"}), INVALID, "top_p"),
            (json!({"temperature": 1, "min_p": 1.1}), INVALID, "min_p"),
            (json!({"temperature": 1, "min_p": -0.1}), INVALID, "min_p"),
            (json!({"temperature": 1, "min_p": {}}), INVALID, "min_p"),
        ],
    );
    wrong(
        "a seed is a whole number of 64 bits",
        &[
            (json!({"temperature": 1, "seed": -1}), INVALID, "seed"),
            (json!({"temperature": 1, "seed": 0.5}), INVALID, "seed"),
            (json!({"temperature": 1, "seed": "x"}), INVALID, "seed"),
        ],
    );
    wrong(
        "what selects needs a temperature",
        &[
            (json!({"top_k": 3}), INVALID, "top_k"),
            (json!({"top_p": 0.5}), INVALID, "top_p"),
            (json!({"min_p": 0.1}), INVALID, "min_p"),
            (json!({"seed": 1}), INVALID, "seed"),
        ],
    );
}

fn other_fields(checks: &mut Checks, server: &Binary) {
    let mut wrong = wrong(checks, server);
    wrong(
        "stop strings are up to sixteen texts, none empty",
        &[
            (json!({"stop": ""}), INVALID, "stop"),
            (json!({"stop": ["a", ""]}), INVALID, "stop"),
            (json!({"stop": [1]}), INVALID, "stop"),
            (json!({"stop": {"a": 1}}), INVALID, "stop"),
            (json!({"stop": vec!["a"; 17]}), INVALID, "stop"),
        ],
    );
    wrong(
        "logprobs is a number from 0 to 20, ignore_eos is true or false",
        &[
            (json!({"logprobs": 21}), INVALID, "logprobs"),
            (json!({"logprobs": -1}), INVALID, "logprobs"),
            (json!({"logprobs": true}), INVALID, "logprobs"),
            (json!({"ignore_eos": 1}), INVALID, "ignore_eos"),
            (json!({"ignore_eos": "true"}), INVALID, "ignore_eos"),
        ],
    );
    wrong(
        "a field of another dialect is unknown here, and not ignored",
        &[
            (json!({"stream": true}), "unknown_parameter", "stream"),
            (json!({"messages": []}), "unknown_parameter", "messages"),
            (json!({"temprature": 1}), "unknown_parameter", "temprature"),
        ],
    );
}

fn bodies_that_are_wrong(checks: &mut Checks, server: &Binary) {
    let raw = |kind: &str, body: &[u8]| send(server.address, "POST", WHOLE, &[("content-type", kind)], body).response();
    checks.check("what is no JSON object is refused as such", || {
        for body in [
            "",
            "{",
            "[]",
            "null",
            "3",
            "\"x\"",
            "{\"prompt\": \"x\",}",
            "{'prompt': 'x'}",
            "{\"prompt\": \"\\ud800\"}",
        ] {
            refused(&raw("application/json", body.as_bytes()), 400, "invalid_json", None);
        }
        refused(&raw("application/json", b"{\"prompt\": \"\xff\xfe\"}"), 400, "invalid_json", None);
    });
    checks.check("a body nested without end is refused and not followed", || {
        let deep = format!("{{\"prompt\": {}{}}}", "[".repeat(20_000), "]".repeat(20_000));
        assert_eq!(raw("application/json", deep.as_bytes()).status, 400);
    });
    checks.check("another content type is refused, none is taken for JSON", || {
        refused(&raw("text/plain", b"{}"), 415, "unsupported_media_type", None);
        let none = send(server.address, "POST", WHOLE, &[], br#"{"prompt": "x", "max_tokens": 1}"#).response();
        assert_eq!(none.status, 200);
        let with = raw("application/json; charset=utf-8", br#"{"prompt": "x", "max_tokens": 1}"#);
        assert_eq!(with.status, 200);
    });
    checks.check("a body over the limit is refused, announced or in pieces", || {
        let long = ask(json!({"prompt": "x".repeat(70_000)})).to_string();
        refused(&raw("application/json", long.as_bytes()), 413, "payload_too_large", None);
        let chunk = format!("{:x}\r\n{long}\r\n0\r\n\r\n", long.len());
        let mut head = send(server.address, "POST", WHOLE, &[("transfer-encoding", "chunked")], b"");
        head.write(chunk.as_bytes());
        refused(&head.response(), 413, "payload_too_large", None);
    });
    checks.check("other methods and other paths have their codes", || {
        let response = get(server.address, WHOLE);
        assert_eq!(response.header("allow"), Some("POST"));
        refused(&response, 405, "method_not_allowed", None);
        refused(&get(server.address, "/generate"), 404, "not_found", None);
    });
}
