//! Chats, whole and streamed, and what they read.

use serde_json::{Value, json};

use crate::checks::Checks;
use crate::dialect::{CHAT, chat, chunks, refused, streamed};
use crate::expected::{answer, chatml, ids, keys, merge};
use crate::http_support::client::post;
use crate::scripted::Scripted;

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Scripted) {
    a_chat(checks, server);
    limits_and_choices(checks, server);
    what_a_chat_reads(checks, server);
    a_stream(checks, server);
    usage_and_choices_of_a_stream(checks, server);
}

fn a_chat(checks: &mut Checks, server: &Scripted) {
    let response = post(server.address, CHAT, &chat(json!({})));
    let body = response.json();
    let prompt = chatml(&[("user", "hi")]);
    checks.check("a chat is answered with 200 and JSON", || {
        assert_eq!((response.status, response.header("content-type")), (200, Some("application/json")));
    });
    checks.check("a chat has exactly the fields of the published schema that apply", || {
        assert_eq!(keys(&body), ["choices", "created", "id", "model", "object", "system_fingerprint", "usage"]);
    });
    checks.check("the id of a chat begins with chatcmpl-", || {
        assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    });
    checks.check("the object of a chat is chat.completion", || assert_eq!(body["object"], "chat.completion"));
    checks.check("a chat names the configured model", || assert_eq!(body["model"], "tiny"));
    checks.check("created is a Unix time of this century in seconds", || {
        assert!((1_577_836_800..4_102_444_800).contains(&body["created"].as_u64().unwrap()));
    });
    checks.check("system_fingerprint names version and profile", || {
        let fingerprint = body["system_fingerprint"].as_str().unwrap();
        assert!(fingerprint.starts_with(concat!("crucible-", env!("CARGO_PKG_VERSION"), "-")), "{fingerprint}");
    });
    checks.check("a choice has exactly the fields of the published schema", || {
        assert_eq!(keys(&body["choices"][0]), ["finish_reason", "index", "logprobs", "message"]);
    });
    checks.check("the message is the model's answer in the assistant's role", || {
        let expected = json!({"role": "assistant", "content": answer(&prompt, 12), "refusal": null});
        assert_eq!(body["choices"][0]["message"], expected);
    });
    checks.check("without logprobs a choice has null for them", || {
        assert!(body["choices"][0].as_object().unwrap()["logprobs"].is_null());
    });
    checks.check("an answer that used up max_tokens has finish_reason length", || {
        assert_eq!(body["choices"][0]["finish_reason"], "length");
    });
    checks.check("usage adds up", || {
        let tokens = ids(&prompt).len();
        let expected = json!({"prompt_tokens": tokens, "completion_tokens": 12, "total_tokens": tokens + 12});
        assert_eq!(body["usage"], expected);
    });
    checks.check("the id of a chat is in its header", || {
        assert_eq!(response.header("x-request-id"), body["id"].as_str());
    });
    checks.check("two chats have two ids and one content", || {
        let again = post(server.address, CHAT, &chat(json!({}))).json();
        assert_ne!(again["id"], body["id"]);
        assert_eq!(again["choices"], body["choices"]);
    });
}

fn limits_and_choices(checks: &mut Checks, server: &Scripted) {
    checks.check("max_completion_tokens is the newer name of max_tokens", || {
        let fields = json!({"max_tokens": null, "max_completion_tokens": 5});
        let body = post(server.address, CHAT, &chat(fields)).json();
        assert_eq!(body["usage"]["completion_tokens"], 5);
    });
    checks.check("both names with one value are one limit", || {
        let body = post(server.address, CHAT, &chat(json!({"max_tokens": 6, "max_completion_tokens": 6}))).json();
        assert_eq!(body["usage"]["completion_tokens"], 6);
    });
    checks.check("n choices come in the order of their indices", || {
        let body = post(server.address, CHAT, &chat(json!({"n": 3}))).json();
        let indices: Vec<_> = body["choices"].as_array().unwrap().iter().map(|c| c["index"].clone()).collect();
        assert_eq!(indices, [0, 1, 2]);
    });
    checks.check("n choices count their prompt once", || {
        let body = post(server.address, CHAT, &chat(json!({"n": 3}))).json();
        assert_eq!(body["usage"]["prompt_tokens"], ids(&chatml(&[("user", "hi")])).len());
        assert_eq!(body["usage"]["completion_tokens"], 36);
    });
}

fn what_a_chat_reads(checks: &mut Checks, server: &Scripted) {
    let same = |messages: Value, prompt: String| {
        let body = post(server.address, CHAT, &chat(json!({"messages": messages}))).json();
        assert_eq!(body["choices"][0]["message"]["content"], json!(answer(&prompt, 12)), "{body}");
        assert_eq!(body["usage"]["prompt_tokens"], ids(&prompt).len());
    };
    let part = |text: &str| json!({"type": "text", "text": text});
    checks.check("turns of system, user and assistant become the template", || {
        let messages = json!([
            {"role": "system", "content": "s"}, {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
        ]);
        same(messages, chatml(&[("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]));
    });
    checks.check("a developer is a system", || {
        let messages = json!([{"role": "developer", "content": "s"}, {"role": "user", "content": "a"}]);
        same(messages, chatml(&[("system", "s"), ("user", "a")]));
    });
    checks.check("parts of text are joined as they are", || {
        same(json!([{"role": "user", "content": [part("a"), part("b")]}]), chatml(&[("user", "ab")]));
    });
    checks.check("neighbouring messages of one role stay two turns", || {
        let messages = json!([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]);
        same(messages, chatml(&[("user", "a"), ("user", "b")]));
    });
    checks.check("Chinese and emoji are the bytes that they are", || {
        same(json!([{"role": "user", "content": "渔船 👩‍👩‍👧"}]), chatml(&[("user", "渔船 👩‍👩‍👧")]));
    });
    checks.check("empty lists of tool calls and annotations pass", || {
        let message =
            json!({"role": "assistant", "content": "b", "tool_calls": [], "annotations": [], "refusal": null});
        same(json!([{"role": "user", "content": "a"}, message]), chatml(&[("user", "a"), ("assistant", "b")]));
    });
}

fn a_stream(checks: &mut Checks, server: &Scripted) {
    let response = post(server.address, CHAT, &chat(json!({"stream": true, "max_tokens": 40})));
    let all = chunks(&response);
    checks.check("a chat stream is text/event-stream and not to be cached", || {
        assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
        assert_eq!(response.header("cache-control"), Some("no-cache"));
    });
    checks.check("a chat stream has no event names", || assert!(!response.text().contains("event:")));
    checks.check("a chunk has exactly the fields of the published schema that apply", || {
        assert!(all.iter().all(|c| keys(c) == ["choices", "created", "id", "model", "object", "system_fingerprint"]));
    });
    checks.check("every chunk of a chat is a chat.completion.chunk", || {
        assert!(all.iter().all(|c| c["object"] == "chat.completion.chunk"));
    });
    checks.check("every chunk has the same id, time and fingerprint", || {
        for name in ["id", "created", "model", "system_fingerprint"] {
            assert!(all.iter().all(|c| c[name] == all[0][name]), "{name}");
        }
    });
    checks.check("the id of a stream is in its header", || {
        assert_eq!(response.header("x-request-id"), all[0]["id"].as_str());
    });
    checks.check("the first chunk has the role and an empty content", || {
        assert_eq!(all[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    });
    checks.check("the role comes once", || {
        assert!(all[1..].iter().all(|c| c["choices"][0]["delta"].get("role").is_none()));
    });
    checks.check("the last chunk has an empty delta and the finish_reason", || {
        let last = &all[all.len() - 1]["choices"][0];
        assert_eq!((&last["delta"], &last["finish_reason"]), (&json!({}), &json!("length")));
    });
    checks.check("no earlier chunk has a finish_reason", || {
        assert!(all[..all.len() - 1].iter().all(|c| c["choices"][0]["finish_reason"].is_null()));
    });
    checks.check("every choice of a chunk has the fields of the published schema", || {
        assert!(all.iter().all(|c| keys(&c["choices"][0]) == ["delta", "finish_reason", "index", "logprobs"]));
    });
    checks.check("a chat stream says what the whole answer says", || {
        let whole = post(server.address, CHAT, &chat(json!({"max_tokens": 40}))).json();
        assert_eq!(json!(streamed(&all, 0)), whole["choices"][0]["message"]["content"]);
    });
    checks.check("a chat stream of broken characters says what the whole answer says", || {
        for seed in 0..12 {
            let messages = json!([{"role": "user", "content": format!("{seed} 渔船 🎉")}]);
            let body = chat(json!({"messages": messages, "max_tokens": 60}));
            let whole = post(server.address, CHAT, &body).json();
            let all = chunks(&post(server.address, CHAT, &merge(body, json!({"stream": true}))));
            assert_eq!(json!(streamed(&all, 0)), whole["choices"][0]["message"]["content"]);
        }
    });
}

fn usage_and_choices_of_a_stream(checks: &mut Checks, server: &Scripted) {
    let fields = json!({"stream": true, "stream_options": {"include_usage": true}});
    let counted = chunks(&post(server.address, CHAT, &chat(fields)));
    checks.check("with include_usage the last chunk has no choices and the usage", || {
        let last = &counted[counted.len() - 1];
        let whole = post(server.address, CHAT, &chat(json!({}))).json();
        assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &whole["usage"]));
    });
    checks.check("with include_usage every earlier chunk has null usage", || {
        assert!(counted[..counted.len() - 1].iter().all(|c| c.as_object().unwrap()["usage"].is_null()));
    });
    checks.check("with include_usage = false there is no usage", || {
        let fields = json!({"stream": true, "stream_options": {"include_usage": false}});
        assert!(!post(server.address, CHAT, &chat(fields)).text().contains("usage"));
    });
    checks.check("a stream of n choices has a role, a text and an end for each", || {
        let all = chunks(&post(server.address, CHAT, &chat(json!({"stream": true, "n": 2}))));
        for index in 0..2 {
            let of: Vec<_> = all.iter().map(|c| &c["choices"][0]).filter(|c| c["index"] == index).collect();
            assert_eq!(of[0]["delta"]["role"], "assistant");
            assert_eq!(of[of.len() - 1]["finish_reason"], "length");
            assert_eq!(streamed(&all, index), answer(&chatml(&[("user", "hi")]), 12));
        }
    });
    checks.check("a refused chat stream is refused before it begins", || {
        let response = post(server.address, CHAT, &chat(json!({"stream": true, "n": 0})));
        refused(&response, 400, "invalid_request_error", "invalid_value", Some("n"));
    });
}
