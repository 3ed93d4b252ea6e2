//! Faults inside the process, on the real binary built with the feature `fault-injection`:
//! `cargo test --release --features fault-injection --test faults_injected`.

mod http_support;

use std::time::Duration;

use http_support::binary::Binary;
use http_support::client::{get, send_json};
use http_support::until;
use serde_json::{Value, json};

/// Starts the tiny model with a fault to come.
fn with_fault(fault: &str) -> Binary {
    Binary::with_arguments("config/cpu-test.toml", &["server.fatal_linger_ms=1500"], &["--fault", fault])
}

fn question(tokens: usize) -> Value {
    json!({"prompt": "abc", "max_tokens": tokens, "ignore_eos": true})
}

#[test]
fn a_panicking_actor_or_a_failing_step_fails_every_request_in_the_typed_way_and_ends_the_process() {
    for fault in ["admission=3", "pages=3", "planner=40", "sampler=40", "executor=40", "step=40"] {
        let mut server = with_fault(fault);
        let streaming: Vec<_> =
            (0..2).map(|_| send_json(server.address, "/v1/generate/stream", &question(400))).collect();
        let unary = send_json(server.address, "/v1/generate", &question(400));
        for stream in streaming {
            let events = stream.response().events();
            let (name, data) = events.last().expect("an end");
            let error: Value = serde_json::from_str(data).expect("JSON");
            assert_eq!((name.as_str(), &error["error"]["code"]), ("error", &json!("engine_failed")), "{fault}");
        }
        let answer = unary.response();
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (503, &json!("engine_failed")), "{fault}");
        assert_eq!(get(server.address, "/health").status, 503, "{fault}");
        assert_eq!(server.wait(Duration::from_secs(10)).code(), Some(1), "{fault}");
        let log = server.log.lock().expect("no panic").clone();
        assert!(log.contains("injected"), "{fault}: {log}");
    }
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
