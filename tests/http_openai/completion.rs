//! Completions, whole and streamed.

use serde_json::{Value, json};

use crate::checks::Checks;
use crate::dialect::{TEXT, chunks, streamed, text};
use crate::engine_support::fake;
use crate::expected::{answer, ids, keys, merge, text_of};
use crate::http_support::client::post;
use crate::scripted::Scripted;

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Scripted) {
    a_completion(checks, server);
    a_stream(checks, server);
}

fn a_completion(checks: &mut Checks, server: &Scripted) {
    let ask = |fields: Value| post(server.address, TEXT, &text(fields)).json();
    let body = ask(json!({}));
    checks.check("a completion has exactly the fields of the published schema", || {
        assert_eq!(keys(&body), ["choices", "created", "id", "model", "object", "system_fingerprint", "usage"]);
    });
    checks.check("the id of a completion begins with cmpl-", || {
        assert!(body["id"].as_str().unwrap().starts_with("cmpl-"))
    });
    checks.check("the object of a completion is text_completion", || assert_eq!(body["object"], "text_completion"));
    checks.check("a choice of a completion has exactly its fields", || {
        assert_eq!(keys(&body["choices"][0]), ["finish_reason", "index", "logprobs", "text"]);
    });
    checks
        .check("a completion continues its prompt", || assert_eq!(body["choices"][0]["text"], json!(answer("hi", 12))));
    checks.check("a completion without max_tokens has 16", || {
        assert_eq!(ask(json!({"max_tokens": null}))["usage"]["completion_tokens"], 16);
    });
    checks.check("a prompt of token ids is taken as it is", || {
        let body = ask(json!({"prompt": [7, 300, 999]}));
        assert_eq!(body["choices"][0]["text"], json!(text_of(&fake::expected(&[7, 300, 999], 12))));
        assert_eq!(body["usage"]["prompt_tokens"], 3);
    });
    checks.check("the same prompt as text and as ids has the same answer", || {
        assert_eq!(ask(json!({"prompt": ids("渔🎉")}))["choices"], ask(json!({"prompt": "渔🎉"}))["choices"]);
    });
    checks.check("an array of texts has a choice for each", || {
        let body = ask(json!({"prompt": ["a", "b", "c"]}));
        let texts: Vec<_> = body["choices"].as_array().unwrap().iter().map(|c| c["text"].clone()).collect();
        assert_eq!(texts, ["a", "b", "c"].map(|p| json!(answer(p, 12))));
    });
    checks.check("an array of token arrays has a choice for each", || {
        let body = ask(json!({"prompt": [[1], [2, 3]]}));
        assert_eq!(body["choices"][1]["text"], json!(text_of(&fake::expected(&[2, 3], 12))));
        assert_eq!(body["usage"], json!({"prompt_tokens": 3, "completion_tokens": 24, "total_tokens": 27}));
    });
    checks.check("prompts with n have their choices prompt by prompt", || {
        let body = ask(json!({"prompt": ["a", "b"], "n": 2}));
        let choices = body["choices"].as_array().unwrap();
        let expected = ["a", "a", "b", "b"].map(|p| json!(answer(p, 12)));
        assert_eq!(choices.iter().map(|c| c["text"].clone()).collect::<Vec<_>>(), expected);
        assert_eq!(choices.iter().map(|c| c["index"].clone()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    });
    checks.check("best_of at n passes", || assert_eq!(ask(json!({"n": 2, "best_of": 2}))["choices"][1]["index"], 1));
    checks.check("echo puts the prompt before the answer", || {
        assert_eq!(ask(json!({"echo": true}))["choices"][0]["text"], json!(format!("hi{}", answer("hi", 12))));
    });
    checks.check("echo of token ids is their text", || {
        let prompt = ids("渔🎉");
        let expected = format!("渔🎉{}", text_of(&fake::expected(&prompt, 12)));
        assert_eq!(ask(json!({"echo": true, "prompt": prompt}))["choices"][0]["text"], json!(expected));
    });
    checks.check("echo does not count as completion", || {
        assert_eq!(ask(json!({"echo": true}))["usage"], body["usage"]);
    });
}

fn a_stream(checks: &mut Checks, server: &Scripted) {
    let ask = |fields: Value| chunks(&post(server.address, TEXT, &merge(text(fields), json!({"stream": true}))));
    let all = ask(json!({"max_tokens": 40}));
    checks.check("every chunk of a completion is a text_completion", || {
        assert!(all.iter().all(|c| c["object"] == "text_completion"));
    });
    checks.check("every choice of a completion's chunk has the fields of the published schema", || {
        assert!(all.iter().all(|c| keys(&c["choices"][0]) == ["finish_reason", "index", "logprobs", "text"]));
    });
    checks.check("a completion's finish_reason is on its last chunk only", || {
        let (last, rest) = all.split_last().unwrap();
        assert_eq!(last["choices"][0]["finish_reason"], "length");
        assert!(rest.iter().all(|c| c["choices"][0]["finish_reason"].is_null()));
    });
    checks.check("a completion stream says what the whole answer says", || {
        assert_eq!(streamed(&all, 0), answer("hi", 40));
    });
    checks.check("a completion stream of broken characters says what the whole answer says", || {
        for prompt in ["渔", "船", "🎉", "é", "日本", "👩‍👩‍👧"] {
            assert_eq!(streamed(&ask(json!({"prompt": prompt, "max_tokens": 60})), 0), answer(prompt, 60));
        }
    });
    checks.check("a stream with echo begins with the prompt", || {
        let all = ask(json!({"echo": true}));
        assert_eq!(all[0]["choices"][0]["text"], "hi");
        assert_eq!(streamed(&all, 0), format!("hi{}", answer("hi", 12)));
    });
    checks.check("a stream of several prompts keeps their indices", || {
        let all = ask(json!({"prompt": ["a", "b"]}));
        assert_eq!((streamed(&all, 0), streamed(&all, 1)), (answer("a", 12), answer("b", 12)));
    });
    checks.check("a completion stream has its usage when it is asked for", || {
        let all = ask(json!({"stream_options": {"include_usage": true}}));
        let expected = json!({"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14});
        assert_eq!(all[all.len() - 1]["usage"], expected);
    });
}
