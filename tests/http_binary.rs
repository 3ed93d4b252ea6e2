//! The real binary on a real socket: signals, exit codes, the last line on the terminal, an idle server, bad configurations.

mod http_support;

use std::io::Write;
use std::process::Command;
use std::time::Duration;

use http_support::binary::Binary;
use http_support::client::{events, get, post, send_json};
use http_support::until;
use serde_json::json;

#[test]
fn the_last_line_on_the_terminal_is_a_curl_command_that_works_when_pasted() {
    let server = Binary::tiny(&[]);
    until("the command", || server.output.lock().unwrap().ends_with('\n'));
    let command = server.output.lock().unwrap().lines().last().unwrap().to_owned();
    assert!(command.starts_with("curl "), "{command}");
    if Command::new("curl").arg("--version").output().is_err() {
        // Past the capture of the test harness: a skip must be seen.
        let _ = writeln!(std::io::stderr(), "skipped 1 check: no curl to paste the command for");
        return;
    }
    let run = Command::new("sh").args(["-c", &command]).output().expect("sh");
    let body: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap_or_else(|e| {
        panic!("{e}: {} {}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr))
    });
    assert_eq!(body["object"], "chat.completion", "{body}");
}

#[test]
fn sigterm_drains_live_streams_and_exits_with_zero() {
    let long = ["model.geometry.context=16384", "kv.pages=2048", "server.stream_buffer_bytes=67108864"];
    let mut server = Binary::tiny(&[&long[..], &["server.drain_deadline_ms=600000"]].concat());
    let body = json!({"prompt": "abc", "max_tokens": 10_000, "ignore_eos": true});
    let mut stream = send_json(server.address, "/v1/generate/stream", &body);
    stream.head();
    stream.read_events(1);
    server.terminate();
    until("it drains", || get(server.address, "/ready").status == 503);
    assert_eq!(get(server.address, "/stats").json()["active_requests"], 1, "the stream goes on");
    let mut rest = String::new();
    while let Some(chunk) = stream.chunk().expect("a whole stream") {
        rest.push_str(&String::from_utf8(chunk).unwrap());
    }
    assert_eq!(events(&rest).last().unwrap().0, "done");
    assert_eq!(server.wait(Duration::from_secs(60)).code(), Some(0));
}

#[test]
fn a_second_termination_a_second_later_ends_at_once() {
    let mut server =
        Binary::start("config/seed-120m.toml", &["executor.backend=cpu", "executor.threads=1", "kv.pages=128"]);
    // Seconds of work on this model.
    let body = json!({"prompt": "x".repeat(500), "max_tokens": 500, "ignore_eos": true});
    let stream = send_json(server.address, "/v1/generate/stream", &body);
    until("it is resident", || get(server.address, "/stats").json()["active_requests"] == 1);
    server.terminate();
    until("it drains", || get(server.address, "/ready").status == 503);
    // Sooner it is the same wish.
    std::thread::sleep(Duration::from_millis(1_100));
    server.terminate();
    assert_eq!(server.wait(Duration::from_secs(5)).code(), Some(130));
    drop(stream);
}

#[test]
fn a_step_past_its_deadline_fails_its_request_turns_health_and_ends_the_process_with_an_error() {
    let overrides = ["executor.backend=cpu", "executor.threads=1", "kv.pages=128", "executor.step_timeout_ms=10"];
    let mut server =
        Binary::start("config/seed-120m.toml", &[&overrides[..], &["server.fatal_linger_ms=3000"]].concat());
    // One pass over so long a prompt takes far more than ten milliseconds.
    let answer = post(server.address, "/v1/generate", &json!({"prompt": "x".repeat(1000), "max_tokens": 4}));
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (503, &json!("engine_failed")));
    let health = get(server.address, "/health");
    assert_eq!((health.status, &health.json()["status"]), (503, &json!("failed")));
    assert_eq!(server.wait(Duration::from_secs(10)).code(), Some(1));
}

#[test]
fn an_idle_server_uses_less_than_one_percent_of_a_core() {
    let server = Binary::tiny(&[]);
    assert_eq!(post(server.address, "/v1/generate", &json!({"prompt": "abc", "max_tokens": 4})).status, 200);
    std::thread::sleep(Duration::from_millis(500));
    let before = cpu_ticks(server.id());
    std::thread::sleep(Duration::from_secs(4));
    let used = cpu_ticks(server.id()) - before;
    // 100 ticks a second: 4 ticks are one percent of four seconds.
    assert!(used < 4, "{used} ticks of CPU in four idle seconds");
}

/// User and system time of a process, in hundredths of a second (fields 14 and 15 of /proc/PID/stat).
fn cpu_ticks(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).expect("a Linux process");
    let after_name = stat.rsplit(')').next().expect("a name in parentheses");
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn everything_wrong_with_a_configuration_is_said_before_anything_is_loaded() {
    let run = Command::new(env!("CARGO_BIN_EXE_crucible"))
        .args(["serve", "--set", "prefill.token_bugdet=1", "--set", "kv.pages=none", "--set", "server.port=99999"])
        .output()
        .expect("the binary");
    let text = String::from_utf8_lossy(&run.stderr);
    assert!(!run.status.success());
    for part in ["did you mean prefill.token_budget?", "kv.pages must be an integer", "server.port is 99999"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_port_in_use_is_an_error_and_no_panic() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let run = Command::new(env!("CARGO_BIN_EXE_crucible"))
        .args(["serve", "--config", "config/cpu-test.toml", "--set", &format!("server.port={port}")])
        .output()
        .expect("the binary");
    let text = String::from_utf8_lossy(&run.stderr);
    assert_eq!(run.status.code(), Some(1), "{text}");
    assert!(!text.contains("panicked"), "{text}");
}

#[test]
fn generate_says_on_the_terminal_what_the_server_says_over_http() {
    let server = Binary::tiny(&[]);
    let answer = post(server.address, "/v1/generate", &json!({"prompt": "abc", "max_tokens": 20})).json();
    let run = Command::new(env!("CARGO_BIN_EXE_crucible"))
        .args(["generate", "abc", "--max-tokens", "20", "--config", "config/cpu-test.toml"])
        .output()
        .expect("the binary");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    assert_eq!(String::from_utf8_lossy(&run.stdout), format!("{}\n", answer["text"].as_str().unwrap()));
}
