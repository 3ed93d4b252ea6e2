//! The native dialect of the real binary with the real model, on a raw socket: every field, one answer whatever runs beside it, one
//! decode step for all, clients that leave, the account, and health after everything that is wrong.

#[path = "http_support/checks.rs"]
mod checks;
mod common;
mod http_support;

use std::collections::BTreeSet;

use checks::Checks;
use http_support::binary::Binary;
use http_support::client::{Pending, Response, get, post, send, send_json};
use http_support::until;
use serde_json::{Value, json};

const WHOLE: &str = "/v1/generate";
const STREAM: &str = "/v1/generate/stream";
const SKY: &str = "The sky is";
const VOCABULARY: u64 = 49_152;
const CONTEXT: u64 = 8_192;

/// The server of all checks: a small budget, so that a long prompt takes many passes.
fn start(overrides: &[&str]) -> Binary {
    let model = format!("model.path=\"{}\"", common::default_model().display());
    let fixed = [model.as_str(), "executor.backend=cpu", "prefill.token_budget=64", "server.body_limit_bytes=65536"];
    Binary::start("config/crucible.toml", &[&fixed, overrides].concat())
}

fn stats(server: &Binary) -> Value {
    get(server.address, "/stats").json()
}

fn number(stats: &Value, field: &str) -> u64 {
    stats[field].as_u64().unwrap_or_else(|| panic!("{field} of {stats}"))
}

/// The account once nobody is inside and every page is back: a client has its answer before the account has closed it.
fn at_rest(server: &Binary) -> Value {
    let rest = |stats: &Value| {
        ["active_requests", "queued_requests", "prefilling_requests", "kv_pages_used"].iter().all(|f| stats[f] == 0)
    };
    until("everything is back", || rest(&stats(server)));
    stats(server)
}

/// How much counters grew between two accounts.
fn gained<const N: usize>(before: &Value, after: &Value, fields: [&str; N]) -> [u64; N] {
    fields.map(|field| number(after, field) - number(before, field))
}

/// `{"prompt": SKY, "max_tokens": 8}` with these fields on top.
fn ask(fields: Value) -> Value {
    let mut body = json!({"prompt": SKY, "max_tokens": 8});
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

fn answer(server: &Binary, fields: Value) -> Value {
    let response = post(server.address, WHOLE, &ask(fields));
    assert_eq!(response.status, 200, "{}", response.text());
    response.json()
}

fn data(response: &Response) -> Vec<(String, Value)> {
    assert_eq!(response.status, 200, "{}", response.text());
    let parse = |(name, data): (String, String)| (name, serde_json::from_str(&data).expect("JSON"));
    response.events().into_iter().map(parse).collect()
}

fn streamed(server: &Binary, fields: Value) -> Vec<(String, Value)> {
    data(&post(server.address, STREAM, &ask(fields)))
}

/// The text of a stream: of its tokens and of what `done` still held.
fn text(events: &[(String, Value)]) -> String {
    events.iter().filter_map(|(_, data)| data["text"].as_str()).collect()
}

fn ids(events: &[(String, Value)]) -> Vec<u64> {
    events
        .iter()
        .filter(|(name, _)| name == "token")
        .map(|(_, data)| data["token_id"].as_u64().expect("an id"))
        .collect()
}

fn tokens(server: &Binary, text: &str) -> Value {
    post(server.address, "/tokenize", &json!({"text": text})).json()["tokens"].clone()
}

/// A stream that is being computed and goes on for long after the test has done what it wants beside it.
fn endless(server: &Binary) -> Pending {
    let body = json!({"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": true});
    let mut stream = send_json(server.address, STREAM, &body);
    assert_eq!(stream.head().status, 200);
    stream.read_events(3);
    stream
}

/// An error in the native body.
fn refused(response: &Response, status: u16, code: &str, param: Option<&str>) {
    let body = response.json();
    assert_eq!(response.status, status, "{body}");
    let fields: BTreeSet<&str> = body["error"].as_object().expect("an error").keys().map(String::as_str).collect();
    assert_eq!(fields, BTreeSet::from(["code", "message", "param"]));
    assert_eq!((&body["error"]["code"], &body["error"]["param"]), (&json!(code), &json!(param)), "{body}");
    assert!(body["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
}

#[test]
fn the_native_dialect_holds_in_every_check() {
    let mut checks = Checks::of("native over HTTP");
    let server = start(&[]);
    what_the_server_says_of_itself(&mut checks, &server);
    whole_answers(&mut checks, &server);
    selection(&mut checks, &server);
    streams(&mut checks, &server);
    fields_that_are_wrong(&mut checks, &server);
    bodies_that_are_wrong(&mut checks, &server);
    tokens_and_text(&mut checks, &server);
    many_at_once(&mut checks, &server);
    clients_that_leave(&mut checks, &server);
    a_full_queue(&mut checks);
    the_end_of_it(&mut checks, &server);
    checks.finish(42);
}

fn what_the_server_says_of_itself(checks: &mut Checks, server: &Binary) {
    checks.check("health and readiness name the model, the device and the limits", || {
        for (path, status) in [("/health", "ok"), ("/ready", "ready")] {
            let response = get(server.address, path);
            let body = response.json();
            assert_eq!((response.status, &body["status"]), (200, &json!(status)));
            assert_eq!((&body["model"], &body["profile"]), (&json!("smollm2-135m-instruct"), &json!("q8")));
            assert_eq!(
                (&body["max_batch"], &body["context"], &body["kv_pages"]),
                (&json!(16), &json!(CONTEXT), &json!(1024))
            );
            assert!(body["device"].as_str().is_some_and(|d| d.starts_with("cpu")));
            assert_eq!(body["sampling"]["default_mode"], "greedy");
            for name in ["greedy", "temperature", "top_k", "seed"] {
                assert_eq!(body["sampling"][name], true, "{name}");
            }
        }
    });
    checks.check("the statistics have every promised field, whole numbers where things are counted", || {
        let stats = stats(server);
        let counts = "active_requests queued_requests completed_requests cancelled_requests failed_requests \
            rejected_requests kv_pages_used kv_pages_free last_batch_size decode_steps aggregate_tokens_generated \
            greedy_requests sampled_requests prefilling_requests prefill_chunks prefill_tokens last_prefill_chunk_tokens \
            prefill_batches packed_prefill_batches packed_prefill_tokens prefill_requests prefill_final_rows \
            last_prefill_batch_requests last_prefill_batch_tokens max_prefill_batch_tokens prefill_d2h_bytes \
            accepted_requests queue_peak kv_pages_peak decode_batch_peak";
        let averages = "average_batch_size uptime_seconds average_prefill_batch_requests average_prefill_batch_tokens";
        for field in counts.split_whitespace() {
            assert!(stats[field].is_u64(), "{field}: {}", stats[field]);
        }
        for field in averages.split_whitespace() {
            assert!(stats[field].is_f64(), "{field}: {}", stats[field]);
        }
        let promised = counts.split_whitespace().chain(averages.split_whitespace()).count();
        assert_eq!(promised, 34);
        assert!(stats.as_object().expect("an object").len() >= promised);
    });
    checks.check("metrics are in the text format of Prometheus and name the same counts", || {
        let response = get(server.address, "/metrics");
        assert!(response.header("content-type").is_some_and(|t| t.starts_with("text/plain; version=0.0.4")));
        let text = response.text();
        let counts = |line: &str| line.starts_with("crucible_accepted_requests_total") && line.ends_with(" 0");
        assert!(text.contains("# TYPE crucible_accepted_requests_total counter\n"), "{text}");
        assert!(text.lines().any(counts), "{text}");
    });
}

fn whole_answers(checks: &mut Checks, server: &Binary) {
    checks.check("a whole answer has its five fields and no other", || {
        let response = post(server.address, WHOLE, &ask(json!({})));
        let body = response.json();
        let fields: BTreeSet<&str> = body.as_object().expect("an object").keys().map(String::as_str).collect();
        let expected = ["text", "tokens_generated", "finish_reason", "prompt_tokens", "token_ids"];
        assert_eq!(fields, BTreeSet::from(expected));
        assert_eq!((&body["tokens_generated"], &body["finish_reason"]), (&json!(8), &json!("length")));
        assert_eq!(body["token_ids"].as_array().map(Vec::len), Some(8));
        assert!(response.header("x-request-id").is_some_and(|id| id.starts_with("gen-")));
    });
    checks.check("the text is that of the token ids and prompt_tokens is their number", || {
        let body = answer(server, json!({}));
        let decoded = post(server.address, "/detokenize", &json!({"tokens": body["token_ids"]})).json();
        assert_eq!(decoded["text"], body["text"]);
        assert_eq!(body["prompt_tokens"], json!(tokens(server, SKY).as_array().expect("ids").len()));
    });
    checks.check("a prompt of ids is the prompt of their text", || {
        let body = json!({"prompt_tokens": tokens(server, SKY), "max_tokens": 8});
        assert_eq!(post(server.address, WHOLE, &body).json(), answer(server, json!({})));
    });
    checks.check("sixty-four tokens when no number is named", || {
        let body = post(server.address, WHOLE, &json!({"prompt": SKY, "ignore_eos": true})).json();
        assert_eq!(body["tokens_generated"], 64);
    });
    checks.check(
        "an end-of-sequence token ends an answer, is counted and not shown; ignore_eos makes it one like others",
        || {
            let chat = json!({"messages": [{"role": "user", "content": "What is the name of the capital of France?"}]});
            let prompt = post(server.address, "/tokenize", &chat).json()["tokens"].clone();
            let body = json!({"prompt_tokens": prompt, "max_tokens": 40});
            let ended = post(server.address, WHOLE, &body).json();
            assert_eq!(ended["finish_reason"], "stop");
            let text = ended["text"].as_str().expect("text");
            assert!(text.contains("Paris") && !text.contains("<|im_end|>"), "{text}");
            let mut on = body;
            on["ignore_eos"] = json!(true);
            let on = post(server.address, WHOLE, &on).json();
            assert_eq!((&on["finish_reason"], &on["tokens_generated"]), (&json!("length"), &json!(40)));
            let (short, long) = (ended["token_ids"].as_array().expect("ids"), on["token_ids"].as_array().expect("ids"));
            assert_eq!(&long[..short.len()], &short[..]);
        },
    );
    checks.check("a stop string ends the answer before itself, the first of several, also across tokens", || {
        let whole = answer(server, json!({"max_tokens": 24}))["text"].as_str().expect("text").to_owned();
        let stop: String = whole.chars().skip(whole.chars().count() / 2).take(5).collect();
        let cut = whole.find(&stop).expect("a part of it");
        for given in [json!(stop), json!([stop]), json!(["never there", stop])] {
            let body = answer(server, json!({"max_tokens": 24, "stop": given}));
            assert_eq!((&body["text"], &body["finish_reason"]), (&json!(whole[..cut]), &json!("stop")));
        }
    });
    checks.check("log-probabilities stand by each token: the chosen one first among so many alternatives", || {
        let body = answer(server, json!({"logprobs": 3}));
        let values = body["logprobs"].as_array().expect("a list");
        assert_eq!(values.len(), 8);
        for (value, id) in values.iter().zip(body["token_ids"].as_array().expect("ids")) {
            assert_eq!(&value["token_id"], id);
            assert_eq!(value["top"].as_array().map(Vec::len), Some(3));
            assert_eq!((&value["top"][0]["token_id"], &value["top"][0]["logprob"]), (id, &value["logprob"]));
            assert!(value["logprob"].as_f64().is_some_and(|l| l <= 0.0));
        }
        let none = answer(server, json!({"logprobs": 0}));
        assert_eq!(none["logprobs"][0]["top"], json!([]));
    });
}

fn selection(checks: &mut Checks, server: &Binary) {
    let warm = |fields: Value| {
        let mut body = json!({"temperature": 1, "max_tokens": 16});
        body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        answer(server, body)["token_ids"].clone()
    };
    let greedy = answer(server, json!({"max_tokens": 16}))["token_ids"].clone();
    checks.check("a temperature of 0 is greedy, and greedy repeats", || {
        assert_eq!(warm(json!({"temperature": 0})), greedy);
        assert_eq!(answer(server, json!({"max_tokens": 16}))["token_ids"], greedy);
    });
    checks.check("a seed repeats its answer, another gives another, and none is a fixed one", || {
        assert_eq!(warm(json!({"seed": 1})), warm(json!({"seed": 1})));
        assert_ne!(warm(json!({"seed": 1})), warm(json!({"seed": 2})));
        assert_eq!(warm(json!({})), warm(json!({})));
    });
    checks.check("filters that leave one candidate are greedy", || {
        for one in [json!({"top_k": 1}), json!({"top_p": 0}), json!({"min_p": 1})] {
            assert_eq!(warm(one.clone()), greedy, "{one}");
        }
    });
    checks.check("filters that leave every candidate change nothing", || {
        let plain = warm(json!({"seed": 5}));
        for all in [json!({"top_p": 1}), json!({"min_p": 0}), json!({"top_k": VOCABULARY})] {
            let mut body = json!({"seed": 5});
            body.as_object_mut().expect("an object").extend(all.as_object().expect("an object").clone());
            assert_eq!(warm(body), plain, "{all}");
        }
    });
    checks.check("the extremes of every sampling field are served", || {
        for extreme in [
            json!({"temperature": 5, "top_k": u32::MAX, "seed": u64::MAX}),
            json!({"temperature": 1e-300, "top_p": 1e-300, "min_p": 1}),
        ] {
            let mut body = ask(json!({"max_tokens": 2}));
            body.as_object_mut().expect("an object").extend(extreme.as_object().expect("an object").clone());
            assert_eq!(post(server.address, WHOLE, &body).status, 200, "{extreme}");
        }
    });
    checks.check("null is the same as absent", || {
        let nulls = json!({
            "temperature": null, "top_k": null, "top_p": null, "min_p": null, "seed": null, "stop": null, "logprobs": null,
            "ignore_eos": null, "prompt_tokens": null,
        });
        assert_eq!(answer(server, nulls), answer(server, json!({})));
    });
}

fn streams(checks: &mut Checks, server: &Binary) {
    checks.check("a stream is tokens, then done, with the ids and the text of the whole answer", || {
        for fields in [json!({"max_tokens": 20}), json!({"max_tokens": 20, "temperature": 1.2, "seed": 3})] {
            let whole = answer(server, fields.clone());
            let events = streamed(server, fields);
            assert_eq!(
                (json!(ids(&events)), json!(text(&events))),
                (whole["token_ids"].clone(), whole["text"].clone())
            );
            let (last, before) = events.split_last().expect("events");
            assert_eq!((last.0.as_str(), &last.1["finish_reason"]), ("done", &whole["finish_reason"]));
            assert_eq!(last.1["tokens_generated"], whole["tokens_generated"]);
            assert!(before.iter().all(|(name, _)| name == "token"));
        }
    });
    checks.check("a stream is not cached, not transformed, and carries its id", || {
        let response = post(server.address, STREAM, &ask(json!({"max_tokens": 1})));
        assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
        assert_eq!(response.header("cache-control"), Some("no-cache"));
        assert!(response.header("x-request-id").is_some_and(|id| id.starts_with("gen-")));
    });
    checks.check("log-probabilities of a stream are those of the whole answer to the bit", || {
        let whole = answer(server, json!({"logprobs": 2}))["logprobs"].clone();
        let events = streamed(server, json!({"logprobs": 2}));
        let values: Vec<&Value> = events.iter().filter(|(n, _)| n == "token").map(|(_, d)| &d["logprobs"]).collect();
        assert_eq!(json!(values), whole);
    });
    checks.check("nothing of a stop string leaks into a stream", || {
        let whole = answer(server, json!({"max_tokens": 24}))["text"].as_str().expect("text").to_owned();
        let stop: String = whole.chars().skip(whole.chars().count() / 2).take(5).collect();
        let events = streamed(server, json!({"max_tokens": 24, "stop": stop}));
        assert_eq!(text(&events), whole[..whole.find(&stop).expect("a part of it")]);
    });
    checks.check("characters that split over tokens stream whole, in every script", || {
        for prompt in ["你好，请用中文写一句话：", "Emoji: 🎉🚀👩‍🚀 and more:", "مرحبا بالعالم", "Привет, мир"]
        {
            let fields = json!({"prompt": prompt, "max_tokens": 24, "temperature": 1.5, "seed": 7});
            let events = streamed(server, fields.clone());
            assert_eq!(json!(text(&events)), answer(server, fields)["text"], "{prompt}");
        }
    });
}

fn fields_that_are_wrong(checks: &mut Checks, server: &Binary) {
    let before = at_rest(server);
    let mut wrong = |sentence: &str, cases: &[(Value, &str, &str)]| {
        checks.check(sentence, || {
            for (fields, code, param) in cases {
                for path in [WHOLE, STREAM] {
                    refused(&post(server.address, path, &ask(fields.clone())), 400, code, Some(param));
                }
            }
        });
    };
    let value = "invalid_value";
    wrong(
        "a prompt is text, and not empty",
        &[
            (json!({"prompt": 3}), value, "prompt"),
            (json!({"prompt": ["a"]}), value, "prompt"),
            (json!({"prompt": ""}), value, "prompt"),
            (json!({"prompt": null}), "missing_required_parameter", "prompt"),
        ],
    );
    wrong(
        "prompt tokens are ids of the vocabulary, and exclude a text",
        &[
            (json!({"prompt": null, "prompt_tokens": []}), value, "prompt_tokens"),
            (json!({"prompt": null, "prompt_tokens": "1"}), value, "prompt_tokens"),
            (json!({"prompt": null, "prompt_tokens": [1, -1]}), value, "prompt_tokens"),
            (json!({"prompt": null, "prompt_tokens": [1.5]}), value, "prompt_tokens"),
            (json!({"prompt": null, "prompt_tokens": [VOCABULARY]}), value, "prompt_tokens"),
            (json!({"prompt": null, "prompt_tokens": [u64::MAX]}), value, "prompt_tokens"),
            (json!({"prompt_tokens": [1]}), value, "prompt_tokens"),
        ],
    );
    wrong(
        "max_tokens is a whole number from 1",
        &[
            (json!({"max_tokens": 0}), value, "max_tokens"),
            (json!({"max_tokens": -1}), value, "max_tokens"),
            (json!({"max_tokens": 1.5}), value, "max_tokens"),
            (json!({"max_tokens": "8"}), value, "max_tokens"),
            (json!({"max_tokens": true}), value, "max_tokens"),
        ],
    );
    wrong(
        "prompt and answer fit the context together",
        &[
            (json!({"max_tokens": CONTEXT}), "context_length_exceeded", "max_tokens"),
            (json!({"max_tokens": CONTEXT + 1}), value, "max_tokens"),
            (json!({"prompt": "word ".repeat(9000), "max_tokens": 1}), "context_length_exceeded", "prompt"),
        ],
    );
    wrong(
        "a temperature is a number from 0 to 5",
        &[
            (json!({"temperature": -0.1}), value, "temperature"),
            (json!({"temperature": 5.1}), value, "temperature"),
            (json!({"temperature": "1"}), value, "temperature"),
            (json!({"temperature": []}), value, "temperature"),
        ],
    );
    wrong(
        "top_k is a whole number from 1",
        &[
            (json!({"temperature": 1, "top_k": 0}), value, "top_k"),
            (json!({"temperature": 1, "top_k": -1}), value, "top_k"),
            (json!({"temperature": 1, "top_k": 1.5}), value, "top_k"),
            (json!({"temperature": 1, "top_k": 1_u64 << 32}), value, "top_k"),
        ],
    );
    wrong(
        "top_p and min_p are numbers from 0 to 1",
        &[
            (json!({"temperature": 1, "top_p": 1.1}), value, "top_p"),
            (json!({"temperature": 1, "top_p": -0.1}), value, "top_p"),
            (json!({"temperature": 1, "top_p": "all"}), value, "top_p"),
            (json!({"temperature": 1, "min_p": 1.1}), value, "min_p"),
            (json!({"temperature": 1, "min_p": -0.1}), value, "min_p"),
            (json!({"temperature": 1, "min_p": {}}), value, "min_p"),
        ],
    );
    wrong(
        "a seed is a whole number of 64 bits",
        &[
            (json!({"temperature": 1, "seed": -1}), value, "seed"),
            (json!({"temperature": 1, "seed": 0.5}), value, "seed"),
            (json!({"temperature": 1, "seed": "x"}), value, "seed"),
        ],
    );
    wrong(
        "what selects needs a temperature",
        &[
            (json!({"top_k": 3}), value, "top_k"),
            (json!({"top_p": 0.5}), value, "top_p"),
            (json!({"min_p": 0.1}), value, "min_p"),
            (json!({"seed": 1}), value, "seed"),
        ],
    );
    wrong(
        "stop strings are up to sixteen texts, none empty",
        &[
            (json!({"stop": ""}), value, "stop"),
            (json!({"stop": ["a", ""]}), value, "stop"),
            (json!({"stop": [1]}), value, "stop"),
            (json!({"stop": {"a": 1}}), value, "stop"),
            (json!({"stop": vec!["a"; 17]}), value, "stop"),
        ],
    );
    wrong(
        "logprobs is a number from 0 to 20, ignore_eos is true or false",
        &[
            (json!({"logprobs": 21}), value, "logprobs"),
            (json!({"logprobs": -1}), value, "logprobs"),
            (json!({"logprobs": true}), value, "logprobs"),
            (json!({"ignore_eos": 1}), value, "ignore_eos"),
            (json!({"ignore_eos": "true"}), value, "ignore_eos"),
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
    checks.check("not one of these reached the engine", || {
        let after = at_rest(server);
        let fields = ["accepted_requests", "failed_requests", "rejected_requests", "prefill_tokens"];
        assert_eq!(gained(&before, &after, fields), [0; 4]);
    });
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

fn tokens_and_text(checks: &mut Checks, server: &Binary) {
    checks.check("text becomes ids and the ids become the text again, in every script", || {
        for text in ["Hello, world!", "你好，世界", "🎉🚀👩‍🚀", "  two  spaces\n\ttab", "naïve café", "a\u{0}b", "x"]
        {
            let body = post(server.address, "/tokenize", &json!({"text": text})).json();
            assert_eq!(body["count"], json!(body["tokens"].as_array().expect("ids").len()));
            let back = post(server.address, "/detokenize", &json!({"tokens": body["tokens"]})).json();
            assert_eq!(back["text"], text);
        }
    });
    checks.check("special tokens are one id where they are meant and text where they are not", || {
        let count = |special: bool| {
            let body = json!({"text": "<|im_end|>", "special_tokens": special});
            post(server.address, "/tokenize", &body).json()["count"].as_u64().expect("a count")
        };
        assert_eq!(count(true), 1);
        assert!(count(false) > 1);
        let id = tokens(server, "<|im_end|>");
        let shown = |special: bool| {
            let body = json!({"tokens": id, "special_tokens": special});
            post(server.address, "/detokenize", &body).json()["text"].clone()
        };
        assert_eq!((shown(true), shown(false)), (json!("<|im_end|>"), json!("")));
    });
    checks.check("a conversation becomes the ids of its template, with and without the head of the answer", || {
        let chat = |add: bool| {
            let body = json!({"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": add});
            let ids = post(server.address, "/tokenize", &body).json()["tokens"].clone();
            post(server.address, "/detokenize", &json!({"tokens": ids})).json()["text"]
                .as_str()
                .expect("text")
                .to_owned()
        };
        assert!(chat(false).ends_with("<|im_start|>user\nhi<|im_end|>\n"), "{}", chat(false));
        assert_eq!(chat(true), chat(false) + "<|im_start|>assistant\n");
    });
    checks.check("the fields of both are checked by name", || {
        let tokenize = |body: Value| post(server.address, "/tokenize", &body);
        refused(&tokenize(json!({})), 400, "missing_required_parameter", Some("text"));
        refused(&tokenize(json!({"text": 3})), 400, "invalid_value", Some("text"));
        refused(&tokenize(json!({"text": "a", "messages": []})), 400, "invalid_value", Some("messages"));
        refused(&tokenize(json!({"text": "a", "special_tokens": 1})), 400, "invalid_value", Some("special_tokens"));
        refused(&tokenize(json!({"text": "a", "n": 1})), 400, "unknown_parameter", Some("n"));
        let detokenize = |body: Value| post(server.address, "/detokenize", &body);
        refused(&detokenize(json!({})), 400, "missing_required_parameter", Some("tokens"));
        refused(&detokenize(json!({"tokens": [VOCABULARY]})), 400, "invalid_value", Some("tokens"));
        refused(&detokenize(json!({"tokens": ["a"]})), 400, "invalid_value", Some("tokens"));
        assert_eq!(detokenize(json!({"tokens": []})).json(), json!({"text": ""}));
    });
}

/// Requests of every kind that can stand beside each other.
fn mixture() -> Vec<Value> {
    let prompts = [SKY, "Once upon a time", "def fibonacci(n):", "你好", "1, 2, 3,", "Dear Sir or Madam,"];
    let kinds = [
        json!({"max_tokens": 12}),
        json!({"max_tokens": 17, "temperature": 0.8, "seed": 4, "top_k": 50}),
        json!({"max_tokens": 9, "temperature": 1.3, "top_p": 0.9, "min_p": 0.01, "logprobs": 4}),
    ];
    let with = |prompt: &str, kind: &Value| {
        let mut body = kind.clone();
        body["prompt"] = json!(prompt);
        body
    };
    prompts.iter().flat_map(|prompt| kinds.iter().map(|kind| with(prompt, kind))).collect()
}

fn many_at_once(checks: &mut Checks, server: &Binary) {
    let bodies = mixture();
    let alone: Vec<Value> = bodies.iter().map(|body| post(server.address, WHOLE, body).json()).collect();
    let before = at_rest(server);
    let anchor = endless(server);
    checks.check("eighteen different requests beside a stream say what each says alone, whole", || {
        let sent: Vec<_> = bodies.iter().map(|body| send_json(server.address, WHOLE, body)).collect();
        let together: Vec<Value> = sent.into_iter().map(|pending| pending.response().json()).collect();
        assert_eq!(together, alone);
    });
    checks.check("and streamed", || {
        let sent: Vec<_> = bodies.iter().map(|body| send_json(server.address, STREAM, body)).collect();
        for (pending, alone) in sent.into_iter().zip(&alone) {
            let events = data(&pending.response());
            assert_eq!((&json!(ids(&events)), &json!(text(&events))), (&alone["token_ids"], &alone["text"]));
        }
    });
    checks.check("sixteen times one prompt is one answer, whoever stands where", || {
        let sent: Vec<_> = (0..15).map(|_| send_json(server.address, WHOLE, &bodies[1])).collect();
        assert!(sent.into_iter().all(|pending| pending.response().json() == alone[1]));
    });
    checks.check("they shared decode steps: many more rows than steps, and more than one row in most", || {
        // The stream alone makes one row a step; everything else came on top of its steps.
        let now = stats(server);
        assert!(number(&now, "decode_batch_peak") >= 8, "{now}");
        let rows = |stats: &Value| {
            stats["average_batch_size"].as_f64().expect("a number") * number(stats, "decode_steps") as f64
        };
        let [steps] = gained(&before, &now, ["decode_steps"]);
        let shared = (rows(&now) - rows(&before)).round() as u64;
        assert!(shared > 2 * steps, "{shared} rows in {steps} steps");
    });
    checks.check("prompts shared prefill passes, within the budget", || {
        let now = stats(server);
        assert!(number(&now, "packed_prefill_batches") > 0);
        assert!(number(&now, "max_prefill_batch_tokens") <= 64);
    });
    drop(anchor);
    checks.check("the account says who came and how each ended, token by token", || {
        let after = at_rest(server);
        let fields = ["accepted_requests", "completed_requests", "cancelled_requests", "failed_requests"];
        assert_eq!(gained(&before, &after, fields), [52, 51, 1, 0]);
        // Two of three kinds sample, twice each; so do the fifteen; the stream is greedy.
        assert_eq!(gained(&before, &after, ["greedy_requests", "sampled_requests"]), [13, 39]);
        let count = |answer: &Value| number(answer, "tokens_generated");
        let whole: u64 = 2 * alone.iter().map(count).sum::<u64>() + 15 * count(&alone[1]);
        let [generated] = gained(&before, &after, ["aggregate_tokens_generated"]);
        assert!(generated >= whole + 3, "{generated} of {whole} and the stream");
        let prompts: u64 = 2 * alone.iter().map(|a| number(a, "prompt_tokens")).sum::<u64>()
            + 15 * number(&alone[1], "prompt_tokens")
            + tokens(server, "Once upon a time").as_array().expect("ids").len() as u64;
        assert_eq!(gained(&before, &after, ["prefill_tokens", "prefill_final_rows"]), [prompts, 52]);
    });
}

fn clients_that_leave(checks: &mut Checks, server: &Binary) {
    let long = json!({"prompt": "word ".repeat(3000), "max_tokens": 64});
    for path in [WHOLE, STREAM] {
        checks.check(&format!("a client that leaves {path} in the middle of its prompt is out"), || {
            let before = at_rest(server);
            let request = send_json(server.address, path, &long);
            until("prefill has begun", || {
                let now = stats(server);
                now["prefilling_requests"] == 1 && gained(&before, &now, ["prefill_tokens"]) > [0]
            });
            drop(request);
            let after = at_rest(server);
            assert_eq!(gained(&before, &after, ["cancelled_requests", "completed_requests"]), [1, 0]);
            let [computed] = gained(&before, &after, ["prefill_tokens"]);
            assert!(computed < 3000, "the rest of {computed} was not computed");
        });
    }
    let answer = json!({"prompt": SKY, "max_tokens": 4000, "ignore_eos": true});
    for path in [WHOLE, STREAM] {
        checks.check(
            &format!("a client that leaves {path} in the middle of its answer is out, once, with its pages"),
            || {
                let before = at_rest(server);
                let request = send_json(server.address, path, &answer);
                until("it decodes", || gained(&before, &stats(server), ["decode_steps"]) > [3]);
                assert!(number(&stats(server), "kv_pages_used") >= 4000 / 16);
                drop(request);
                let after = at_rest(server);
                assert_eq!(
                    gained(&before, &after, ["accepted_requests", "cancelled_requests", "completed_requests"]),
                    [1, 1, 0]
                );
                assert_eq!(after["kv_pages_free"], 1024);
            },
        );
    }
    checks.check("one of many leaves and the others do not notice", || {
        let alone = post(server.address, WHOLE, &ask(json!({"max_tokens": 40, "ignore_eos": true}))).json();
        let before = at_rest(server);
        let leaving = endless(server);
        let sent: Vec<_> = (0..4)
            .map(|_| send_json(server.address, WHOLE, &ask(json!({"max_tokens": 40, "ignore_eos": true}))))
            .collect();
        until("they are beside each other", || number(&stats(server), "active_requests") >= 4);
        drop(leaving);
        assert!(sent.into_iter().all(|pending| pending.response().json() == alone));
        let after = at_rest(server);
        assert_eq!(gained(&before, &after, ["cancelled_requests", "completed_requests"]), [1, 4]);
    });
}

fn a_full_queue(checks: &mut Checks) {
    let server = start(&["limits.max_batch=1", "limits.max_queue=1"]);
    let resident = endless(&server);
    let waiting = send_json(server.address, STREAM, &ask(json!({})));
    until("one waits", || stats(&server)["queued_requests"] == 1);
    checks.check("a full queue refuses at once and says when to come back", || {
        for path in [WHOLE, STREAM] {
            let response = post(server.address, path, &ask(json!({})));
            assert_eq!(response.header("retry-after"), Some("1"));
            refused(&response, 429, "queue_full", None);
        }
        let now = stats(&server);
        assert_eq!(
            (&now["rejected_requests"], &now["queue_peak"], &now["accepted_requests"]),
            (&json!(2), &json!(1), &json!(2))
        );
    });
    checks.check("looking is never refused", || {
        for path in ["/health", "/ready", "/stats", "/metrics", "/v1/models"] {
            assert_eq!(get(server.address, path).status, 200, "{path}");
        }
        assert_eq!(post(server.address, "/tokenize", &json!({"text": "x"})).status, 200);
    });
    checks.check("who waited is served as soon as there is room", || {
        drop(resident);
        let events = data(&waiting.response());
        assert_eq!(events.last().map(|(name, _)| name.as_str()), Some("done"));
        let after = at_rest(&server);
        assert_eq!((&after["completed_requests"], &after["cancelled_requests"]), (&json!(1), &json!(1)));
    });
    checks.check("a client that leaves the queue leaves it at once", || {
        let resident = endless(&server);
        let before = stats(&server);
        let waiting = send_json(server.address, WHOLE, &ask(json!({})));
        until("one waits", || stats(&server)["queued_requests"] == 1);
        drop(waiting);
        until("none waits", || stats(&server)["queued_requests"] == 0);
        let now = stats(&server);
        assert_eq!(gained(&before, &now, ["cancelled_requests"]), [1]);
        assert_eq!(now["active_requests"], 1, "the resident one goes on");
        drop(resident);
        at_rest(&server);
    });
}

fn the_end_of_it(checks: &mut Checks, server: &Binary) {
    let last = at_rest(server);
    checks.check("after all of that everything adds up: accepted is completed, cancelled and failed", || {
        let ended = ["completed_requests", "cancelled_requests", "failed_requests"].map(|f| number(&last, f));
        assert_eq!(number(&last, "accepted_requests"), ended.iter().sum::<u64>());
        let selected = number(&last, "greedy_requests") + number(&last, "sampled_requests");
        assert_eq!(number(&last, "accepted_requests"), selected);
        assert_eq!((&last["failed_requests"], &last["rejected_requests"]), (&json!(0), &json!(0)));
        assert_eq!(last["kv_pages_free"], 1024);
    });
    checks.check("the server is healthy and gives the bits that a fresh one gives", || {
        assert_eq!(get(server.address, "/health").json()["status"], "ok");
        assert_eq!(get(server.address, "/ready").status, 200);
        let fresh = start(&[]);
        let body = ask(json!({"max_tokens": 12, "logprobs": 5}));
        assert_eq!(post(server.address, WHOLE, &body).json(), post(fresh.address, WHOLE, &body).json());
    });
}
