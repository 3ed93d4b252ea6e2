//! A miniature of the soak against the real binary with the tiny model: every phase, every check, and an oracle that can fail.

mod load_support;

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use load_support::{failed_checks, json, signal, until_counted};
use serde_json::Value;

fn soak(arguments: &[&str]) -> Output {
    command(arguments).args(["--stable-s", "3"]).output().expect("the binary")
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_crucible"));
    command
        .args(["load", "soak", "--config", "config/cpu-test.toml", "--token-range", "0..300", "--output-tokens", "12"])
        .args(["--prompt-tokens", "8,24,64", "--prompt-variants", "2", "--dialects", DIALECTS])
        .args([
            "--calibrate-s",
            "2",
            "--overload-s",
            "4",
            "--overload-factor",
            "4",
            "--window-s",
            "5",
            "--concurrency",
            "24",
        ])
        // Chat prompts are words, of which each is several of this model's byte tokens.
        .args(["--set", "model.geometry.context=2048", "--set", "kv.pages=512", "--set", "limits.max_queue=128"])
        .args(arguments);
    command
}

const DIALECTS: &str = "native,openai-completions,openai-chat,anthropic";

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("crucible-soak-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), output.stderr.as_slice()].concat()).into_owned()
}

#[test]
fn a_small_soak_keeps_every_promise_and_one_against_a_wrong_oracle_does_not() {
    let folder = folder("whole");
    let path = |name: &str| folder.join(name).to_str().expect("a path").to_owned();
    let (out, html, oracle) = (path("soak.json"), path("soak.html"), path("oracle.json"));
    let output = soak(&[
        "--cancelled",
        "300",
        "--mixed-s",
        "15",
        "--logs",
        &path("logs"),
        "--out",
        &out,
        "--html",
        &html,
        "--oracle-out",
        &oracle,
    ]);
    assert!(output.status.success(), "{}", said(&output));
    let report: Value = serde_json::from_slice(&std::fs::read(&out).expect("a report")).expect("JSON");
    assert_eq!((&report["format"], &report["passed"]), (&"crucible-soak/2".into(), &true.into()));
    let names: Vec<&str> =
        report["phases"].as_array().expect("phases").iter().filter_map(|p| p["name"].as_str()).collect();
    assert_eq!(names, ["stable", "overload", "cancelled", "mixed"]);
    assert_eq!(report["phases"][3]["windows"].as_array().map(Vec::len), Some(3));
    let mix: Vec<&str> =
        report["mix"]["dialects"].as_array().expect("dialects").iter().filter_map(Value::as_str).collect();
    assert_eq!(mix.join(","), DIALECTS);
    let windows = report["phases"].as_array().expect("phases").iter().flat_map(|p| p["windows"].as_array());
    let unseeded = windows.flatten().filter_map(|w| w["verification"]["unseeded"].as_u64());
    assert_eq!(unseeded.sum::<u64>(), 0, "every drawn request names its seed, Anthropic's too");
    assert!(report["checks"].as_array().is_some_and(|c| c.len() >= 11), "{}", report["checks"]);
    assert!(report["memory"].as_array().is_some_and(|m| m.len() > 20));
    let observed = &report["observed"];
    assert!(observed["devices"].as_array().is_some_and(|d| d.len() > 10), "every second: {observed}");
    assert!(observed["loaded"]["samples"].as_u64() > Some(5), "{}", observed["loaded"]);
    assert!(observed["server"].as_array().is_some_and(|s| s.len() > 40), "four times a second");
    assert_eq!((&report["target"]["model"], &report["seed"]), (&"tiny".into(), &1.into()));
    assert_eq!(report["server"]["config"]["kv.pages"], 512);
    let window = &report["phases"][3]["windows"][0];
    assert_eq!(window["ttft_ms"]["curve"].as_array().map(Vec::len), Some(21), "{window}");
    let events = window["output_events"]["counts"].as_array().expect("bins").iter().filter_map(Value::as_u64);
    assert!(events.sum::<u64>() > 0);
    let page = std::fs::read_to_string(&html).expect("the page");
    for title in ["TTFT, cumulative %", "output events a second", "requests inside the server", "KV pages in use"] {
        assert!(page.contains(title), "{title}");
    }
    assert!(!page.contains("NaN") && !page.contains("src="));

    // The same oracle with one token changed in every answer: load and correctness are one test, so it must fail.
    let mut wrong: Value = serde_json::from_slice(&std::fs::read(&oracle).expect("an oracle")).expect("JSON");
    for entry in wrong["entries"].as_object_mut().expect("entries").values_mut() {
        let text = entry["text"].as_str().expect("a text").to_owned();
        entry["text"] = format!("~{text}").into();
    }
    std::fs::write(&oracle, wrong.to_string()).expect("written");
    let output = soak(&["--cancelled", "20", "--mixed-s", "4", "--logs", &path("logs"), "--verify", &oracle]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("FAIL every output equals the oracle"), "{}", said(&output));
    std::fs::remove_dir_all(&folder).expect("ours");
}

/// The server that a soak has started.
fn server_of(soak: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{soak}/task/{soak}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

/// Where a server listens that was started with its port as the last argument.
fn address_of(server: u32) -> String {
    let arguments = std::fs::read_to_string(format!("/proc/{server}/cmdline")).expect("its arguments");
    let port = arguments.trim_end_matches('\0').rsplit("server.port=").next().expect("its port");
    format!("http://127.0.0.1:{port}")
}

const FIRST_PHASE: &str = "stable, window 1 of 1";

/// Begins a soak of more minutes than the test waits, and no more than a fast machine may plan, sends a signal to it when it has said
/// `when`, or to its server once that has work then, and gives what it said and its report.
fn ended_once(when: &str, name: &str, to_server: bool, signal_name: &str) -> (Output, Value) {
    use std::io::{BufRead, BufReader, Read};
    let folder = folder(name);
    let path = |name: &str| folder.join(name).to_str().expect("a path").to_owned();
    let (out, logs) = (path("soak.json"), path("logs"));
    let long = ["--stable-s", "300", "--cancelled", "10", "--mixed-s", "3600", "--logs", &logs, "--out", &out];
    let mut child = command(&long).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary");
    let mut errors = BufReader::new(child.stderr.take().expect("its standard error"));
    let mut told = String::new();
    while !told.contains(when) {
        assert_ne!(errors.read_line(&mut told).expect("a line"), 0, "{told}");
    }
    let mut process = child.id();
    if to_server {
        process = server_of(process).expect("the server");
        until_counted(&mut child, &address_of(process), "active_requests", 1);
    }
    signal(process, signal_name);
    let mut output = child.wait_with_output().expect("its end");
    errors.read_to_string(&mut told).expect("the rest");
    output.stderr = told.into_bytes();
    let report = json(std::path::Path::new(&out));
    std::fs::remove_dir_all(&folder).expect("ours");
    (output, report)
}

#[test]
fn a_soak_whose_server_dies_ends_at_once_and_fails() {
    let (output, report) = ended_once(FIRST_PHASE, "dead", true, "-KILL");
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert_eq!(report["phases"].as_array().map(Vec::len), Some(1), "no phase follows: {}", said(&output));
    let failed = failed_checks(&report);
    let named = |name: &str| failed.iter().any(|f| f.0 == name);
    assert!(failed[0] == ("the measurement ran to its end".into(), "cut short: the server ended".into()), "{failed:?}");
    assert!(named("the server tells its counters after every window"), "absent is no 0: {failed:?}");
    assert!(
        named("every page is back after every window") && named("the server drains and exits with 0"),
        "{failed:?}"
    );
    assert!(report["phases"][0]["windows"][0]["server"].is_null() && report["stats_after"].is_null());
    let counts = &report["phases"][0]["windows"][0]["counts"];
    assert_eq!(counts["failed"], 0, "what nobody could answer is not counted: {counts}");
}

#[test]
fn a_soak_that_is_ended_by_a_signal_lets_its_server_drain_and_keeps_what_it_has() {
    let (output, report) = ended_once(FIRST_PHASE, "signal", false, "-TERM");
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let failed = failed_checks(&report);
    assert_eq!(failed[0], ("the measurement ran to its end".into(), "cut short: SIGTERM came".into()), "{failed:?}");
    assert!(failed.iter().all(|f| f.0 != "the server drains and exits with 0"), "{failed:?}");
    assert_eq!(report["phases"].as_array().map(Vec::len), Some(1));
}

#[test]
fn a_soak_that_is_ended_while_it_records_its_oracle_says_so_in_its_report() {
    let (output, report) = ended_once("recording the solo answers", "recording", false, "-INT");
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let failed = failed_checks(&report);
    assert_eq!(failed[0], ("the measurement ran to its end".into(), "cut short: SIGINT came".into()), "{failed:?}");
    assert_eq!(report["phases"].as_array().map(Vec::len), Some(0));
    assert!(said(&output).contains("FAIL the measurement ran to its end"), "{}", said(&output));
}
