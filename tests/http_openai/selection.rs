//! How tokens are selected, and how answers end.

use std::num::NonZeroU32;

use crucible::backend::{Rule, SamplingRow};
use crucible::protocol::sampling::Sampling;
use serde_json::{Value, json};

use crate::checks::Checks;
use crate::dialect::{CHAT, TEXT, chat, chunks, streamed, text};
use crate::engine_support::fake::Script;
use crate::expected::{answer, chatml, merge, selections};
use crate::http_support::client::post;
use crate::scripted::Scripted;

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Scripted) {
    how_answers_end(checks, server);
    how_tokens_are_selected(checks);
}

fn how_answers_end(checks: &mut Checks, server: &Scripted) {
    let full = answer("hi", 200);
    let stop: String = full.chars().skip(30).take(4).collect();
    let cut = full.find(&stop).expect("it is there");
    let ask = |fields: Value| {
        post(server.address, TEXT, &merge(text(json!({"max_tokens": 200})), fields)).json()["choices"][0].clone()
    };
    checks.check("a stop string ends the answer before itself", || {
        let choice = ask(json!({"stop": stop}));
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(&full[..cut]), &json!("stop")));
    });
    checks.check("of four stop strings the first in the text ends it", || {
        let choice = ask(json!({"stop": ["never there", stop, "nor there", "nor there, too"]}));
        assert_eq!(choice["text"], json!(&full[..cut]));
    });
    checks.check("an empty array of stop strings is none", || {
        assert_eq!(ask(json!({"stop": []}))["finish_reason"], "length");
    });
    checks.check("no part of a stop string is streamed", || {
        let body = text(json!({"max_tokens": 200, "stop": stop, "stream": true}));
        let all = chunks(&post(server.address, TEXT, &body));
        assert_eq!(streamed(&all, 0), full[..cut]);
        assert_eq!(all[all.len() - 1]["choices"][0]["finish_reason"], "stop");
    });
    checks.check("every choice is stopped for itself", || {
        let body = text(json!({"prompt": ["hi", "other"], "max_tokens": 60, "stop": stop}));
        let body = post(server.address, TEXT, &body).json();
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        assert_eq!(body["choices"][1]["finish_reason"], "length");
    });
    checks.check("a chat is stopped like a completion", || {
        let full = answer(&chatml(&[("user", "hi")]), 60);
        let stop: String = full.chars().skip(20).take(4).collect();
        let body = post(server.address, CHAT, &chat(json!({"max_tokens": 60, "stop": [stop]}))).json();
        assert_eq!(body["choices"][0]["message"]["content"], json!(&full[..full.find(&stop).unwrap()]));
    });
}

fn how_tokens_are_selected(checks: &mut Checks) {
    let script = Script::default();
    let server = Scripted::start(script.clone(), &[]);
    let selections = |path: &str, body: Value| -> Vec<SamplingRow> {
        script.seen.lock().unwrap().clear();
        let response = post(server.address, path, &body);
        assert_eq!(response.status, 200, "{}", response.text());
        selections(&script)
    };
    let hot = Sampling { temperature: 1.0, ..Sampling::GREEDY };
    let of = |fields: Value| selections(TEXT, text(merge(json!({"temperature": null}), fields)))[0];
    checks.check("OpenAI's default temperature is 1 without filters", || assert_eq!(of(json!({})).rule, hot.rule()));
    checks.check("temperature 0 is greedy", || assert_eq!(of(json!({"temperature": 0})).rule, Rule::Greedy));
    checks.check("temperature goes up to 2", || {
        assert_eq!(of(json!({"temperature": 2})).rule, Sampling { temperature: 2.0, ..hot }.rule());
    });
    checks.check("top_p reaches the selection", || {
        assert_eq!(of(json!({"top_p": 0.25})).rule, Sampling { top_p: 0.25, ..hot }.rule());
    });
    checks.check("top_k, ours, reaches the selection", || {
        assert_eq!(of(json!({"top_k": 7})).rule, Sampling { top_k: NonZeroU32::new(7), ..hot }.rule());
    });
    checks.check("min_p, ours, reaches the selection", || {
        assert_eq!(of(json!({"min_p": 0.125})).rule, Sampling { min_p: 0.125, ..hot }.rule());
    });
    checks.check("a seed reaches the draws", || assert_eq!(of(json!({"seed": 77})).seed, 77));
    checks.check("a negative seed is taken by its bits", || assert_eq!(of(json!({"seed": -1})).seed, u64::MAX));
    checks.check("without a seed every request draws its own", || assert_ne!(of(json!({})).seed, of(json!({})).seed));
    checks.check("n choices share the seed and have random streams 0 to n - 1", || {
        let rows = selections(CHAT, chat(json!({"n": 3, "seed": 5})));
        assert_eq!(rows.iter().map(|r| (r.seed, r.choice)).collect::<Vec<_>>(), [(5, 0), (5, 1), (5, 2)]);
    });
    checks.check("every prompt begins its choices at stream 0", || {
        let rows = selections(TEXT, text(json!({"prompt": ["a", "b"], "n": 2, "seed": 5})));
        assert_eq!(rows.iter().map(|r| r.choice).collect::<Vec<_>>(), [0, 1, 0, 1]);
    });
}
