//! Log-probabilities of answers, and the scores of prompts.

use crucible::arith::select::token_logprobs;
use serde_json::{Value, json};

use crate::checks::Checks;
use crate::dialect::{CHAT, TEXT, chat, chunks, streamed, text};
use crate::engine_support::fake;
use crate::expected::{chatml, ids, keys, merge, text_of};
use crate::http_support::binary::Binary;
use crate::http_support::client::{Response, post};
use crate::scripted::Scripted;

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Scripted) {
    log_probabilities_of_a_chat(checks, server);
    log_probabilities_of_a_completion(checks, server);
    scores_of_prompts(checks, server);
    scores_are_bits(checks);
}

fn log_probabilities_of_a_chat(checks: &mut Checks, server: &Scripted) {
    let expected = fake::expected(&ids(&chatml(&[("user", "hi")])), 12);
    let fields = json!({"logprobs": true, "top_logprobs": 2});
    let body = post(server.address, CHAT, &chat(fields.clone())).json();
    let content = body["choices"][0]["logprobs"]["content"].clone();
    checks.check("a chat's logprobs have content and refusal", || {
        assert_eq!(keys(&body["choices"][0]["logprobs"]), ["content", "refusal"]);
    });
    checks.check("there is one entry for each generated token", || assert_eq!(content.as_array().unwrap().len(), 12));
    checks.check("an entry has exactly the fields of the published schema", || {
        assert_eq!(keys(&content[0]), ["bytes", "logprob", "token", "top_logprobs"]);
        assert_eq!(keys(&content[0]["top_logprobs"][0]), ["bytes", "logprob", "token"]);
    });
    checks.check("an entry has the log-probability of its token", || {
        for (entry, &id) in content.as_array().unwrap().iter().zip(&expected) {
            assert_eq!(entry["logprob"], -f64::from(id));
        }
    });
    checks.check("the bytes of the entries are the bytes of the answer", || {
        let bytes: Vec<u8> = content
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|e| e["bytes"].as_array().unwrap().clone())
            .map(|b| b.as_u64().unwrap() as u8)
            .collect();
        assert_eq!(json!(String::from_utf8_lossy(&bytes)), body["choices"][0]["message"]["content"]);
    });
    checks.check("top_logprobs are as many as asked for", || {
        assert!(content.as_array().unwrap().iter().all(|e| e["top_logprobs"].as_array().unwrap().len() == 2));
    });
    checks.check("logprobs without top_logprobs have no alternatives", || {
        let body = post(server.address, CHAT, &chat(json!({"logprobs": true}))).json();
        assert_eq!(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
    });
    checks.check("a chat stream has the logprobs of the whole answer", || {
        let all = chunks(&post(server.address, CHAT, &merge(chat(fields), json!({"stream": true}))));
        let entries = all.iter().filter_map(|c| c["choices"][0]["logprobs"]["content"].as_array()).flatten();
        assert_eq!(json!(entries.collect::<Vec<_>>()), content);
    });
}

fn log_probabilities_of_a_completion(checks: &mut Checks, server: &Scripted) {
    let ask = |fields: Value| post(server.address, TEXT, &text(fields)).json();
    let body = ask(json!({"logprobs": 2}));
    let lists = &body["choices"][0]["logprobs"];
    checks.check("a completion's logprobs are four parallel lists", || {
        assert_eq!(keys(lists), ["text_offset", "token_logprobs", "tokens", "top_logprobs"]);
        assert!(lists.as_object().unwrap().values().all(|l| l.as_array().unwrap().len() == 12));
    });
    checks.check("top_logprobs of a completion include the chosen token", || {
        for (token, top) in lists["tokens"].as_array().unwrap().iter().zip(lists["top_logprobs"].as_array().unwrap()) {
            assert!(top.get(token.as_str().unwrap()).is_some());
        }
    });
    checks.check("the offsets of a completion's tokens begin at 0 and ascend", || {
        let offsets: Vec<u64> = lists["text_offset"].as_array().unwrap().iter().map(|o| o.as_u64().unwrap()).collect();
        assert_eq!(offsets[0], 0);
        assert!(offsets.is_sorted());
    });
    checks.check("logprobs of 0 are the chosen tokens' alone", || {
        let top = ask(json!({"logprobs": 0}))["choices"][0]["logprobs"]["top_logprobs"].clone();
        assert!(top.as_array().unwrap().iter().all(|t| t.as_object().unwrap().len() == 1));
    });
    checks.check("a completion stream has the logprobs of the whole answer", || {
        let all = chunks(&post(server.address, TEXT, &text(json!({"logprobs": 2, "stream": true}))));
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let entries = all.iter().filter_map(|c| c["choices"][0]["logprobs"][name].as_array()).flatten();
            assert_eq!(json!(entries.collect::<Vec<_>>()), lists[name], "{name}");
        }
    });
}

fn scores_of_prompts(checks: &mut Checks, server: &Scripted) {
    let prompt: Vec<u32> = (0..100).map(|n| n * 7 % 251).collect();
    let scores: Vec<_> =
        (1..prompt.len()).map(|end| token_logprobs(&fake::logits(&prompt[..end]), prompt[end], 2)).collect();
    let asked = json!({"prompt": prompt, "echo": true, "logprobs": 2, "max_tokens": 3});
    let response = post(server.address, TEXT, &text(asked.clone()));
    let body = response.json();
    let lists = &body["choices"][0]["logprobs"];
    let plain = post(server.address, TEXT, &text(merge(asked.clone(), json!({"echo": false})))).json();
    checks.check("echo with logprobs has an entry for every token of prompt and answer", || {
        assert!(lists.as_object().unwrap().values().all(|l| l.as_array().unwrap().len() == 103), "{lists}");
    });
    checks.check("the first token of a prompt has no log-probability", || {
        assert!(lists["token_logprobs"][0].is_null() && lists["top_logprobs"][0].is_null());
    });
    checks.check("the other tokens of a prompt have theirs given the tokens before, to the last bit", || {
        // From the text itself: the usual JSON parser rounds the last digit.
        let raw = response.text();
        let list = raw.split("\"token_logprobs\":[").nth(1).and_then(|rest| rest.split(']').next()).expect("a list");
        let got: Vec<u64> = list.split(',').skip(1).map(|n| n.parse::<f64>().expect("a number").to_bits()).collect();
        let expected: Vec<u64> = scores.iter().map(|s| s.chosen.to_bits()).collect();
        assert_eq!(got[..99], expected);
    });
    checks.check("the alternatives of a prompt's tokens are the most likely ones", || {
        for (at, score) in scores.iter().enumerate() {
            let top = lists["top_logprobs"][at + 1].as_object().unwrap();
            assert!((2..=3).contains(&top.len()), "{top:?}");
            assert!(score.top.iter().all(|(_, logprob)| top.values().any(|v| *v == json!(logprob))), "{at}");
        }
    });
    checks.check("scoring the prompt does not change the answer", || {
        let answer = plain["choices"][0]["text"].as_str().unwrap();
        assert_eq!(body["choices"][0]["text"], json!(text_of(&prompt) + answer));
    });
    checks.check("scoring the prompt does not change the answer's log-probabilities", || {
        let of = |name: &str| lists[name].as_array().unwrap()[100..].to_vec();
        assert_eq!(json!(of("token_logprobs")), plain["choices"][0]["logprobs"]["token_logprobs"]);
    });
    checks.check("scoring the prompt changes no count", || assert_eq!(body["usage"], plain["usage"]));
    checks.check("a stream has the scores of the prompt, too", || {
        let all = chunks(&post(server.address, TEXT, &text(merge(asked.clone(), json!({"stream": true})))));
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let entries = all.iter().filter_map(|c| c["choices"][0]["logprobs"][name].as_array()).flatten();
            assert_eq!(json!(entries.collect::<Vec<_>>()), lists[name], "{name}");
        }
        assert_eq!(json!(streamed(&all, 0)), body["choices"][0]["text"]);
    });
    checks.check("a prompt of one token has nothing to score", || {
        let asked = json!({"prompt": [65], "echo": true, "logprobs": 0, "max_tokens": 2});
        let body = post(server.address, TEXT, &text(asked.clone())).json();
        assert_eq!(body["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().len(), 3);
        let all = chunks(&post(server.address, TEXT, &text(merge(asked, json!({"stream": true})))));
        assert_eq!(all[0]["choices"][0]["logprobs"]["token_logprobs"], json!([null]));
    });
    checks.check("every choice of n has its prompt scored", || {
        let body = post(server.address, TEXT, &text(merge(asked.clone(), json!({"n": 2})))).json();
        assert_eq!(body["choices"][1]["logprobs"], *lists);
    });
}

/// What generation says of its tokens and what scoring says of the same tokens in a prompt, on a model that computes.
fn scores_are_bits(checks: &mut Checks) {
    let server = Binary::tiny(&["prefill.token_budget=48"]);
    let ask = |fields: Value| post(server.address, TEXT, &text(merge(json!({"logprobs": 3}), fields)));
    // The digits as they stand in the body: a parser would round them.
    let digits = |response: &Response| -> Vec<String> {
        assert_eq!(response.status, 200, "{}", response.text());
        let body = response.text();
        let list = body.split("\"token_logprobs\":[").nth(1).and_then(|rest| rest.split(']').next()).expect("a list");
        list.split(',').map(String::from).collect()
    };
    let prompt: Vec<u32> = (0..90).map(|n| 32 + n * 7 % 90).collect();
    let native = json!({"prompt_tokens": prompt, "max_tokens": 40, "ignore_eos": true});
    let generated = post(server.address, "/v1/generate", &native).json()["token_ids"].clone();
    let said = digits(&ask(json!({"prompt": prompt, "max_tokens": 40, "ignore_eos": true})));
    let mut all = json!(prompt);
    all.as_array_mut().unwrap().extend(generated.as_array().unwrap().clone());
    let scored = digits(&ask(json!({"prompt": all, "max_tokens": 1, "echo": true})));
    checks.check(
        "a generated token and the same token in a scored prompt have the same log-probability, bit for bit",
        || {
            assert_eq!((said.len(), scored.len()), (40, 131));
            assert_eq!(scored[90..130], said);
        },
    );
    checks.check("scoring a prompt moves no bit of what follows it", || {
        let after =
            |echo: bool| digits(&ask(json!({"prompt": all, "max_tokens": 9, "echo": echo, "ignore_eos": true})));
        assert_eq!(after(true)[130..], after(false));
    });
}
