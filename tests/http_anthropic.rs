//! Anthropic's dialect, byte for byte on a raw socket, field by field against the published schemas of its API: over the scripted
//! backend, whose answers are known in advance. `tests/sdk` speaks to the same surface through the official client.

#[path = "http_support/checks.rs"]
mod checks;
mod common;
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
use crucible::backend::Rule;
use crucible::model::tokenizer::{SpecialText, SpecialTokens, Tokenizer};
use crucible::protocol::sampling::Sampling;
use engine_support::fake::{self, Fault, Script};
use http_support::binary::Binary;
use http_support::client::{Response, events, get, post as post_json, send, send_json};
use http_support::until;
use scripted::Scripted;
use serde_json::{Value, json};

const PATH: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

fn post(server: &Scripted, path: &str, body: &Value) -> Response {
    let headers = [("content-type", "application/json"), ("anthropic-version", "2023-06-01")];
    send(server.address, "POST", path, &headers, body.to_string().as_bytes()).response()
}

fn models(server: &Scripted, path: &str) -> Response {
    send(server.address, "GET", path, &[("anthropic-version", "2023-06-01")], &[]).response()
}

/// A valid request with these fields on top.
fn ask(fields: Value) -> Value {
    let mut body = json!({"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": "hi"}]});
    merge(&mut body, fields);
    body
}

/// A valid request of count_tokens with these fields on top.
fn count(fields: Value) -> Value {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]});
    merge(&mut body, fields);
    body
}

fn merge(body: &mut Value, fields: Value) {
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
}

/// The ids of a prompt as the byte tokenizer of the scripted server has them.
fn ids(prompt: &str) -> Vec<u32> {
    let tokenizer = Tokenizer::bytes(fake::VOCAB);
    tokenizer.encode(prompt, SpecialTokens::Parse).expect("ids")
}

fn text_of(ids: &[u32]) -> String {
    Tokenizer::bytes(fake::VOCAB).decode(ids, SpecialText::Hide)
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

fn hi(tokens: usize) -> String {
    answer(&chatml(&[("user", "hi")]), tokens)
}

/// The data of every event of a stream, names checked against their types.
fn data(response: &Response) -> Vec<Value> {
    let one = |(name, data): (String, String)| {
        let value: Value = serde_json::from_str(&data).expect("JSON");
        assert_eq!(value["type"], json!(name), "an event is named like its type");
        value
    };
    response.events().into_iter().map(one).collect()
}

fn streamed_text(events: &[Value]) -> String {
    events.iter().filter_map(|e| e["delta"]["text"].as_str()).collect()
}

fn keys(value: &Value) -> Vec<String> {
    let mut keys: Vec<String> = value.as_object().expect("an object").keys().cloned().collect();
    keys.sort();
    keys
}

/// An error in Anthropic's body.
fn refused(response: &Response, status: u16, kind: &str, code: &str, param: Option<&str>) {
    let body = response.json();
    assert_eq!(response.status, status, "{body}");
    assert_eq!(body["type"], "error");
    assert_eq!(body["error"]["type"], kind, "{body}");
    assert_eq!(body["error"]["details"], json!({"error_code": code, "param": param}), "{body}");
    let message = body["error"]["message"].as_str().expect("a message");
    // A length over a limit is said in tokens; every other message names its field.
    let named = code == "context_length_exceeded" || param.is_none_or(|p| message.contains(p));
    assert!(!message.is_empty() && named, "{message} does not name {param:?}");
    let id = response.header("request-id").expect("a request id");
    assert!(id.starts_with("req_"), "{id}");
    assert_eq!(body["request_id"], json!(id));
}

fn settled(server: &Scripted) -> bool {
    let stats = get(server.address, "/stats").json();
    stats["active_requests"] == 0 && stats["queued_requests"] == 0 && stats["kv_pages_used"] == 0
}

#[test]
fn anthropics_dialect_holds_in_every_check() {
    let mut checks = Checks::of("anthropic over HTTP");
    let server = Scripted::start(Script::default(), &["server.body_limit_bytes=65536"]);
    a_message(&mut checks, &server);
    what_is_read(&mut checks, &server);
    a_stream(&mut checks, &server);
    how_answers_end(&mut checks, &server);
    answers_that_end_by_themselves(&mut checks);
    what_is_refused(&mut checks, &server);
    what_passes(&mut checks, &server);
    how_tokens_are_selected(&mut checks);
    token_counts(&mut checks, &server);
    the_list_of_models(&mut checks, &server);
    the_protocol_below(&mut checks, &server);
    keys_and_overload(&mut checks);
    the_end_of_the_server(&mut checks);
    checks.check("every page is back after all of that", || until("rest", || settled(&server)));
    checks.check("a refused request touched no page and none failed", || {
        let stats = get(server.address, "/stats").json();
        assert_eq!(stats["failed_requests"], 0);
    });
    checks.finish(125);
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

fn what_is_read(checks: &mut Checks, server: &Scripted) {
    // Greedy text of a request, and of the prompt that it must be.
    let same = |fields: Value, prompt: String| {
        let mut fields = fields;
        fields["temperature"] = json!(0);
        let body = post(server, PATH, &ask(fields)).json();
        assert_eq!(body["usage"]["input_tokens"], json!(ids(&prompt).len()), "{body}");
        assert_eq!(body["content"][0]["text"], json!(answer(&prompt, 12)));
    };
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let block = |text: &str| json!({"type": "text", "text": text});
    checks.check("content may be an array of text blocks, joined as they are", || {
        same(user(json!([block("a"), block("b")])), chatml(&[("user", "ab")]));
    });
    checks.check("content as a string and as one block is the same prompt", || {
        same(user(json!([block("hi")])), chatml(&[("user", "hi")]));
    });
    checks.check("system may be a string", || {
        same(json!({"system": "be brief"}), chatml(&[("system", "be brief"), ("user", "hi")]));
    });
    checks.check("system may be an array of text blocks", || {
        let system = json!([block("be "), block("brief")]);
        same(json!({"system": system}), chatml(&[("system", "be brief"), ("user", "hi")]));
    });
    checks.check("an empty system is no system", || same(json!({"system": ""}), chatml(&[("user", "hi")])));
    checks.check("an empty array as system is no system", || same(json!({"system": []}), chatml(&[("user", "hi")])));
    checks.check("turns alternate into the template", || {
        let messages = json!([
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
        ]);
        same(json!({"messages": messages}), chatml(&[("user", "a"), ("assistant", "b"), ("user", "c")]));
    });
    checks.check("neighbouring user messages are one turn", || {
        let messages = json!([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]);
        same(json!({"messages": messages}), chatml(&[("user", "ab")]));
    });
    checks.check("neighbouring assistant messages are one turn", || {
        let messages = json!([
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"},
        ]);
        same(json!({"messages": messages}), chatml(&[("user", "a"), ("assistant", "bc"), ("user", "d")]));
    });
    checks.check("a system message may stand inside the conversation", || {
        let messages = json!([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]);
        same(json!({"messages": messages}), chatml(&[("user", "a"), ("system", "b")]));
    });
    checks.check("a last message of the assistant begins the answer", || {
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]);
        same(json!({"messages": messages}), chatml(&[("user", "a")]) + "It is");
    });
    checks.check("a beginning that occurs in the template's end mark is continued, too", || {
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "m"}]);
        same(json!({"messages": messages}), chatml(&[("user", "a")]) + "m");
    });
    checks.check("a beginning in blocks is their text", || {
        let begun = json!([block("It"), block(" is")]);
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": begun}]);
        same(json!({"messages": messages}), chatml(&[("user", "a")]) + "It is");
    });
    checks.check("the content of an answer does not repeat its beginning", || {
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]);
        let body = post(server, PATH, &ask(json!({"messages": messages, "temperature": 0}))).json();
        assert!(!body["content"][0]["text"].as_str().unwrap().starts_with("It is"));
    });
    checks.check("an empty last message of the assistant is the same as none", || {
        let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]);
        same(json!({"messages": messages}), chatml(&[("user", "hi")]));
    });
    checks.check("a conversation may begin with the assistant", || {
        let messages = json!([{"role": "assistant", "content": "b"}, {"role": "user", "content": "a"}]);
        same(json!({"messages": messages}), chatml(&[("assistant", "b"), ("user", "a")]));
    });
    checks.check("Chinese and emoji are the bytes that they are", || {
        same(user(json!("渔船 👩‍👩‍👧")), chatml(&[("user", "渔船 👩‍👩‍👧")]));
    });
    checks.check("escaped characters of JSON are read", || {
        let raw = br#"{"model": "tiny", "max_tokens": 3, "temperature": 0, "messages": [{"role": "user", "content": "\u6e14\ud83d\ude00"}]}"#;
        let body = send(server.address, "POST", PATH, &[], raw).response().json();
        assert_eq!(body["content"][0]["text"], json!(answer(&chatml(&[("user", "渔😀")]), 3)));
    });
}

fn a_stream(checks: &mut Checks, server: &Scripted) {
    let body = ask(json!({"temperature": 0, "stream": true, "max_tokens": 40}));
    let response = post(server, PATH, &body);
    let events = data(&response);
    let kinds: Vec<&str> = events.iter().filter_map(|e| e["type"].as_str()).filter(|k| *k != "ping").collect();
    checks.check("a stream is text/event-stream and not to be cached", || {
        assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
        assert_eq!(response.header("cache-control"), Some("no-cache"));
    });
    checks.check("a stream has a request-id header", || {
        assert!(response.header("request-id").unwrap().starts_with("req_"));
    });
    checks.check("a stream begins with message_start and content_block_start", || {
        assert_eq!(kinds[..2], ["message_start", "content_block_start"]);
    });
    checks.check("a stream ends with content_block_stop, message_delta, message_stop", || {
        assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    });
    checks.check("between them there are only content_block_delta events", || {
        assert!(kinds.len() > 6);
        assert!(kinds[2..kinds.len() - 3].iter().all(|k| *k == "content_block_delta"), "{kinds:?}");
    });
    checks.check("every event has an event line before its data line", || {
        let frames = response.text();
        assert!(frames.split_terminator("\n\n").all(|f| f.starts_with("event: ") && f.contains("\ndata: ")));
    });
    checks.check("there is no [DONE]", || assert!(!response.text().contains("[DONE]")));
    let start = &events[0]["message"];
    checks.check("message_start has the fields of a message", || {
        let whole = post(server, PATH, &ask(json!({"temperature": 0}))).json();
        assert_eq!(keys(start), keys(&whole));
    });
    checks.check("message_start has an empty content and no stop reason", || {
        assert_eq!(start["content"], json!([]));
        assert!(start["stop_reason"].is_null() && start["stop_sequence"].is_null());
    });
    checks.check("message_start counts the prompt", || {
        assert_eq!(start["usage"]["input_tokens"], ids(&chatml(&[("user", "hi")])).len());
    });
    checks.check("message_start has generated nothing yet", || assert_eq!(start["usage"]["output_tokens"], 0));
    checks.check("message_start has the usage fields of a whole message", || {
        let whole = post(server, PATH, &ask(json!({"temperature": 0}))).json();
        assert_eq!(keys(&start["usage"]), keys(&whole["usage"]));
    });
    checks.check("the id of a streamed message and its request share their serial", || {
        let id = start["id"].as_str().unwrap();
        assert_eq!(&id[4..], &response.header("request-id").unwrap()[4..]);
    });
    checks.check("content_block_start opens an empty text block at index 0", || {
        let expected = json!({
            "type": "content_block_start", "index": 0,
            "content_block": {"type": "text", "text": "", "citations": null},
        });
        assert_eq!(events[1], expected);
    });
    checks.check("every delta is a text_delta at index 0", || {
        for delta in events.iter().filter(|e| e["type"] == "content_block_delta") {
            assert_eq!((&delta["index"], &delta["delta"]["type"]), (&json!(0), &json!("text_delta")));
            assert_eq!(keys(&delta["delta"]), ["text", "type"]);
        }
    });
    checks.check("no delta is empty", || {
        let mut deltas = events.iter().filter(|e| e["type"] == "content_block_delta");
        assert!(deltas.all(|d| !d["delta"]["text"].as_str().unwrap().is_empty()));
    });
    checks.check("content_block_stop closes index 0", || {
        assert_eq!(events[events.len() - 3], json!({"type": "content_block_stop", "index": 0}));
    });
    let last = &events[events.len() - 2];
    checks.check("message_delta has the stop reason", || {
        let expected = json!({
            "stop_reason": "max_tokens", "stop_sequence": null, "stop_details": null, "container": null,
        });
        assert_eq!(last["delta"], expected);
    });
    checks.check("message_delta has the cumulative usage", || {
        assert_eq!(last["usage"]["output_tokens"], 40);
        assert_eq!(last["usage"]["input_tokens"], start["usage"]["input_tokens"]);
        assert_eq!(last["usage"]["cache_read_input_tokens"], 0);
    });
    checks.check("message_delta's usage has the fields of the published schema", || {
        let expected = [
            "cache_creation_input_tokens",
            "cache_read_input_tokens",
            "input_tokens",
            "output_tokens",
            "output_tokens_details",
            "server_tool_use",
        ];
        assert_eq!(keys(&last["usage"]), expected);
    });
    checks.check("message_stop says nothing else", || {
        assert_eq!(events[events.len() - 1], json!({"type": "message_stop"}));
    });
    checks.check("a stream says what the whole answer says", || {
        let whole = post(server, PATH, &ask(json!({"temperature": 0, "max_tokens": 40}))).json();
        assert_eq!(json!(streamed_text(&events)), whole["content"][0]["text"]);
        assert_eq!(last["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
    });
    checks.check("a stream of characters split over tokens says what the whole answer says", || {
        // The scripted model speaks bytes at random: many of its answers are broken characters.
        for seed in 0..12 {
            let content = format!("{seed} 渔船 🎉");
            let fields =
                json!({"temperature": 0, "max_tokens": 60, "messages": [{"role": "user", "content": content}]});
            let whole = post(server, PATH, &ask(fields.clone())).json();
            let mut fields = fields;
            fields["stream"] = json!(true);
            let events = data(&post(server, PATH, &ask(fields)));
            assert_eq!(json!(streamed_text(&events)), whole["content"][0]["text"]);
        }
    });
    checks.check("stream = false is a whole answer", || {
        let response = post(server, PATH, &ask(json!({"stream": false})));
        assert_eq!(response.header("content-type"), Some("application/json"));
    });
    checks.check("a stream with a beginning of the answer does not repeat it", || {
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]);
        let fields = json!({"messages": messages, "temperature": 0, "stream": true});
        let text = streamed_text(&data(&post(server, PATH, &ask(fields))));
        assert_eq!(text, answer(&(chatml(&[("user", "a")]) + "It is"), 12));
    });
    checks.check("a refused stream is refused before it begins", || {
        let response = post(server, PATH, &ask(json!({"stream": true, "max_tokens": 0})));
        refused(&response, 400, "invalid_request_error", "invalid_value", Some("max_tokens"));
    });
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
        let mut body = json!({"model": "smollm2-135m-instruct", "max_tokens": 24, "messages": question});
        merge(&mut body, json!({"temperature": 0}));
        merge(&mut body, fields);
        send_json(server.address, PATH, &body).response()
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

fn what_is_refused(checks: &mut Checks, server: &Scripted) {
    let mut refuse = |sentence: &str, body: Value, code: &str, param: &str| {
        checks.check(sentence, || {
            let response = post(server, PATH, &body);
            refused(&response, 400, "invalid_request_error", code, Some(param));
        });
    };
    let without = |name: &str| {
        let mut body = ask(json!({}));
        body.as_object_mut().unwrap().remove(name);
        body
    };
    let said = |content: Value| ask(json!({"messages": [{"role": "user", "content": content}]}));
    let (missing, invalid, unsupported) = ("missing_required_parameter", "invalid_value", "unsupported_parameter");
    let unknown = "unknown_parameter";
    refuse("model is required", without("model"), missing, "model");
    refuse("messages are required", without("messages"), missing, "messages");
    refuse("max_tokens is required", without("max_tokens"), missing, "max_tokens");
    refuse("a role is required", ask(json!({"messages": [{"content": "a"}]})), missing, "messages[0].role");
    refuse("content is required", ask(json!({"messages": [{"role": "user"}]})), missing, "messages[0].content");
    refuse("a block has a type", said(json!([{"text": "a"}])), missing, "messages[0].content[0].type");
    refuse("a text block has a text", said(json!([{"type": "text"}])), missing, "messages[0].content[0].text");
    refuse("max_tokens is not 0: there is no cache to warm", ask(json!({"max_tokens": 0})), invalid, "max_tokens");
    refuse("max_tokens is not negative", ask(json!({"max_tokens": -1})), invalid, "max_tokens");
    refuse("max_tokens is no fraction", ask(json!({"max_tokens": 1.5})), invalid, "max_tokens");
    refuse("max_tokens is no string", ask(json!({"max_tokens": "5"})), invalid, "max_tokens");
    refuse("max_tokens is within the limit of the server", ask(json!({"max_tokens": 8193})), invalid, "max_tokens");
    refuse("messages are not empty", ask(json!({"messages": []})), invalid, "messages");
    refuse("messages are an array", ask(json!({"messages": "hi"})), invalid, "messages");
    refuse("a message is an object", ask(json!({"messages": ["hi"]})), invalid, "messages[0]");
    let alien = json!({"messages": [{"role": "alien", "content": "a"}]});
    refuse("a role is one of three", ask(alien), invalid, "messages[0].role");
    refuse("content is no number", said(json!(3)), invalid, "messages[0].content");
    refuse("content is not empty", said(json!("")), invalid, "messages[0].content");
    refuse("content is no empty array", said(json!([])), invalid, "messages[0].content");
    let space = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is "}]);
    refuse("a beginning does not end in a space", ask(json!({"messages": space})), invalid, "messages[1].content");
    let line = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is\n"}]);
    refuse("a beginning does not end in a line break", ask(json!({"messages": line})), invalid, "messages[1].content");
    refuse("temperature is at most 1", ask(json!({"temperature": 1.01})), invalid, "temperature");
    refuse("temperature is not negative", ask(json!({"temperature": -0.1})), invalid, "temperature");
    refuse("temperature is a number", ask(json!({"temperature": "hot"})), invalid, "temperature");
    refuse("top_p is at most 1", ask(json!({"top_p": 1.5})), invalid, "top_p");
    refuse("top_p is not negative", ask(json!({"top_p": -0.5})), invalid, "top_p");
    refuse("top_k is not negative", ask(json!({"top_k": -1})), invalid, "top_k");
    refuse("top_k is no fraction", ask(json!({"top_k": 1.5})), invalid, "top_k");
    refuse("stop_sequences are an array", ask(json!({"stop_sequences": "x"})), invalid, "stop_sequences");
    refuse("a stop sequence is a string", ask(json!({"stop_sequences": [1]})), invalid, "stop_sequences");
    refuse("a stop sequence is not empty", ask(json!({"stop_sequences": [""]})), invalid, "stop_sequences");
    let many: Vec<String> = (0..17).map(|n| n.to_string()).collect();
    refuse("there are at most 16 stop sequences", ask(json!({"stop_sequences": many})), invalid, "stop_sequences");
    refuse("stream is a boolean", ask(json!({"stream": "yes"})), invalid, "stream");
    refuse("system is no number", ask(json!({"system": 5})), invalid, "system");
    refuse("metadata is an object", ask(json!({"metadata": "me"})), invalid, "metadata");
    refuse("metadata has only a user_id", ask(json!({"metadata": {"x": 1}})), unknown, "metadata.x");
    refuse("service_tier is one of two", ask(json!({"service_tier": "gold"})), invalid, "service_tier");
    let image = json!({"type": "base64", "media_type": "image/png", "data": ""});
    let image = json!([{"type": "image", "source": image}]);
    refuse("images are refused by name", said(image), unsupported, "messages[0].content[0].type");
    let document = json!([{"type": "text", "text": "a"}, {"type": "document", "source": {}}]);
    refuse("documents are refused by name", said(document), unsupported, "messages[0].content[1].type");
    let result = json!([{"type": "tool_result", "tool_use_id": "t"}]);
    refuse("tool results are refused by name", said(result), unsupported, "messages[0].content[0].type");
    let thought = json!([{"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": ""}]}]);
    refuse("thoughts are refused", ask(json!({"messages": thought})), unsupported, "messages[1].content[0].type");
    let picture = json!([{"type": "image", "source": {}}]);
    refuse("a system prompt is text", ask(json!({"system": picture})), unsupported, "system[0].type");
    let cited = json!([{"type": "text", "text": "a", "citations": [{"type": "char_location"}]}]);
    refuse("citations are refused", said(cited), unsupported, "messages[0].content[0].citations");
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    refuse("tools are refused by name", ask(json!({"tools": tools})), unsupported, "tools");
    refuse("a tool choice is refused", ask(json!({"tool_choice": {"type": "any"}})), unsupported, "tool_choice");
    let thinking = json!({"type": "enabled", "budget_tokens": 1024});
    refuse("thinking is refused by name", ask(json!({"thinking": thinking})), unsupported, "thinking");
    refuse("adaptive thinking is refused", ask(json!({"thinking": {"type": "adaptive"}})), unsupported, "thinking");
    refuse("an effort is refused", ask(json!({"output_config": {"effort": "low"}})), unsupported, "output_config");
    refuse("speed = fast is refused", ask(json!({"speed": "fast"})), unsupported, "speed");
    refuse("a container is refused", ask(json!({"container": "c"})), unsupported, "container");
    refuse("MCP servers are refused", ask(json!({"mcp_servers": [{"url": "x"}]})), unsupported, "mcp_servers");
    refuse("an inference region is refused", ask(json!({"inference_geo": "us"})), unsupported, "inference_geo");
    refuse("diagnostics are refused", ask(json!({"diagnostics": {}})), unsupported, "diagnostics");
    refuse("a misspelt field is refused by name", ask(json!({"max_token": 3})), unknown, "max_token");
    refuse("OpenAI's stop is not Anthropic's", ask(json!({"stop": ["x"]})), unknown, "stop");
    let named = json!({"messages": [{"role": "user", "content": "a", "name": "me"}]});
    refuse("a message has no other fields", ask(named), unknown, "messages[0].name");
    let control = json!([{"type": "text", "text": "a", "cache_control": {"type": "forever"}}]);
    let path = "messages[0].content[0].cache_control.type";
    refuse("a cache control has a known type", said(control), invalid, path);
    let ttl = json!({"type": "ephemeral", "ttl": "2h"});
    refuse("a cache control has a known ttl", ask(json!({"cache_control": ttl})), invalid, "cache_control.ttl");
    let long = "x".repeat(17_000);
    let full = "context_length_exceeded";
    refuse("a prompt over the context is refused", said(json!(long)), full, "messages");
}

fn what_passes(checks: &mut Checks, server: &Scripted) {
    let plain = post(server, PATH, &ask(json!({"temperature": 0}))).json()["content"].clone();
    let mut pass = |sentence: &str, fields: Value| {
        checks.check(sentence, || {
            let mut fields = fields;
            if fields.get("temperature").is_none() {
                fields["temperature"] = json!(0);
            }
            let response = post(server, PATH, &ask(fields));
            assert_eq!(response.status, 200, "{}", response.text());
            assert_eq!(response.json()["content"], plain);
        });
    };
    pass("metadata without a user changes nothing", json!({"metadata": {}}));
    pass("metadata with a user changes nothing", json!({"metadata": {"user_id": "me"}}));
    pass("service_tier auto changes nothing", json!({"service_tier": "auto"}));
    pass("service_tier standard_only changes nothing", json!({"service_tier": "standard_only"}));
    pass("no tools change nothing", json!({"tools": [], "tool_choice": {"type": "auto"}}));
    pass("tool_choice none changes nothing", json!({"tool_choice": {"type": "none"}}));
    pass("disabled thinking changes nothing", json!({"thinking": {"type": "disabled"}}));
    pass("an empty output_config changes nothing", json!({"output_config": {}}));
    pass("speed = standard changes nothing", json!({"speed": "standard"}));
    pass(
        "a cache control of the request changes nothing",
        json!({"cache_control": {"type": "ephemeral", "ttl": "1h"}}),
    );
    let block = json!([{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "citations": null}]);
    pass("a cache control of a block changes nothing", json!({"messages": [{"role": "user", "content": block}]}));
    pass("null is the same as absent", json!({"system": null, "tools": null, "container": null, "stream": null}));
}

fn how_tokens_are_selected(checks: &mut Checks) {
    let script = Script::default();
    let server = Scripted::start(script.clone(), &[]);
    // What the backend is told for a request with these fields.
    let selection = |fields: Value| {
        script.seen.lock().unwrap().clear();
        let response = post(&server, PATH, &ask(fields));
        assert_eq!(response.status, 200, "{}", response.text());
        script.seen.lock().unwrap()[0].rows[0].sampling
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

fn keys_and_overload(checks: &mut Checks) {
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
    let script = Script { pages: 32, ..Script::default() };
    let full = Scripted::start(script.clone(), &["limits.max_queue=1", "limits.max_batch=1"]);
    script.hold.store(true, Ordering::Release);
    let waiting: Vec<_> = (0..2)
        .map(|n| {
            let pending = send_json(full.address, PATH, &ask(json!({})));
            until("it is in", || get(full.address, "/stats").json()["accepted_requests"] == n + 1);
            until("it is where it stays", || {
                let stats = get(full.address, "/stats").json();
                (&stats["active_requests"], &stats["queued_requests"]) == (&json!(1), &json!(n))
            });
            pending
        })
        .collect();
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

fn the_end_of_the_server(checks: &mut Checks) {
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

    let script = Script { step_time: Duration::from_millis(2), ..Script::default() };
    let server = Scripted::start(script, &[]);
    let mut stream = send_json(server.address, PATH, &ask(json!({"stream": true, "max_tokens": 5000})));
    stream.head();
    stream.read_events(4);
    drop(stream);
    checks.check("a client that hangs up is cancelled and its pages are back", || {
        until("it is cancelled", || get(server.address, "/stats").json()["cancelled_requests"] == 1);
        until("rest", || settled(&server));
    });
    let unary = send_json(server.address, PATH, &ask(json!({"max_tokens": 5000})));
    until("it is in", || get(server.address, "/stats").json()["active_requests"] == 1);
    drop(unary);
    checks.check("a client that hangs up on a whole answer is cancelled, too", || {
        until("it is cancelled", || get(server.address, "/stats").json()["cancelled_requests"] == 2);
    });

    let script = Script { step_time: Duration::from_millis(5), ..Script::default() };
    let draining = |deadline: &str| {
        let server = Scripted::start(script.clone(), &[deadline]);
        let stream = send_json(server.address, PATH, &ask(json!({"stream": true, "max_tokens": 5000})));
        let unary = send_json(server.address, PATH, &ask(json!({"max_tokens": 5000})));
        until("both are in", || get(server.address, "/stats").json()["active_requests"] == 2);
        server.begin_drain();
        (server, stream, unary)
    };
    let (server, stream, unary) = draining("server.drain_deadline_ms=60000");
    until("it drains", || get(server.address, "/ready").status == 503);
    checks.check("a draining server refuses new work with 503 overloaded_error", || {
        refused(&post(&server, PATH, &ask(json!({}))), 503, "overloaded_error", "draining", None);
    });
    drop((stream, unary));
    let (_server, stream, unary) = draining("server.drain_deadline_ms=400");
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

    let script = Script { not_finite: Arc::new(|request, index| request.0 == 1 && index == 3), ..Script::default() };
    let server = Scripted::start(script, &[]);
    checks.check("a logit that is not finite is a 500 api_error", || {
        refused(&post(&server, PATH, &ask(json!({}))), 500, "api_error", "non_finite_logits", None);
    });
    checks.check("and the next request is answered", || assert_eq!(post(&server, PATH, &ask(json!({}))).status, 200));
}
