//! Faults inside the process, on the real binary built with the feature `fault-injection`:
//! `cargo test --release --features fault-injection --test faults_injected`.

mod http_support;

use std::time::Duration;

use http_support::binary::Binary;
use http_support::client::{events, get, post, send_json};
use http_support::until;
use serde_json::{Value, json};

/// Room for answers that last seconds: whatever strikes, strikes while they run.
const LONG: [&str; 4] = [
    "model.geometry.context=65536",
    "kv.pages=16384",
    "server.stream_buffer_bytes=67108864",
    "server.fatal_linger_ms=5000",
];

/// Starts the tiny model with a fault to come.
fn with_fault(fault: &str) -> Binary {
    Binary::with_arguments("config/cpu-test.toml", &LONG, &["--fault", fault])
}

fn question(tokens: usize) -> Value {
    json!({"prompt": "abc", "max_tokens": tokens, "ignore_eos": true})
}

#[test]
fn a_panicking_actor_or_a_failing_step_fails_every_request_in_the_typed_way_and_ends_the_process() {
    let faults = ["admission=3", "pages=3", "planner=4000", "sampler=4000", "executor=4000", "step=4000"];
    std::thread::scope(|scope| faults.iter().for_each(|fault| _ = scope.spawn(|| dies_of(fault))));
}

/// Two streams and a whole answer under a fault of the engine. One that the fault overtakes on its way in is refused instead.
fn dies_of(fault: &str) {
    let mut server = with_fault(fault);
    let mut first = send_json(server.address, "/v1/generate/stream", &question(60_000));
    assert_eq!(first.head().status, 200, "{fault}: no fault strikes before the first request is inside");
    let second = send_json(server.address, "/v1/generate/stream", &question(60_000));
    let unary = send_json(server.address, "/v1/generate", &question(60_000));
    let mut text = String::new();
    while let Some(chunk) = first.chunk().expect("a whole stream") {
        text.push_str(&String::from_utf8(chunk).expect("UTF-8"));
    }
    assert_typed_end(events(&text), fault);
    let second = second.response();
    match second.status {
        200 => assert_typed_end(second.events(), fault),
        status => assert_eq!((status, &second.json()["error"]["code"]), (503, &json!("engine_failed")), "{fault}"),
    }
    let answer = unary.response();
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (503, &json!("engine_failed")), "{fault}");
    assert_eq!(get(server.address, "/health").status, 503, "{fault}");
    assert_eq!(server.wait(Duration::from_secs(30)).code(), Some(1), "{fault}");
    let log = server.log.lock().expect("no panic").clone();
    assert!(log.contains("injected"), "{fault}: {log}");
}

fn assert_typed_end(events: Vec<(String, String)>, fault: &str) {
    let (name, data) = events.last().expect("an end");
    let error: Value = serde_json::from_str(data).expect("JSON");
    assert_eq!((name.as_str(), &error["error"]["code"]), ("error", &json!("engine_failed")), "{fault}");
}

#[test]
fn a_panicking_scorer_ends_the_process_like_any_other_actor_of_the_engine() {
    let mut server = with_fault("scorer=2");
    let asked = json!({"model": "tiny", "prompt": "a".repeat(90), "echo": true, "logprobs": 1, "max_tokens": 3});
    let answer = post(server.address, "/v1/completions", &asked);
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (503, &json!("engine_failed")));
    assert_eq!(server.wait(Duration::from_secs(30)).code(), Some(1));
}

#[test]
fn a_panicking_session_fails_its_own_request_alone_and_every_page_comes_back() {
    for path in ["/v1/generate/stream", "/v1/generate"] {
        let server = with_fault("session=5");
        // The engine sends its news step by step, so that the fifth comes long before the end.
        let struck = send_json(server.address, path, &question(400)).response();
        let text = struck.text();
        assert!(text.contains("engine_failed") && text.contains("session"), "{text}");
        // Printing the panic may take longer than the whole answer: cancelled or complete, the request is counted once.
        until("every page is back", || {
            let stats = get(server.address, "/stats").json();
            let ended = ["cancelled_requests", "completed_requests"].map(|name| stats[name].as_u64().unwrap_or(0));
            stats["active_requests"] == 0 && stats["kv_pages_used"] == 0 && ended.iter().sum::<u64>() == 1
        });
        assert_eq!(get(server.address, "/health").status, 200, "the engine did nothing wrong");
        assert_eq!(send_json(server.address, path, &question(20)).response().status, 200);
    }
}
