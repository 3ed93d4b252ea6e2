//! The HTTP side over a scripted backend: dialects, streams, disconnects, overload, drain and death of the engine.

mod engine_support;
mod http_support;
#[path = "http_support/scripted.rs"]
mod scripted;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crucible::server::Ending;
use engine_support::fake::{self, Fault, Script};
use http_support::client::{get, post, send, send_json};
use http_support::{at_rest, until};
use scripted::Scripted;
use serde_json::{Value, json};

/// The text of fake tokens as the byte tokenizer shows it.
fn text_of(ids: &[u32]) -> String {
    crucible::model::tokenizer::Tokenizer::bytes(fake::VOCAB).decode(ids, crucible::model::tokenizer::SpecialText::Hide)
}

fn stats(server: &Scripted) -> Value {
    get(server.address, "/stats").json()
}

#[test]
fn a_native_answer_is_the_models_tokens_and_their_text() {
    let server = Scripted::start(Script::default(), &[]);
    let response = post(server.address, "/v1/generate", &json!({"prompt": "abc", "max_tokens": 9}));
    assert_eq!(response.status, 200, "{}", response.text());
    let body = response.json();
    let expected = fake::expected(&[97, 98, 99], 9);
    assert_eq!(body["token_ids"], json!(expected));
    assert_eq!(body["text"], json!(text_of(&expected)));
    assert_eq!((&body["tokens_generated"], &body["prompt_tokens"]), (&json!(9), &json!(3)));
    assert_eq!(body["finish_reason"], "length");
}

#[test]
fn a_stream_says_what_the_whole_answer_says_in_every_dialect() {
    let server = Scripted::start(Script::default(), &[]);
    let base = json!({"max_tokens": 40, "temperature": 0});
    let with = |fields: Value| {
        let mut body = base.clone();
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    };
    let parse = |(_, data): &(String, String)| serde_json::from_str::<Value>(data).unwrap_or(Value::Null);
    for prompt in ["abc", "x", "hello world"] {
        let body = with(json!({"prompt": prompt}));
        let whole = post(server.address, "/v1/generate", &body).json();
        let events = post(server.address, "/v1/generate/stream", &body).events();
        let text: String = events.iter().map(parse).filter_map(|e| e["text"].as_str().map(String::from)).collect();
        assert_eq!(json!(text), whole["text"]);
        assert_eq!(events.last().unwrap().0, "done");
        assert_eq!(events.len(), 41);

        let chat = json!({"model": "tiny", "messages": [{"role": "user", "content": prompt}]});
        let body = with(chat);
        let whole = post(server.address, "/v1/chat/completions", &body).json();
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let events = post(server.address, "/v1/chat/completions", &streamed).events();
        let text: String = events
            .iter()
            .map(parse)
            .filter_map(|e| e["choices"][0]["delta"]["content"].as_str().map(String::from))
            .collect();
        assert_eq!(json!(text), whole["choices"][0]["message"]["content"]);

        let body = with(json!({"model": "tiny", "prompt": prompt}));
        let whole = post(server.address, "/v1/completions", &body).json();
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let events = post(server.address, "/v1/completions", &streamed).events();
        let text: String =
            events.iter().map(parse).filter_map(|e| e["choices"][0]["text"].as_str().map(String::from)).collect();
        assert_eq!(json!(text), whole["choices"][0]["text"]);
    }
}

#[test]
fn a_chat_stream_keeps_the_order_that_openai_documents() {
    let server = Scripted::start(Script::default(), &[]);
    let body = json!({
        "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0,
        "stream": true, "stream_options": {"include_usage": true},
    });
    let events = post(server.address, "/v1/chat/completions", &body).events();
    assert_eq!(events.last().unwrap().1, "[DONE]");
    let chunks: Vec<Value> = events[..events.len() - 1].iter().map(|(_, d)| serde_json::from_str(d).unwrap()).collect();
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let (usage, rest) = chunks.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 5);
    let total = usage["usage"]["prompt_tokens"].as_u64().unwrap() + 5;
    assert_eq!(usage["usage"]["total_tokens"], total);
    for chunk in rest {
        assert_eq!((&chunk["id"], &chunk["created"]), (&usage["id"], &usage["created"]));
        assert!(chunk.as_object().unwrap().contains_key("usage") && chunk["usage"].is_null());
    }
    let reasons: Vec<&Value> = rest.iter().map(|c| &c["choices"][0]["finish_reason"]).collect();
    assert!(reasons[..reasons.len() - 1].iter().all(|r| r.is_null()));
    assert_eq!(reasons[reasons.len() - 1], "length");
}

#[test]
fn usage_is_not_sent_unasked() {
    let server = Scripted::start(Script::default(), &[]);
    let body = json!({"model": "tiny", "prompt": "a", "max_tokens": 3, "stream": true});
    let response = post(server.address, "/v1/completions", &body);
    assert!(!response.text().contains("usage"), "{}", response.text());
}

#[test]
fn a_stop_string_ends_the_answer_before_itself_and_counts_its_tokens_once() {
    let server = Scripted::start(Script::default(), &[]);
    let ids = fake::expected(b"abc".map(u32::from).as_slice(), 60);
    let text = text_of(&ids);
    // Five characters from the middle of the text: they span tokens.
    let stop: String = text.chars().skip(30).take(5).collect();
    let cut = text.find(&stop).unwrap();
    let body = json!({"prompt": "abc", "max_tokens": 2000, "stop": [stop, "never-there"]});
    let whole = post(server.address, "/v1/generate", &body).json();
    assert_eq!(whole["text"], json!(&text[..cut]));
    assert_eq!(whole["finish_reason"], "stop");
    let tokens = whole["tokens_generated"].as_u64().unwrap() as usize;
    assert!(text_of(&ids[..tokens]).contains(&stop) && !text_of(&ids[..tokens - 1]).contains(&stop));
    let events = post(server.address, "/v1/generate/stream", &body).events();
    let streamed: String = events
        .iter()
        .filter_map(|(_, d)| serde_json::from_str::<Value>(d).unwrap()["text"].as_str().map(String::from))
        .collect();
    assert_eq!(json!(streamed), whole["text"]);
    until("the sequences end", || at_rest(server.address));
    let stats = stats(&server);
    assert_eq!(stats["completed_requests"], 2);
    assert_eq!(stats["aggregate_tokens_generated"], json!(2 * tokens), "the overrun is not counted");
}

#[test]
fn several_prompts_and_choices_come_back_in_order() {
    let server = Scripted::start(Script::default(), &[]);
    let body =
        json!({"model": "tiny", "prompt": [[1, 2], [3]], "n": 2, "max_tokens": 4, "temperature": 0, "echo": true});
    let body = post(server.address, "/v1/completions", &body).json();
    let choices = body["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    for (index, choice) in choices.iter().enumerate() {
        let prompt: &[u32] = if index < 2 { &[1, 2] } else { &[3] };
        assert_eq!(choice["index"], index);
        let all = [prompt, &fake::expected(prompt, 4)].concat();
        let expected = format!("{}{}", text_of(prompt), text_of(&all[prompt.len()..]));
        assert_eq!(choice["text"], json!(expected));
    }
    assert_eq!(body["usage"], json!({"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}));
}

#[test]
fn every_bad_request_is_answered_in_its_dialect_and_touches_no_page() {
    let server = Scripted::start(Script::default(), &["server.body_limit_bytes=4096"]);
    let chat = |fields: Value| {
        let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "x"}]});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    };
    let cases = [
        ("/v1/generate", json!({"prompt": ""}), 400, "invalid_value"),
        ("/v1/generate", json!({"prompt": "x", "max_tokens": 0}), 400, "invalid_value"),
        ("/v1/generate", json!({"prompt": "x", "max_tokens": 99999}), 400, "invalid_value"),
        ("/v1/generate", json!({"prompt_tokens": [5, 1000]}), 400, "invalid_value"),
        ("/v1/generate", json!({"prompt": "x", "max_tokens": 8192, "temperature": -1}), 400, "invalid_value"),
        ("/v1/generate", json!({"prompt": "x", "stream": true}), 400, "unknown_parameter"),
        ("/v1/generate/stream", json!({"prompt": ""}), 400, "invalid_value"),
        ("/v1/generate/stream", json!([1]), 400, "invalid_json"),
        ("/v1/chat/completions", chat(json!({"model": "other"})), 404, "model_not_found"),
        ("/v1/chat/completions", chat(json!({"messages": []})), 400, "invalid_value"),
        ("/v1/chat/completions", chat(json!({"messages": [{"role": "alien", "content": "x"}]})), 400, "invalid_value"),
        ("/v1/chat/completions", chat(json!({"logit_bias": {"1": 101}})), 400, "invalid_value"),
        ("/v1/chat/completions", chat(json!({"logit_bias": {"90000": 5}})), 400, "invalid_value"),
        ("/v1/completions", json!({"model": "tiny", "prompt": "x", "presence_penalty": 3}), 400, "invalid_value"),
        ("/v1/chat/completions", chat(json!({"stream": "yes"})), 400, "invalid_value"),
        ("/v1/completions", json!({"model": "tiny"}), 400, "missing_required_parameter"),
        ("/v1/completions", json!({"model": "tiny", "prompt": "x", "suffix": "y"}), 400, "unsupported_parameter"),
        ("/v1/completions", json!({"prompt": "x"}), 400, "missing_required_parameter"),
        ("/v1/completions", json!({"model": "tiny", "prompt": "x".repeat(5000)}), 413, "payload_too_large"),
        ("/tokenize", json!({"txt": "x"}), 400, "missing_required_parameter"),
        ("/detokenize", json!({"tokens": [1000]}), 400, "invalid_value"),
    ];
    for (path, body, status, code) in cases {
        let response = post(server.address, path, &body);
        let error = &response.json()["error"];
        assert_eq!((response.status, error["code"].as_str()), (status, Some(code)), "{path} {body} {error}");
        let openai = path.starts_with("/v1/c");
        assert_eq!(error.get("type").is_some(), openai, "{path}: {error}");
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()));
    }
    let stats = stats(&server);
    assert_eq!((&stats["accepted_requests"], &stats["kv_pages_peak"]), (&json!(0), &json!(0)));
}

#[test]
fn the_extremes_of_every_sampling_parameter_are_served_and_the_engine_lives() {
    let server = Scripted::start(Script::default(), &[]);
    for extreme in [
        json!({"temperature": 1, "top_p": 0}),
        json!({"temperature": 1e-300, "top_p": 1e-300, "min_p": 1}),
        json!({"temperature": 5, "top_p": 1, "min_p": 0, "top_k": u32::MAX, "seed": u64::MAX}),
    ] {
        let mut body = json!({"prompt": "abc", "max_tokens": 3});
        body.as_object_mut().unwrap().extend(extreme.as_object().unwrap().clone());
        let response = post(server.address, "/v1/generate", &body);
        assert_eq!(response.status, 200, "{body}: {}", response.text());
    }
    assert_eq!(get(server.address, "/health").status, 200);
}

#[test]
fn unknown_paths_methods_and_content_types_have_their_codes() {
    let server = Scripted::start(Script::default(), &[]);
    let code = |response: &http_support::client::Response| response.json()["error"]["code"].clone();
    let response = get(server.address, "/nowhere");
    assert_eq!((response.status, code(&response)), (404, json!("not_found")));
    let response = get(server.address, "/v1/chat/completions");
    assert_eq!((response.status, code(&response)), (405, json!("method_not_allowed")));
    assert_eq!(response.header("allow"), Some("POST"));
    let response = send(server.address, "POST", "/v1/generate", &[("content-type", "text/plain")], b"{}").response();
    assert_eq!((response.status, code(&response)), (415, json!("unsupported_media_type")));
    let response = send(server.address, "POST", "/v1/generate", &[], br#"{"prompt": "x", "max_tokens": 1}"#).response();
    assert_eq!(response.status, 200);
    let response = get(server.address, "/v1/models/other");
    assert_eq!((response.status, code(&response)), (404, json!("model_not_found")));
    assert_eq!(get(server.address, "/v1/models").json()["data"][0]["id"], "tiny");
    assert_eq!(get(server.address, "/v1/models/tiny").json()["object"], "model");
}

#[test]
fn a_configured_key_is_asked_for_everywhere_but_on_health_and_ready() {
    let server = Scripted::start(Script::default(), &["server.api_key=secret"]);
    for (path, status) in [("/health", 200), ("/ready", 200), ("/stats", 401), ("/v1/models", 401), ("/nowhere", 401)] {
        assert_eq!(get(server.address, path).status, status, "{path}");
    }
    for header in [("authorization", "Bearer secret"), ("x-api-key", "secret")] {
        assert_eq!(send(server.address, "GET", "/stats", &[header], &[]).response().status, 200);
    }
    for header in [("authorization", "Bearer secre"), ("authorization", "Basic secret"), ("x-api-key", "secret2")] {
        assert_eq!(send(server.address, "GET", "/stats", &[header], &[]).response().status, 401);
    }
}

#[test]
fn text_becomes_ids_and_ids_become_text() {
    let server = Scripted::start(Script::default(), &[]);
    let body = post(server.address, "/tokenize", &json!({"text": "héy"})).json();
    assert_eq!(body, json!({"tokens": [104, 195, 169, 121], "count": 4}));
    let body = post(server.address, "/detokenize", &json!({"tokens": [104, 195, 169, 121]})).json();
    assert_eq!(body, json!({"text": "héy"}));
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": false});
    let ids = post(server.address, "/tokenize", &chat).json()["tokens"].clone();
    let text = post(server.address, "/detokenize", &json!({"tokens": ids})).json()["text"].clone();
    assert_eq!(text, "<|im_start|>user\nx<|im_end|>\n");
}

#[test]
fn very_many_messages_are_too_long_and_no_failure_of_the_template() {
    // A template that its budget does not bring to the end of so many messages, each of a token at least.
    const SLOW: &str = "{% for m in messages %}{% for i in range(200) %}{{ m.content }}{% endfor %}{% endfor %}";
    let server = Scripted::templated(fake::factory(Script::default()), SLOW, &[]);
    let asked = |path: &str, count: usize| {
        let messages = vec![json!({"role": "user", "content": "a"}); count];
        let mut body = json!({"messages": messages});
        if path != "/tokenize" {
            body["model"] = json!("tiny");
        }
        if path == "/v1/messages" {
            body["max_tokens"] = json!(1);
        }
        post(server.address, path, &body).json()["error"].clone()
    };
    for path in ["/v1/chat/completions", "/tokenize"] {
        let error = asked(path, 50_000);
        assert_eq!(
            (&error["code"], &error["param"]),
            (&json!("context_length_exceeded"), &json!("messages")),
            "{error}"
        );
        assert!(error["message"].as_str().expect("a text").contains("50000 messages"), "{error}");
        // So few might fit if the template came to an end.
        assert_eq!(asked(path, 10_000)["code"], "invalid_value", "{path}");
    }
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let error = asked(path, 50_000);
        assert_eq!(error["details"]["error_code"], "context_length_exceeded", "{path}: {error}");
    }
}

#[test]
fn a_client_that_hangs_up_is_out_at_once_unary_or_streaming_before_its_first_token() {
    let script = Script::default();
    let server = Scripted::start(script.clone(), &[]);
    script.hold.store(true, Ordering::Release);
    let body = json!({"prompt": "abc", "max_tokens": 500});
    let unary = send_json(server.address, "/v1/generate", &body);
    let streaming = send_json(server.address, "/v1/generate/stream", &body);
    until("both are resident", || stats(&server)["active_requests"] == 2);
    drop((unary, streaming));
    script.hold.store(false, Ordering::Release);
    until("both are cancelled", || stats(&server)["cancelled_requests"] == 2);
    until("everything is back", || at_rest(server.address));
    assert_eq!(stats(&server)["completed_requests"], 0);
}

#[test]
fn a_client_that_hangs_up_mid_stream_is_counted_once_and_its_pages_are_back() {
    let script = Script { step_time: Duration::from_millis(1), ..Script::default() };
    let server = Scripted::start(script, &[]);
    let body = json!({"prompt": "abc", "max_tokens": 5000});
    let mut stream = send_json(server.address, "/v1/generate/stream", &body);
    stream.head();
    stream.read_events(3);
    drop(stream);
    until("it is cancelled", || stats(&server)["cancelled_requests"] == 1);
    until("everything is back", || at_rest(server.address));
    assert_eq!(stats(&server)["accepted_requests"], 1);
}

#[test]
fn a_client_that_does_not_read_is_cut_and_cancelled() {
    let server = Scripted::start(Script::default(), &["server.stream_buffer_bytes=4096", "limits.max_queue=128"]);
    // The echo of 128 prompts, 12 MB, fills the socket; the tokens after it have nowhere to go.
    let body = json!({
        "model": "tiny", "prompt": "\u{1}".repeat(16_000), "n": 128, "max_tokens": 200, "echo": true, "stream": true,
        "temperature": 0,
    });
    let unread = send_json(server.address, "/v1/completions", &body);
    until("it is cut", || stats(&server)["cancelled_requests"].as_u64().unwrap() > 100);
    until("everything is back", || at_rest(server.address));
    drop(unread);
}

#[test]
fn a_burst_over_the_queue_is_answered_at_once_with_429_and_everything_is_back_after_it() {
    let script = Script { pages: 32, step_time: Duration::from_millis(2), ..Script::default() };
    let server = Scripted::start(script, &["limits.max_queue=4", "limits.max_batch=4"]);
    // 8 pages each: four residents fill the pool.
    let body = json!({"prompt": "x".repeat(64), "max_tokens": 64});
    let burst: Vec<_> = (0..24).map(|_| send_json(server.address, "/v1/generate", &body)).collect();
    let responses: Vec<_> = burst.into_iter().map(|p| p.response()).collect();
    let ok = responses.iter().filter(|r| r.status == 200).count();
    let refused: Vec<_> = responses.iter().filter(|r| r.status == 429).collect();
    assert_eq!(ok + refused.len(), 24);
    assert!(ok > 0 && !refused.is_empty(), "{ok} answered");
    for response in &refused {
        assert_eq!(response.header("retry-after"), Some("1"));
        assert_eq!(response.json()["error"]["code"], "queue_full");
    }
    let texts: std::collections::HashSet<String> =
        responses.iter().filter(|r| r.status == 200).map(|r| r.json()["text"].to_string()).collect();
    assert_eq!(texts.len(), 1, "one prompt has one text");
    until("everything is back", || at_rest(server.address));
    let stats = stats(&server);
    assert_eq!(stats["queue_peak"], 4);
    assert!(stats["kv_pages_peak"].as_u64().unwrap() <= 32);
    assert_eq!((&stats["failed_requests"], &stats["kv_pages_free"]), (&json!(0), &json!(32)));
    assert_eq!(stats["rejected_requests"], refused.len());
    assert_eq!(stats["completed_requests"], ok);
}

#[test]
fn metrics_are_conserved_at_every_scrape_under_load() {
    let script = Script { step_time: Duration::from_micros(300), ..Script::default() };
    let server = Scripted::start(script, &["limits.max_queue=8"]);
    let address = server.address;
    let scrapes = Arc::new(AtomicUsize::new(0));
    let load: Vec<_> = (0..6)
        .map(|client| {
            let scrapes = Arc::clone(&scrapes);
            std::thread::spawn(move || {
                for round in (0..10_000).take_while(|&round| round < 25 || scrapes.load(Ordering::Acquire) < 6) {
                    let body = json!({"prompt": "abc", "max_tokens": 5 + (round * 7 + client) % 40});
                    let pending = send_json(address, "/v1/generate/stream", &body);
                    if round % 5 != client % 5 {
                        pending.response();
                    }
                }
            })
        })
        .collect();
    let value = |text: &str, name: &str| -> f64 {
        let lines = text.lines().filter(|l| !l.starts_with('#'));
        lines.filter(|l| l.starts_with(name)).filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    while load.iter().any(|t| !t.is_finished()) {
        check_conservation(&get(address, "/metrics").text(), &value);
        scrapes.fetch_add(1, Ordering::AcqRel);
    }
    load.into_iter().for_each(|t| t.join().unwrap());
    until("everything is back", || at_rest(server.address));
    let last = get(address, "/metrics").text();
    check_conservation(&last, &value);
    assert_eq!(value(&last, "crucible_running_requests"), 0.0);
    assert!(value(&last, "crucible_time_to_first_token_seconds_count") > 0.0);
}

fn check_conservation(text: &str, value: &dyn Fn(&str, &str) -> f64) {
    let v = |name: &str| value(text, name);
    let (running, waiting) = (v("crucible_running_requests"), v("crucible_waiting_requests"));
    let ended = v("crucible_ended_requests_total");
    assert_eq!(v("crucible_accepted_requests_total"), ended + running + waiting, "{text}");
    let finished: f64 = text
        .lines()
        .filter(|l| l.starts_with("crucible_ended_requests_total") && l.contains("outcome=\"finished\""))
        .filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok())
        .sum();
    for name in ["time_to_first_token_seconds", "queue_time_seconds", "end_to_end_seconds", "output_length_tokens"] {
        let count = v(&format!("crucible_{name}_count"));
        assert_eq!(count, finished, "{name}: {text}");
    }
    assert_eq!(v("crucible_decode_batch_rows_count"), v("crucible_decode_steps_total"));
    assert_eq!(v("crucible_prefill_batch_tokens_count"), v("crucible_prefill_batches_total"));
    let gaps = v("crucible_inter_token_latency_seconds_count");
    assert_eq!(gaps, v("crucible_output_length_tokens_sum") - finished, "one gap fewer than tokens");
}

#[test]
fn a_drain_finishes_live_streams_refuses_new_work_and_ends() {
    let script = Script { step_time: Duration::from_millis(5), ..Script::default() };
    let hold = Arc::clone(&script.hold);
    let server = Scripted::start(script, &[]);
    let mut stream = send_json(server.address, "/v1/generate/stream", &json!({"prompt": "abc", "max_tokens": 2000}));
    stream.head();
    stream.read_events(1);
    hold.store(true, Ordering::Release);
    server.begin_drain();
    until("not ready", || get(server.address, "/ready").status == 503);
    assert_eq!(get(server.address, "/health").status, 200);
    for path in ["/v1/generate", "/v1/completions"] {
        let response = post(server.address, path, &json!({"model": "tiny", "prompt": "x"}));
        assert_eq!((response.status, response.json()["error"]["code"].as_str()), (503, Some("draining")));
    }
    hold.store(false, Ordering::Release);
    let mut text = String::new();
    while let Some(chunk) = stream.chunk().expect("a whole stream") {
        text.push_str(&String::from_utf8(chunk).unwrap());
    }
    let events = http_support::client::events(&text);
    assert_eq!(events.last().unwrap().0, "done");
    assert_eq!(server.ending(), Ending::Drained);
}

#[test]
fn what_is_left_at_the_deadline_of_a_drain_fails_in_the_typed_way() {
    let script = Script { step_time: Duration::from_millis(5), ..Script::default() };
    let server = Scripted::start(script, &["server.drain_deadline_ms=100"]);
    let streaming = send_json(server.address, "/v1/generate/stream", &json!({"prompt": "abc", "max_tokens": 5000}));
    let unary =
        send_json(server.address, "/v1/completions", &json!({"model": "tiny", "prompt": "a", "max_tokens": 5000}));
    until("both are resident", || stats(&server)["active_requests"] == 2);
    server.begin_drain();
    let events = streaming.response().events();
    let (name, data) = events.last().unwrap();
    assert_eq!(name, "error");
    assert_eq!(serde_json::from_str::<Value>(data).unwrap()["error"]["code"], "draining");
    let response = unary.response();
    assert_eq!((response.status, response.json()["error"]["type"].as_str()), (503, Some("server_error")));
    assert_eq!(server.ending(), Ending::Drained);
}

#[test]
fn a_dead_engine_fails_every_session_in_the_typed_way_and_turns_health_to_503() {
    let stuck = [Fault::Hang, Fault::BlockInSubmit, Fault::BlockInPoll];
    let faults = [Fault::FailAtPoll, Fault::FailAtSubmit, Fault::Panic].into_iter().chain(stuck);
    std::thread::scope(|scope| faults.for_each(|fault| _ = scope.spawn(move || dies_of(fault))));
}

/// A stream and a whole answer under a fault of the backend.
fn dies_of(fault: Fault) {
    let at = move |step| if step == 200 { fault } else { Fault::Nothing };
    let script = Script { step_time: Duration::from_millis(2), fault: Arc::new(at), ..Script::default() };
    let server = Scripted::start(script, &["executor.step_timeout_ms=2000", "server.fatal_linger_ms=5000"]);
    let body = json!({"prompt": "abc", "max_tokens": 5000});
    let mut streaming = send_json(server.address, "/v1/generate/stream", &body);
    assert_eq!(streaming.head().status, 200, "inside long before the fault");
    let unary = send_json(server.address, "/v1/generate", &body);
    let mut text = String::new();
    while let Some(chunk) = streaming.chunk().expect("a whole stream") {
        text.push_str(&String::from_utf8(chunk).unwrap());
    }
    let events = http_support::client::events(&text);
    let (name, data) = events.last().unwrap();
    assert_eq!(name, "error");
    assert_eq!(serde_json::from_str::<Value>(data).unwrap()["error"]["code"], "engine_failed");
    let response = unary.response();
    assert_eq!((response.status, response.json()["error"]["code"].as_str()), (503, Some("engine_failed")));
    assert_eq!(get(server.address, "/health").status, 503);
    assert_eq!(post(server.address, "/v1/generate", &json!({"prompt": "x"})).status, 503);
    assert!(matches!(server.ending(), Ending::Failed(_)));
}

#[test]
fn a_request_is_either_accepted_or_refused_when_the_engine_dies() {
    let script = Script { fault: Arc::new(|_| Fault::FailAtPoll), ..Script::default() };
    script.hold.store(true, Ordering::Release);
    // Long enough for the scrape below; the drop ends it.
    let server = Scripted::start(script.clone(), &["server.fatal_linger_ms=60000"]);
    let body = json!({"prompt": "abc", "max_tokens": 50});
    let streaming = send_json(server.address, "/v1/generate/stream", &body);
    let unary = send_json(server.address, "/v1/generate", &body);
    until("both are accepted", || stats(&server)["accepted_requests"] == 2);
    let counted = |series: &str| {
        let text = get(server.address, "/metrics").text();
        let line = text.lines().find(|line| line.starts_with(series)).unwrap_or_else(|| panic!("{series}: {text}"));
        line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok()).unwrap_or_else(|| panic!("{line}"))
    };
    assert_eq!(counted("crucible_failed_engines"), 0.0);
    script.hold.store(false, Ordering::Release);
    assert_eq!((streaming.response().status, unary.response().status), (200, 503));
    assert_eq!(post(server.address, "/v1/generate", &body).status, 503);
    // Seen: the accepted request that was to be answered whole was counted as refused as well.
    assert_eq!(counted("crucible_refused_requests_total{reason=\"engine_failed\"}"), 1.0);
    assert_eq!(counted("crucible_accepted_requests_total{dialect=\"native\"}"), 2.0);
    // The account is published behind the answers.
    let ended = || counted("crucible_ended_requests_total{dialect=\"native\",outcome=\"failed\"}");
    until("both have ended as failed", || ended() == 2.0);
    assert_eq!(counted("crucible_failed_engines"), 1.0);
}

#[test]
fn an_engine_that_dies_in_a_drain_is_never_taken_for_a_drained_one() {
    // Seen: the end of the last request and the death came together, and either was taken.
    for _ in 0..12 {
        let script = Script { fault: Arc::new(|_| Fault::FailAtPoll), ..Script::default() };
        script.hold.store(true, Ordering::Release);
        let server = Scripted::start(script.clone(), &["server.fatal_linger_ms=0"]);
        let pending = send_json(server.address, "/v1/generate", &json!({"prompt": "abc", "max_tokens": 50}));
        until("it is accepted", || stats(&server)["accepted_requests"] == 1);
        server.begin_drain();
        until("the drain has begun", || get(server.address, "/ready").status == 503);
        script.hold.store(false, Ordering::Release);
        assert_eq!(pending.response().status, 503);
        assert!(matches!(server.ending(), Ending::Failed(_)));
    }
}

#[test]
fn a_slow_reader_has_what_is_left_of_the_drain_for_what_waits_for_it() {
    let overrides = ["server.stream_buffer_bytes=268435456", "server.drain_deadline_ms=120000"];
    let server = Scripted::start(Script::default(), &overrides);
    // More than the system's buffers of a connection hold.
    let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 1000, "n": 8, "stream": true,
                      "logprobs": true, "top_logprobs": 20, "ignore_eos": true});
    let mut slow = send_json(server.address, "/v1/chat/completions", &body);
    assert_eq!(slow.head().status, 200);
    until("everything is generated", || stats(&server)["completed_requests"] == 8);
    server.begin_drain();
    until("the drain has begun", || get_or_gone(server.address) != Some(200));
    // Seen: the rest was cut a second after the last token.
    std::thread::sleep(Duration::from_secs(4));
    let mut text = Vec::new();
    while let Some(chunk) = slow.chunk().expect("the whole stream") {
        text.extend(chunk);
    }
    let events = http_support::client::events(&String::from_utf8(text).unwrap());
    assert!(events.len() > 8_000, "{}", events.len());
    assert_eq!(events.last().map(|(_, data)| data.as_str()), Some("[DONE]"));
    assert_eq!(server.ending(), Ending::Drained);
}

/// The status of /ready, or nothing where nobody listens any more.
fn get_or_gone(address: std::net::SocketAddr) -> Option<u16> {
    std::net::TcpStream::connect(address).ok()?;
    std::panic::catch_unwind(|| get(address, "/ready").status).ok()
}

#[test]
fn a_stream_whose_text_is_held_back_gets_comments_while_its_tokens_come() {
    // The answer's beginning is the beginning of a stop string, which it leaves at its fortieth token.
    let script = Script { step_time: Duration::from_millis(10), ..Script::default() };
    let server = Scripted::start(script, &["server.sse_keep_alive_ms=30"]);
    let stop = text_of(&fake::expected(&[97, 98, 99], 40)) + "!";
    let body =
        json!({"model": "tiny", "prompt": "abc", "max_tokens": 60, "stream": true, "temperature": 0, "stop": stop});
    let stream = post(server.address, "/v1/completions", &body).text();
    let begins = stream.find("data:").expect("an answer");
    // Seen: every token put the comment off, shown or not.
    assert!(stream[..begins].contains(": keep-alive"), "{stream}");
    assert!(stream.contains("data: [DONE]"), "{stream}");
}

#[test]
fn a_logit_that_is_not_finite_fails_its_request_only() {
    let script = Script { not_finite: Arc::new(|request, index| request.0 == 1 && index == 3), ..Script::default() };
    let server = Scripted::start(script, &[]);
    let body = json!({"prompt": "abc", "max_tokens": 8});
    let response = post(server.address, "/v1/generate", &body);
    assert_eq!((response.status, response.json()["error"]["code"].as_str()), (500, Some("non_finite_logits")));
    assert_eq!(post(server.address, "/v1/generate", &body).status, 200);
    until("everything is back", || at_rest(server.address));
    assert_eq!(stats(&server)["failed_requests"], 1);
}

#[test]
fn a_silent_stream_gets_comments_and_a_busy_one_does_not() {
    let script = Script::default();
    script.hold.store(true, Ordering::Release);
    let server = Scripted::start(script.clone(), &["server.sse_keep_alive_ms=20"]);
    let mut stream = send_json(server.address, "/v1/generate/stream", &json!({"prompt": "abc", "max_tokens": 2}));
    stream.head();
    assert_eq!(stream.chunk().unwrap().unwrap(), b": keep-alive\n\n");
    script.hold.store(false, Ordering::Release);
    let mut rest = String::new();
    while let Some(chunk) = stream.chunk().expect("a stream") {
        rest.push_str(&String::from_utf8(chunk).unwrap());
    }
    assert_eq!(http_support::client::events(&rest).len(), 3);

    // Far apart enough for a stall of a busy machine, and the whole stream longer than that.
    let script = Script { step_time: Duration::from_millis(100), ..Script::default() };
    let server = Scripted::start(script, &["server.sse_keep_alive_ms=3000"]);
    let body = json!({"prompt": "abc", "max_tokens": 45});
    let busy = post(server.address, "/v1/generate/stream", &body).text();
    assert!(!busy.lines().any(|line| line.starts_with(':')), "{busy}");
}
