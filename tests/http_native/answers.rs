//! What the server says of itself, whole answers, selection, streams, and tokens as text.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::checks::Checks;
use crate::dialect::{
    CONTEXT, SKY, STREAM, VOCABULARY, WHOLE, answer, ask, ids, refused, stats, streamed, text, tokens,
};
use crate::http_support::binary::Binary;
use crate::http_support::client::{get, post};

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Binary) {
    what_the_server_says_of_itself(checks, server);
    whole_answers(checks, server);
    what_stands_beside_the_text(checks, server);
    selection(checks, server);
    streams(checks, server);
    tokens_and_text(checks, server);
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
}

fn what_stands_beside_the_text(checks: &mut Checks, server: &Binary) {
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
