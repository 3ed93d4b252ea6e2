//! OpenAI's dialect, byte for byte on a raw socket, field by field against the published schemas of its API: over the scripted backend,
//! whose answers are known in advance. `tests/sdk` speaks to the same surface through the official client.

#[path = "http_support/checks.rs"]
mod checks;
mod engine_support;
mod http_support;
#[allow(dead_code)] // these tests wait for no end
#[path = "http_support/scripted.rs"]
mod scripted;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use checks::Checks;
use crucible::arith::select::token_logprobs;
use crucible::backend::{Rule, SamplingRow};
use crucible::model::tokenizer::{SpecialText, SpecialTokens, Tokenizer};
use crucible::protocol::sampling::Sampling;
use engine_support::fake::{self, Fault, Script};
use http_support::binary::Binary;
use http_support::client::{Response, get, post, send, send_json};
use http_support::until;
use scripted::Scripted;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn merge(mut body: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// A valid chat with these fields on top.
fn chat(fields: Value) -> Value {
    let messages = json!([{"role": "user", "content": "hi"}]);
    merge(json!({"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": messages}), fields)
}

/// A valid completion with these fields on top.
fn text(fields: Value) -> Value {
    merge(json!({"model": "tiny", "max_tokens": 12, "temperature": 0, "prompt": "hi"}), fields)
}

fn tokenizer() -> Tokenizer {
    Tokenizer::bytes(fake::VOCAB)
}

fn ids(prompt: &str) -> Vec<u32> {
    tokenizer().encode(prompt, SpecialTokens::Parse).expect("ids")
}

fn text_of(ids: &[u32]) -> String {
    tokenizer().decode(ids, SpecialText::Hide)
}

/// ChatML of these turns, with the beginning of an answer.
fn chatml(turns: &[(&str, &str)]) -> String {
    let turn = |(role, content): &(&str, &str)| format!("<|im_start|>{role}\n{content}<|im_end|>\n");
    turns.iter().map(turn).collect::<String>() + "<|im_start|>assistant\n"
}

/// The text that the scripted model answers to a prompt.
fn answer(prompt: &str, tokens: usize) -> String {
    text_of(&fake::expected(&ids(prompt), tokens))
}

fn keys(value: &Value) -> Vec<String> {
    let mut keys: Vec<String> = value.as_object().expect("an object").keys().cloned().collect();
    keys.sort();
    keys
}

/// The chunks of a stream, without its `[DONE]`.
fn chunks(response: &Response) -> Vec<Value> {
    assert_eq!(response.status, 200, "{}", response.text());
    let events = response.events();
    let (last, rest) = events.split_last().expect("events");
    assert_eq!(last.1, "[DONE]");
    rest.iter().map(|(_, data)| serde_json::from_str(data).expect("JSON")).collect()
}

/// The concatenated text of one choice of a stream.
fn streamed(chunks: &[Value], index: usize) -> String {
    let choices = chunks.iter().flat_map(|c| c["choices"].as_array().expect("choices"));
    let of = choices.filter(|c| c["index"] == index);
    of.filter_map(|c| c["delta"]["content"].as_str().or_else(|| c["text"].as_str())).collect()
}

/// An error in OpenAI's body.
fn refused(response: &Response, status: u16, kind: &str, code: &str, param: Option<&str>) {
    let body = response.json();
    assert_eq!(response.status, status, "{body}");
    assert_eq!(keys(&body), ["error"]);
    assert_eq!(keys(&body["error"]), ["code", "message", "param", "type"]);
    let error = &body["error"];
    assert_eq!((&error["type"], &error["code"]), (&json!(kind), &json!(code)), "{body}");
    assert_eq!(error["param"], json!(param), "{body}");
    assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()));
    assert!(response.header("x-request-id").expect("a request id").starts_with("req_"));
}

fn settled(server: &Scripted) -> bool {
    let stats = get(server.address, "/stats").json();
    stats["active_requests"] == 0 && stats["queued_requests"] == 0 && stats["kv_pages_used"] == 0
}

#[test]
fn openais_dialect_holds_in_every_check() {
    let mut checks = Checks::of("openai over HTTP");
    let server = Scripted::start(Script::default(), &["server.body_limit_bytes=65536"]);
    a_chat(&mut checks, &server);
    what_a_chat_reads(&mut checks, &server);
    a_chat_stream(&mut checks, &server);
    a_completion(&mut checks, &server);
    a_completion_stream(&mut checks, &server);
    log_probabilities(&mut checks, &server);
    scores_of_prompts(&mut checks, &server);
    scores_are_bits(&mut checks);
    how_answers_end(&mut checks, &server);
    how_tokens_are_selected(&mut checks);
    what_a_chat_refuses(&mut checks, &server);
    what_a_completion_refuses(&mut checks, &server);
    what_passes(&mut checks, &server);
    models(&mut checks, &server);
    the_protocol_below(&mut checks, &server);
    keys_and_overload(&mut checks);
    the_end_of_the_server(&mut checks);
    checks.check("every page is back after all of that", || until("rest", || settled(&server)));
    checks.check("none of the refused requests failed in the engine", || {
        assert_eq!(get(server.address, "/stats").json()["failed_requests"], 0);
    });
    checks.finish(125);
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
        assert_eq!(body["usage"]["prompt_tokens"], ids(&prompt).len());
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

fn a_chat_stream(checks: &mut Checks, server: &Scripted) {
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

fn a_completion_stream(checks: &mut Checks, server: &Scripted) {
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

fn log_probabilities(checks: &mut Checks, server: &Scripted) {
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
    // What the backend is told for the last prefill rows of a request with these fields: one for each sequence, by its id.
    let selections = |path: &str, body: Value| -> Vec<SamplingRow> {
        script.seen.lock().unwrap().clear();
        let response = post(server.address, path, &body);
        assert_eq!(response.status, 200, "{}", response.text());
        let seen = script.seen.lock().unwrap();
        let mut rows: Vec<_> = seen.iter().flat_map(|s| &s.rows).map(|r| (r.request, r.sampling)).collect();
        rows.sort_by_key(|(request, _)| *request);
        rows.dedup_by_key(|(request, _)| *request);
        rows.into_iter().map(|(_, sampling)| sampling).collect()
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

fn what_a_chat_refuses(checks: &mut Checks, server: &Scripted) {
    let mut refuse = |sentence: &str, body: Value, code: &str, param: &str| {
        checks.check(sentence, || {
            let response = post(server.address, CHAT, &body);
            refused(&response, 400, "invalid_request_error", code, Some(param));
        });
    };
    let without = |name: &str| {
        let mut body = chat(json!({}));
        body.as_object_mut().unwrap().remove(name);
        body
    };
    let said = |message: Value| chat(json!({"messages": [message]}));
    let (missing, invalid, unsupported) = ("missing_required_parameter", "invalid_value", "unsupported_parameter");
    let unknown = "unknown_parameter";
    refuse("a chat needs a model", without("model"), missing, "model");
    refuse("a chat needs messages", without("messages"), missing, "messages");
    refuse("messages are not empty", chat(json!({"messages": []})), invalid, "messages");
    refuse("messages are an array", chat(json!({"messages": "hi"})), invalid, "messages");
    refuse("a message has a role", said(json!({"content": "a"})), missing, "messages[0].role");
    refuse("a message has a content", said(json!({"role": "user"})), missing, "messages[0].content");
    refuse("an unknown role is refused", said(json!({"role": "alien", "content": "a"})), invalid, "messages[0].role");
    let tool = json!({"role": "tool", "content": "a", "tool_call_id": "t"});
    refuse("the role tool is refused by name", said(tool), unsupported, "messages[0].role");
    let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]});
    refuse("images are refused by name", said(image), unsupported, "messages[0].content[0].type");
    let audio = json!({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]});
    refuse("audio parts are refused by name", said(audio), unsupported, "messages[0].content[0].type");
    let named = json!({"role": "user", "content": "a", "name": "me"});
    refuse("a name in a message is refused", said(named), unsupported, "messages[0].name");
    let calls = json!({"role": "assistant", "content": "a", "tool_calls": [{"id": "t"}]});
    refuse("tool calls are refused", said(calls), unsupported, "messages[0].tool_calls");
    refuse("max_tokens is not 0", chat(json!({"max_tokens": 0})), invalid, "max_tokens");
    let two = json!({"max_tokens": 3, "max_completion_tokens": 4});
    refuse("two limits that differ are refused", chat(two), invalid, "max_completion_tokens");
    refuse("temperature is at most 2", chat(json!({"temperature": 2.1})), invalid, "temperature");
    refuse("top_p is at most 1", chat(json!({"top_p": 1.1})), invalid, "top_p");
    refuse("n is at most 128", chat(json!({"n": 129})), invalid, "n");
    refuse("top_logprobs need logprobs", chat(json!({"top_logprobs": 2})), invalid, "top_logprobs");
    let many = json!({"logprobs": true, "top_logprobs": 21});
    refuse("top_logprobs are at most 20", chat(many), invalid, "top_logprobs");
    refuse("logprobs of a chat are a boolean", chat(json!({"logprobs": 3})), invalid, "logprobs");
    refuse("there are at most four stop strings", chat(json!({"stop": ["a", "b", "c", "d", "e"]})), invalid, "stop");
    refuse("a stop string is not empty", chat(json!({"stop": ""})), invalid, "stop");
    refuse("a seed is an integer", chat(json!({"seed": 1.5})), invalid, "seed");
    refuse("stream is a boolean", chat(json!({"stream": 1})), invalid, "stream");
    let options = json!({"stream_options": {"include_usage": true}});
    refuse("stream_options need a stream", chat(options), invalid, "stream_options");
    let options = json!({"stream": true, "stream_options": {"include_usage": true, "x": 1}});
    refuse("an unknown stream option is refused", chat(options), unknown, "stream_options.x");
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    refuse("tools are refused by name", chat(json!({"tools": tools})), unsupported, "tools");
    refuse("functions are refused by name", chat(json!({"functions": [{"name": "f"}]})), unsupported, "functions");
    refuse("a required tool is refused", chat(json!({"tool_choice": "required"})), unsupported, "tool_choice");
    let json_mode = json!({"response_format": {"type": "json_object"}});
    refuse("JSON mode is refused by name", chat(json_mode), unsupported, "response_format");
    refuse("audio output is refused", chat(json!({"modalities": ["text", "audio"]})), unsupported, "modalities");
    refuse("a voice is refused", chat(json!({"audio": {"voice": "x"}})), unsupported, "audio");
    refuse("a prediction is refused", chat(json!({"prediction": {"type": "content"}})), unsupported, "prediction");
    refuse("an effort is refused", chat(json!({"reasoning_effort": "low"})), unsupported, "reasoning_effort");
    refuse("a verbosity is refused", chat(json!({"verbosity": "low"})), unsupported, "verbosity");
    refuse("web search is refused", chat(json!({"web_search_options": {}})), unsupported, "web_search_options");
    refuse("storing is refused", chat(json!({"store": true})), unsupported, "store");
    refuse("metadata is refused", chat(json!({"metadata": {"a": "b"}})), unsupported, "metadata");
    refuse("another service tier is refused", chat(json!({"service_tier": "flex"})), unsupported, "service_tier");
    refuse("a misspelt field is refused by name", chat(json!({"max_token": 3})), unknown, "max_token");
    let long = json!({"role": "user", "content": "x".repeat(17_000)});
    refuse("a chat over the context is refused", said(long), "context_length_exceeded", "messages");
    for name in ["max_tokens", "max_completion_tokens"] {
        let mut limits = json!({"max_tokens": null});
        limits[name] = json!(1_000_000);
        refuse(&format!("an answer too long is refused as the client named it: {name}"), chat(limits), invalid, name);
    }
}

fn what_a_completion_refuses(checks: &mut Checks, server: &Scripted) {
    let mut refuse = |sentence: &str, body: Value, code: &str, param: &str| {
        checks.check(sentence, || {
            let response = post(server.address, TEXT, &body);
            refused(&response, 400, "invalid_request_error", code, Some(param));
        });
    };
    let invalid = "invalid_value";
    let empty = json!({"model": "tiny"});
    refuse("a completion needs a prompt", empty, "missing_required_parameter", "prompt");
    refuse("a prompt is not empty", text(json!({"prompt": ""})), invalid, "prompt");
    refuse("an array of prompts is not empty", text(json!({"prompt": []})), invalid, "prompt");
    refuse("a prompt is no number", text(json!({"prompt": 3})), invalid, "prompt");
    refuse("a token id is in the vocabulary", text(json!({"prompt": [1000]})), invalid, "prompt");
    refuse("a token id is not negative", text(json!({"prompt": [-1]})), invalid, "prompt");
    refuse("ids and texts are not mixed", text(json!({"prompt": [1, "a"]})), invalid, "prompt");
    let suffix = json!({"suffix": "y"});
    refuse("a suffix is refused by name", text(suffix), "unsupported_parameter", "suffix");
    let best = json!({"n": 2, "best_of": 3});
    refuse("best_of above n is refused by name", text(best), "unsupported_parameter", "best_of");
    let beyond = json!({"echo": true, "logprobs": 1, "presence_penalty": 2.1});
    refuse("a penalty of a scored prompt is at most 2", text(beyond), invalid, "presence_penalty");
    refuse("logprobs of a completion are at most 20", text(json!({"logprobs": 21})), invalid, "logprobs");
    refuse("echo is a boolean", text(json!({"echo": 1})), invalid, "echo");
    let many: Vec<String> = (0..1025).map(|n| n.to_string()).collect();
    refuse("there are at most 1024 answers", text(json!({"prompt": many})), invalid, "n");
    let some: Vec<&str> = vec!["a"; 200];
    refuse("there are no more answers than the queue holds", text(json!({"prompt": some})), invalid, "n");
    let mut some = vec!["a".to_owned(); 199];
    some.push("x".repeat(17_000));
    refuse("they are counted before any is encoded", text(json!({"prompt": some})), invalid, "n");
    let (full, over) = (vec![1; 16_380], "context_length_exceeded");
    refuse(
        "a prompt that leaves no room for 16 is named",
        text(json!({"prompt": full, "max_tokens": null})),
        over,
        "prompt",
    );
    refuse("and so is the length that was sent", text(json!({"prompt": full, "max_tokens": 16})), over, "max_tokens");
    let chat_only = json!({"max_completion_tokens": 3});
    refuse("a chat's field is unknown to completions", text(chat_only), "unknown_parameter", "max_completion_tokens");
}

fn what_passes(checks: &mut Checks, server: &Scripted) {
    let plain = post(server.address, CHAT, &chat(json!({}))).json()["choices"].clone();
    let mut pass = |sentence: &str, fields: Value| {
        checks.check(sentence, || {
            let response = post(server.address, CHAT, &chat(fields));
            assert_eq!(response.status, 200, "{}", response.text());
            assert_eq!(response.json()["choices"], plain);
        });
    };
    pass("a user changes nothing", json!({"user": "me"}));
    pass("a safety identifier changes nothing", json!({"safety_identifier": "me"}));
    pass("a prompt cache key changes nothing", json!({"prompt_cache_key": "k"}));
    pass("penalties of 0 change nothing", json!({"frequency_penalty": 0, "presence_penalty": 0.0}));
    pass("an empty logit_bias changes nothing", json!({"logit_bias": {}}));
    pass("no tools change nothing", json!({"tools": [], "tool_choice": "auto", "parallel_tool_calls": true}));
    pass("a format of text changes nothing", json!({"response_format": {"type": "text"}}));
    pass("modalities of text change nothing", json!({"modalities": ["text"]}));
    pass("not storing changes nothing", json!({"store": false, "metadata": {}}));
    pass("the usual service tier changes nothing", json!({"service_tier": "auto"}));
    pass("null is the same as absent", json!({"stop": null, "tools": null, "stream": null, "audio": null, "n": null}));
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

fn keys_and_overload(checks: &mut Checks) {
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
    let script = Script { pages: 32, ..Script::default() };
    let full = Scripted::start(script.clone(), &["limits.max_queue=1", "limits.max_batch=1"]);
    script.hold.store(true, Ordering::Release);
    let mut waiting = Vec::new();
    for n in 0..2 {
        waiting.push(send_json(full.address, CHAT, &chat(json!({}))));
        until("it is where it stays", || {
            let stats = get(full.address, "/stats").json();
            (&stats["active_requests"], &stats["queued_requests"]) == (&json!(1), &json!(n))
        });
    }
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

fn the_end_of_the_server(checks: &mut Checks) {
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

    let script = Script { step_time: Duration::from_millis(5), ..Script::default() };
    let draining = |deadline: &str| {
        let server = Scripted::start(script.clone(), &[deadline]);
        let stream = send_json(server.address, CHAT, &chat(json!({"stream": true, "max_tokens": 5000})));
        until("it is in", || get(server.address, "/stats").json()["active_requests"] == 1);
        server.begin_drain();
        (server, stream)
    };
    let (server, stream) = draining("server.drain_deadline_ms=60000");
    until("it drains", || get(server.address, "/ready").status == 503);
    checks.check("a draining server refuses new work with 503", || {
        refused(&post(server.address, CHAT, &chat(json!({}))), 503, "server_error", "draining", None);
    });
    drop(stream);
    let (_server, stream) = draining("server.drain_deadline_ms=400");
    checks.check("a stream cut by the deadline ends with an error and without [DONE]", || {
        let events = stream.response().events();
        let body: Value = serde_json::from_str(&events.last().unwrap().1).unwrap();
        assert_eq!(body["error"]["type"], "server_error");
        assert!(events.iter().all(|(_, data)| data != "[DONE]"));
    });

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
