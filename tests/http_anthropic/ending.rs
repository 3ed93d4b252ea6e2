//! How answers end: by length, by a stop sequence, and, on the real model, by themselves.

use serde_json::{Value, json};

use crate::checks::Checks;
use crate::common;
use crate::dialect::{PATH, ask, data, hi, post, streamed_text};
use crate::engine_support::fake;
use crate::expected::{chatml, ids, merge, text_of};
use crate::http_support::binary::Binary;
use crate::http_support::client::{post as post_json, send_json};
use crate::scripted::Scripted;

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Scripted) {
    how_answers_end(checks, server);
    answers_that_end_by_themselves(checks);
}

fn how_answers_end(checks: &mut Checks, server: &Scripted) {
    let text = hi(200);
    let stop: String = text.chars().skip(30).take(4).collect();
    let cut = text.find(&stop).expect("it is there");
    let fields = json!({"temperature": 0, "max_tokens": 200, "stop_sequences": ["never there", stop]});
    let body = post(server, PATH, &ask(fields.clone())).json();
    checks.check("a stop sequence ends the answer before itself", || {
        assert_eq!(body["content"][0]["text"], json!(&text[..cut]));
    });
    checks.check("a stop sequence is the stop reason", || assert_eq!(body["stop_reason"], "stop_sequence"));
    checks.check("the stop sequence that was met is reported", || assert_eq!(body["stop_sequence"], json!(stop)));
    checks.check("the tokens up to the stop sequence count", || {
        let tokens = body["usage"]["output_tokens"].as_u64().unwrap() as usize;
        let all = fake::expected(&ids(&chatml(&[("user", "hi")])), tokens);
        assert!(text_of(&all).contains(&stop) && !text_of(&all[..tokens - 1]).contains(&stop));
    });
    let mut fields = fields;
    fields["stream"] = json!(true);
    let events = data(&post(server, PATH, &ask(fields)));
    checks.check("no part of a stop sequence is streamed", || assert_eq!(streamed_text(&events), text[..cut]));
    checks.check("a stream reports the stop sequence in message_delta", || {
        let delta = &events[events.len() - 2]["delta"];
        assert_eq!((&delta["stop_reason"], &delta["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
    });
    checks.check("of two stop sequences that end together the longer is reported", || {
        let short: String = stop.chars().skip(1).collect();
        let fields = json!({"temperature": 0, "max_tokens": 200, "stop_sequences": [short, stop]});
        assert_eq!(post(server, PATH, &ask(fields)).json()["stop_sequence"], json!(stop));
    });
    checks.check("a stop sequence at the very beginning leaves one empty block", || {
        let first: String = text.chars().take(1).collect();
        let fields = json!({"temperature": 0, "max_tokens": 200, "stop_sequences": [first]});
        let body = post(server, PATH, &ask(fields)).json();
        assert_eq!(body["content"], json!([{"type": "text", "text": "", "citations": null}]));
    });
    checks.check("no stop sequences are as none", || {
        let fields = json!({"temperature": 0, "stop_sequences": []});
        assert_eq!(post(server, PATH, &ask(fields)).json()["stop_reason"], "max_tokens");
    });
}

/// The scripted model never ends by itself; the default one does.
fn answers_that_end_by_themselves(checks: &mut Checks) {
    let model = format!("model.path=\"{}\"", common::default_model().display());
    let server = Binary::start("config/crucible.toml", &[&model, "executor.backend=cpu"]);
    let question = json!([{"role": "user", "content": "What is the name of the capital of France?"}]);
    let with = |fields: Value| {
        let body = json!({"model": "smollm2-135m-instruct", "max_tokens": 24, "messages": question, "temperature": 0});
        send_json(server.address, PATH, &merge(body, fields)).response()
    };
    let whole = with(json!({})).json();
    checks.check("an answer that ends by itself is an end_turn", || {
        assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!("end_turn"), &Value::Null));
    });
    checks.check("the capital of France is Paris", || {
        assert!(whole["content"][0]["text"].as_str().unwrap().contains("Paris"), "{whole}");
    });
    checks.check("the end-of-sequence token counts and has no text", || {
        let text = &whole["content"][0]["text"];
        let tokens = post_json(server.address, "/tokenize", &json!({"text": text})).json()["count"].as_u64().unwrap();
        assert_eq!(whole["usage"]["output_tokens"], tokens + 1);
    });
    checks.check("a stream that ends by itself is an end_turn", || {
        let events = data(&with(json!({"stream": true})));
        assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], "end_turn");
        assert_eq!(json!(streamed_text(&events)), whole["content"][0]["text"]);
    });
    checks.check("ignore_eos, ours, goes past the end", || {
        let body = with(json!({"ignore_eos": true})).json();
        assert_eq!((&body["stop_reason"], &body["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(24)));
    });
    checks.check("a beginning of the answer is continued by the model", || {
        let messages = json!([question[0], {"role": "assistant", "content": "The capital of France is"}]);
        let body = with(json!({"messages": messages})).json();
        assert!(body["content"][0]["text"].as_str().unwrap().trim_start().starts_with("Paris"), "{body}");
    });
}
