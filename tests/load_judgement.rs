//! What the load generator makes of targets that serve badly: a run in which nothing worked, or that cannot be judged, does not pass, and the
//! reason is on the terminal.

mod fake_target;

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use fake_target::{Fake, Request, asked, completion, json_of, missing, native, respond, stats, stream};
use serde_json::{Value, json};

fn load(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_crucible"));
    command.arg("load").args(args).stdin(Stdio::null()).output().expect("the generator runs")
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Runs and wants exit code 1 and these words.
fn fails(args: &[&str], words: &[&str]) -> String {
    let output = load(args);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
    for word in words {
        assert!(said.contains(word), "{args:?}: {word} is not in: {said}");
    }
    assert!(!said.contains("panicked"), "{said}");
    said
}

fn file(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("load-judgement");
    std::fs::create_dir_all(&folder).expect("a folder");
    folder.join(name)
}

fn text(path: &std::path::Path) -> &str {
    path.to_str().expect("a path")
}

/// A closed loop of eight requests.
fn closed(url: &str) -> Vec<&str> {
    vec!["run", "--workload", "tiny-4x1", "--target", url, "--warmups", "0", "--trials", "2"]
}

/// Native answers; everything but generations by `others`.
fn native_with<G, O>(generate: G, others: O) -> Fake
where
    G: Fn(&Request) -> Vec<u8> + Send + Sync + 'static,
    O: Fn(&Request) -> Vec<u8> + Send + Sync + 'static,
{
    Fake::start(move |request| if request.path == "/v1/generate/stream" { generate(request) } else { others(request) })
}

const ENGINE_FAILED: &str = r#"{"error":{"code":"engine_failed","message":"the engine is dead","param":null}}"#;

#[test]
fn a_dead_engine_and_a_full_house_are_no_pass() {
    let dead = |_: &Request| respond("503 Service Unavailable", "", ENGINE_FAILED);
    fails(&closed(&native_with(dead, |_| missing()).url), &["does not take native requests", "engine_failed"]);
    let dying = |request: &Request| match request.generation {
        0 => native(asked(request)),
        _ => respond("503 Service Unavailable", "", ENGINE_FAILED),
    };
    let dying = native_with(dying, |_| missing());
    fails(
        &closed(&dying.url),
        &["FAIL no request fails", "8 of 8 failed, first: tiny-4x1: status 503", "engine_failed"],
    );
    let full = |request: &Request| match request.generation {
        0 => native(asked(request)),
        _ => respond("429 Too Many Requests", "retry-after: 1\r\n", "{}"),
    };
    let full = native_with(full, |_| missing());
    fails(&closed(&full.url), &["FAIL requests complete, with tokens", "none of 8 completed, 8 refused"]);
}

#[test]
fn answers_without_tokens_or_with_fewer_than_asked_are_failures() {
    let good_probe = |request: &Request, rest: fn(&Request) -> Vec<u8>| match request.generation {
        0 => native(asked(request)),
        _ => rest(request),
    };
    let closing = move |request: &Request| good_probe(request, |_| native(0));
    let empty = Fake::start(move |r| if r.path == "/v1/generate/stream" { closing(r) } else { missing() });
    fails(&closed(&empty.url), &["FAIL no request fails", "0 of 1 tokens came, although the request says ignore_eos"]);
    let short = native_with(|request| native(asked(request).min(3)), |_| missing());
    let said = fails(
        &["run", "--workload", "isolated-8", "--target", &short.url, "--warmups", "0", "--trials", "1"],
        &["FAIL no request fails", "3 of 64 tokens came"],
    );
    assert!(!said.contains("note: native"), "the probe had all of its two tokens: {said}");
    // A target that does not even give the probe its tokens is asked without ignore_eos, and then nothing comes.
    let never = native_with(|_| native(0), |_| missing());
    fails(&closed(&never.url), &["note: native: ignore_eos is not taken", "8 completed without a token"]);
    let garbage = |request: &Request| match request.generation {
        0 => native(asked(request)),
        _ => stream("event: token\ndata: no json\n\nevent: done\ndata: <html>\n\n"),
    };
    let garbage = native_with(garbage, |_| missing());
    fails(&closed(&garbage.url), &["FAIL no request fails", "no JSON: no json"]);
}

#[test]
fn failed_warm_ups_are_counted() {
    // The probe is the first; the warm-up's four follow it.
    let cold = |request: &Request| match request.generation {
        1..=4 => respond("500 Internal Server Error", "", "cold"),
        _ => native(asked(request)),
    };
    let cold = native_with(cold, |_| missing());
    let args = ["run", "--workload", "tiny-4x1", "--target", &cold.url, "--warmups", "1", "--trials", "1"];
    fails(&args, &["FAIL no request of a warm-up fails", "4 of 4 failed, first: tiny-4x1: status 500: cold"]);
}

#[test]
fn statistics_that_vanish_or_begin_anew_during_a_run_fail_its_checks() {
    let args = |url| closed(url);
    let vanishing = native_with(
        |request| native(asked(request)),
        |request| match (request.path.as_str(), request.generation) {
            ("/stats", 0..=1) => json_of(&stats(request.generation)),
            _ => missing(),
        },
    );
    fails(
        &args(&vanishing.url),
        &["FAIL every page is back", "FAIL the server's account balances", "does not after it; did the server end?"],
    );
    let restarted = native_with(
        |request| native(asked(request)),
        |request| match (request.path.as_str(), request.generation) {
            ("/stats", 0..=1) => json_of(&stats(100)),
            ("/stats", _) => json_of(&stats(8)),
            _ => missing(),
        },
    );
    fails(&args(&restarted.url), &["FAIL the server's account balances", "was the server started again?"]);
}

#[test]
fn a_server_that_was_started_again_during_a_run_fails_its_account_even_when_it_balances() {
    let aged = |request: &Request, uptime: f64| {
        let mut told = stats(request.generation);
        told["uptime_seconds"] = json!(uptime);
        json_of(&told)
    };
    let restarted = native_with(
        |request| native(asked(request)),
        match_stats(move |request| aged(request, if request.generation < 2 { 100.0 } else { 2.0 })),
    );
    fails(&closed(&restarted.url), &["FAIL the server's account balances", "uptime_seconds grew by -98.0"]);
    let same = native_with(|request| native(asked(request)), match_stats(move |request| aged(request, 100.0)));
    let output = load(&closed(&same.url));
    assert!(output.status.success(), "{}", said(&output));
}

/// The statistics by `told`, and nothing else.
fn match_stats(told: impl Fn(&Request) -> Vec<u8>) -> impl Fn(&Request) -> Vec<u8> {
    move |request| if request.path == "/stats" { told(request) } else { missing() }
}

/// An open loop of native requests.
fn open<'a>(url: &'a str, own: &[&'a str]) -> Vec<&'a str> {
    let common = ["sustained", "--target", url, "--dialects", "native", "--duration-s", "0.5", "--output-tokens", "2"];
    [&common[..], own].concat()
}

#[test]
fn a_run_in_which_nothing_completed_has_failed_even_when_all_of_it_was_cancelled() {
    let good = native_with(|request| native(asked(request)), |_| missing());
    let all = ["--rate", "40", "--cancel-every", "1", "--cancel-at", "0"];
    fails(
        &open(&good.url, &all),
        &["FAIL requests complete, with tokens", "none of ", ", 0 refused, ", " cancelled, 0 failed"],
    );
}

#[test]
fn more_tokens_than_asked_for_and_counts_that_are_none_are_failures() {
    let after_the_probe = |request: &Request, tokens: usize, count: i64| match request.generation {
        0 => native(asked(request)),
        _ => {
            let one = "event: token\ndata: {\"token_id\":7,\"text\":\"a\"}\n\n".repeat(tokens);
            stream(&format!("{one}event: done\ndata: {{\"tokens_generated\":{count},\"text\":\"\"}}\n\n"))
        }
    };
    let much = native_with(move |request| after_the_probe(request, 17, 17), |_| missing());
    fails(
        &closed(&much.url),
        &["FAIL no request fails", "17 tokens came for 1 asked for; the target ignores max_tokens"],
    );
    let negative = native_with(move |request| after_the_probe(request, 1, -3), |_| missing());
    fails(&closed(&negative.url), &["FAIL no request fails", "the server's count of tokens is -3"]);
    let error = |request: &Request| match request.generation {
        0 => native(asked(request)),
        _ => respond("200 OK", "content-type: application/json\r\n", ENGINE_FAILED),
    };
    let error = native_with(error, |_| missing());
    fails(&closed(&error.url), &["the answer is no stream of events: ", "the engine is dead"]);
}

#[test]
fn failed_requests_of_the_calibration_fail_the_run_and_are_counted() {
    // The probe is the first; the twenty that follow it are the calibration's.
    let cold = |request: &Request| match request.generation {
        1..=20 => respond("500 Internal Server Error", "", "cold"),
        _ => native(asked(request)),
    };
    let cold = native_with(cold, |_| missing());
    let out = file("calibration.json");
    let own = ["--calibrate-s", "0.5", "--calibrate-concurrency", "2", "--factor", "0.1", "--out", text(&out)];
    fails(
        &open(&cold.url, &own),
        &["FAIL no request fails while the capacity is measured", "20 of ", "status 500: cold"],
    );
    let report: Value = serde_json::from_slice(&std::fs::read(&out).expect("a report")).expect("JSON");
    assert_eq!(report["warmups"]["failed"], 20, "{}", report["warmups"]);
    assert!(report["options"]["arrivals"]["burst"].is_null(), "nothing came in bursts");
    let dead = native_with(
        |request| if request.generation == 0 { native(asked(request)) } else { respond("500 Oh", "", "dead") },
        |_| missing(),
    );
    fails(&open(&dead.url, &["--calibrate-s", "0.2"]), &["no request completed while", "first: status 500: dead"]);
}

#[test]
fn a_calibration_that_is_ended_leaves_a_report() {
    let (asked_often, often) = std::sync::mpsc::channel();
    let slow = Fake::start(move |request| match request.path.as_str() {
        "/v1/generate/stream" => {
            let _ = asked_often.send(request.generation);
            native(asked(request))
        }
        _ => missing(),
    });
    let (out, html) = (file("ended.json"), file("ended.html"));
    for stale in [&out, &html] {
        let _ = std::fs::remove_file(stale);
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_crucible"));
    command.arg("load").args(open(&slow.url, &["--calibrate-s", "3600", "--out", text(&out), "--html", text(&html)]));
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    while often.recv().expect("a request") < 40 {}
    let told = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().expect("kill");
    assert!(told.success());
    let output = child.wait_with_output().expect("its end");
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("FAIL the measurement ran to its end"), "{}", said(&output));
    let report: Value = serde_json::from_slice(&std::fs::read(&out).expect("a report")).expect("JSON");
    assert!(report["warmups"]["completed"].as_u64() >= Some(20), "{}", report["warmups"]);
    assert!(report["options"]["capacity_requests_per_s"].is_null(), "{}", report["options"]);
    assert!(std::fs::read_to_string(&html).expect("a page").contains("cut short: SIGTERM came"));
}

#[test]
fn an_objective_that_cannot_be_judged_is_not_met() {
    let good = native_with(|request| native(asked(request)), |_| missing());
    let args = [&closed(&good.url)[..], &["--slo", "ttft_p99_ms=5000"]].concat();
    fails(&args, &["FAIL tiny-4x1: ttft_p99_ms=5000", "4 samples are too few, a p99 needs 100"]);
    let args = [&closed(&good.url)[..], &["--slo", "gap_p50_ms=5000"]].concat();
    fails(&args, &["FAIL tiny-4x1: gap_p50_ms=5000", "no figure: no sample"]);
}

#[test]
fn a_failure_in_open_loop_is_counted_once() {
    let bad = |request: &Request| match (request.path.as_str(), request.generation % 3) {
        (_, 2) if request.generation > 2 => respond("500 Internal Server Error", "", "every third"),
        ("/v1/generate/stream", _) => native(asked(request)),
        _ => completion(asked(request)),
    };
    let target = Fake::start(move |request| match request.path.as_str() {
        "/v1/generate/stream" | "/v1/completions" => bad(request),
        _ => missing(),
    });
    let out = file("once.json");
    let args = [
        "sustained",
        "--target",
        &target.url,
        "--rate",
        "60",
        "--duration-s",
        "1",
        "--arrivals",
        "constant",
        "--dialects",
        "native,openai-completions",
        "--cancel-every",
        "0",
        "--out",
        text(&out),
    ];
    fails(&args, &["FAIL no request fails"]);
    let report: Value = serde_json::from_slice(&std::fs::read(&out).expect("a report")).expect("JSON");
    let failed = report["workloads"][0]["summary"]["counts"]["failed"].as_u64().expect("a count");
    assert!(failed > 0);
    let checks = report["checks"].as_array().expect("checks");
    let detail = checks.iter().find(|c| c["name"] == "no request fails").expect("the check")["detail"].to_string();
    assert!(detail.starts_with(&format!("\"{failed} of 60 failed")), "{failed}: {detail}");
}

#[test]
fn a_run_without_requests_is_refused_before_it_begins() {
    let good = native_with(|request| native(asked(request)), |_| missing());
    let args = ["sustained", "--target", &good.url, "--dialects", "native", "--rate", "0.001", "--duration-s", "1"];
    fails(&args, &["no request is due in this time; raise the rate or the duration"]);
}

#[test]
fn what_a_target_does_not_speak_is_skipped_in_patterns_and_refused_by_name() {
    let openai = Fake::start(|request| match request.path.as_str() {
        "/v1/completions" => completion(asked(request)),
        "/v1/models" => json_of(&json!({"data": [{"id": "m"}]})),
        _ => missing(),
    });
    let out = file("skipped.json");
    let common = ["--target", &openai.url, "--dialect", "openai-completions", "--warmups", "0", "--trials", "1"];
    let output = load(&[&["run", "--workload", "shared-*,tiny-2x1", "--out", text(&out)], &common[..]].concat());
    assert!(output.status.success(), "{}", said(&output));
    assert!(
        said(&output).contains("skipped shared-packed-batch: the target does not take native"),
        "{}",
        said(&output)
    );
    let report: Value = serde_json::from_slice(&std::fs::read(&out).expect("a report")).expect("JSON");
    assert_eq!(report["options"]["skipped"][0]["workload"], "shared-packed-batch");
    fails(
        &[&["run", "--workload", "shared-packed-batch,tiny-2x1"], &common[..]].concat(),
        &["shared-packed-batch cannot be run: the target does not take native requests", "leave it out"],
    );
    fails(&[&["run", "--workload", "shared-*"], &common[..]].concat(), &["no workload of shared-* can be run"]);
}

#[test]
fn what_is_given_up_for_a_target_is_said_at_the_start_and_in_the_report() {
    let picky = Fake::start(|request| match request.path.as_str() {
        "/v1/completions" if request.body["prompt"].is_array() => {
            respond("400 Bad Request", "", r#"{"error":{"message":"prompt must be a string"}}"#)
        }
        "/v1/completions" if !request.body["ignore_eos"].is_null() => {
            respond("400 Bad Request", "", r#"{"error":{"message":"unknown field ignore_eos"}}"#)
        }
        "/v1/completions" => completion(asked(request)),
        _ => missing(),
    });
    let out = file("given-up.json");
    let args = [&closed(&picky.url)[..], &["--dialect", "openai-completions", "--out", text(&out)]].concat();
    let output = load(&args);
    let said = said(&output);
    assert!(output.status.success(), "{said}");
    for note in [
        "note: openai-completions: token ids are not taken, so prompts are words",
        "note: openai-completions: ignore_eos is not taken or does nothing, so answers may end early",
        "note: the target has no /stats",
        "ok   requests are what the target takes",
    ] {
        assert!(said.contains(note), "{note}: {said}");
    }
    let report = std::fs::read_to_string(&out).expect("a report");
    assert!(report.contains("openai-completions: token ids are not taken"), "{report}");
}

#[test]
fn an_oracle_must_be_of_the_same_model_seed_and_sampling_and_must_compare_something() {
    let models = |request: &Request| match request.path.as_str() {
        "/v1/models" => json_of(&json!({"data": [{"id": "m"}]})),
        _ => missing(),
    };
    let good = native_with(|request| native(asked(request)), models);
    let oracle = file("oracle.json");
    let target = ["--workload", "tiny-2x1", "--target", &good.url, "--warmups", "0", "--trials", "1"];
    let recorded = load(&[&["record-oracle", "--out", text(&oracle)], &target[..]].concat());
    assert!(recorded.status.success(), "{}", said(&recorded));
    let verify = [&["run", "--verify", text(&oracle)], &target[..]].concat();
    let passed = load(&verify);
    assert!(passed.status.success(), "{}", said(&passed));
    fails(&[&verify[..], &["--seed", "2"]].concat(), &["recorded with seed 1, this run has 2"]);
    fails(&[&verify[..], &["--model", "n"]].concat(), &["recorded with model m, this run has n"]);
    fails(&[&verify[..], &["--token-range", "5..900"]].concat(), &["does not know 2 of 2 requests of this run"]);
    let mix = ["--dialects", "native", "--target", &good.url, "--rate", "20", "--duration-s", "1"];
    fails(&[&["sustained", "--verify", text(&oracle)], &mix[..]].concat(), &["the oracle does not know"]);
    let nowhere = ["record-oracle", "--out", "/nowhere/at/all.json"];
    fails(&[&nowhere[..], &target[..]].concat(), &["cannot write /nowhere/at/all.json"]);
}

#[test]
fn overload_wants_retry_after_of_every_refusal() {
    let shy = Fake::start(|request| match (request.path.as_str(), request.generation % 4) {
        ("/v1/generate/stream", 3) if request.generation % 8 == 3 => respond("429 Too Many Requests", "", "{}"),
        ("/v1/generate/stream", 3) => respond("429 Too Many Requests", "retry-after: 1\r\n", "{}"),
        ("/v1/generate/stream", _) => native(asked(request)),
        _ => missing(),
    });
    let args = ["overload", "--dialects", "native", "--target", &shy.url, "--rate", "40", "--duration-s", "1"];
    fails(&args, &["FAIL overload is refused, and told when to retry", "of them without Retry-After"]);
}

#[test]
fn numbers_without_bounds_are_refused_with_theirs_and_abort_nothing() {
    let run: &[&str] = &["run", "--workload", "tiny-2x1"];
    for (command, flag, value) in [
        (run, "--threads", "1000000"),
        (run, "--threads", "0"),
        (run, "--trials", "18446744073709551615"),
        (run, "--trials", "0"),
        (run, "--warmups", "18446744073709551615"),
        (run, "--timeout-s", "18446744073709551615"),
        (run, "--slo", "ttft_p50_ms=1e300"),
        (run, "--gpu", "4294967295"),
        (&["run"], "--workload", "batch-4294967295x4294967295"),
        (&["sustained"], "--rate", "inf"),
        (&["sustained"], "--rate", "NaN"),
        (&["sustained"], "--duration-s", "1e300"),
        (&["sustained"], "--factor", "-1"),
        (&["sustained"], "--calibrate-s", "inf"),
        (&["sustained"], "--calibrate-concurrency", "18446744073709551615"),
        (&["sustained"], "--prompt-tokens", "4294967295"),
        (&["sustained"], "--output-tokens", "4294967295"),
        (&["sustained"], "--prompt-variants", "18446744073709551615"),
        (&["sustained"], "--cancel-every", "18446744073709551615"),
        (&["sustained"], "--cancel-at", "4294967295tok"),
        (&["sustained"], "--burst", "0"),
        (&["pressure"], "--burst", "4294967295"),
        (&["pressure"], "--prompt-tokens", "4294967295"),
        (&["soak", "--config", "config/cpu-test.toml"], "--mixed-s", "inf"),
        (&["soak", "--config", "config/cpu-test.toml"], "--cancelled", "18446744073709551615"),
        (&["soak", "--config", "config/cpu-test.toml"], "--window-s", "NaN"),
        (&["selftest"], "--duration-s", "inf"),
        (&["selftest"], "--tokens", "0"),
        (&["selftest"], "--concurrency", "18446744073709551615"),
        (&["stub"], "--threads", "1000000"),
        (&["stub"], "--gap-us", "18446744073709551615"),
    ] {
        let output = load(&[command, &[&format!("{flag}={value}")]].concat());
        let said = said(&output);
        assert!(matches!(output.status.code(), Some(1 | 2)), "{command:?} {flag} {value}: {said}");
        assert!(!said.contains("panicked") && said.contains("not a"), "{command:?} {flag} {value}: {said}");
    }
    let good = native_with(|request| native(asked(request)), |_| missing());
    let much =
        ["sustained", "--target", &good.url, "--dialects", "native", "--rate", "100000", "--duration-s", "604800"];
    fails(&much, &["more than 1000000 requests; lower the rate or the duration"]);
    let many = ["soak", "--config", "config/cpu-test.toml", "--mixed-s", "604800", "--window-s", "0.001"];
    fails(&many, &["--mixed-s comes in more than 100000 windows; give a longer --window-s"]);
    let wide = ["pressure", "--target", &good.url, "--burst", "100000", "--prompt-tokens", "1048576"];
    fails(&wide, &["the burst's prompt tokens in all"]);
}

/// No machine's: reserved for documentation.
const ELSEWHERE: &str = "http://192.0.2.1:8080";

#[test]
fn the_mix_alone_is_recorded_from_a_target_of_its_own_dialects() {
    let openai = Fake::start(|request| match request.path.as_str() {
        "/v1/completions" => completion(asked(request)),
        _ => missing(),
    });
    let oracle = file("mix.json");
    let args = ["record-oracle", "--workload", "sustained", "--dialects", "openai-completions", "--out", text(&oracle)];
    let output = load(&[&args[..], &["--target", &openai.url, "--output-tokens", "2"]].concat());
    assert!(output.status.success(), "{}", said(&output));
}

#[test]
fn a_target_that_does_not_tell_how_long_it_runs_is_said_to_hide_a_restart() {
    let named = "ok   the target is one process, as far as it tells";
    let told = |others: fn(&Request) -> Vec<u8>| {
        let target = native_with(|request| native(asked(request)), others);
        let output = load(&closed(&target.url));
        assert!(output.status.success(), "{}", said(&output));
        said(&output)
    };
    let counters =
        told(|request| if request.path == "/stats" { json_of(&stats(request.generation)) } else { missing() });
    assert!(counters.contains(named) && counters.contains("/stats tells no uptime_seconds"), "{counters}");
    let silent = told(|_| missing());
    assert!(silent.contains(named) && silent.contains("it has no /stats: a restart could not be seen"), "{silent}");
    let aged = told(|request| {
        let mut told = stats(request.generation);
        told["uptime_seconds"] = json!(100.0);
        if request.path == "/stats" { json_of(&told) } else { missing() }
    });
    assert!(!aged.contains(named), "{aged}");
}

#[test]
fn flags_that_would_do_nothing_are_refused() {
    for args in [
        &["selftest", "--dialect", "anthropic", "--expect-events-per-s", "5"][..],
        &["sustained", "--burst", "4"],
        &["sustained", "--expect-queue", "4"],
        &["sustained", "--rate", "5", "--factor", "2"],
        &["sustained", "--trace", "t.jsonl", "--duration-s", "5"],
        &["stub", "--gap-us", "5", "--each-event"],
        &["run", "--workload", "tiny-2x1", "--logs", "l"],
        &["run", "--workload", "tiny-2x1", "--ready-s", "5"],
        &["pressure", "--logs", "l"],
        &["record-oracle", "--out", "target/o.json", "--workload", "tiny-2x1", "--cancel-every", "17"],
        &["record-oracle", "--out", "target/o.json", "--workload", "tiny-2x1", "--policies", "greedy"],
        &["record-oracle", "--out", "target/o.json", "--workload", "tiny-2x1", "--prompt-tokens", "16"],
        &["record-oracle", "--out", "target/o.json", "--workload", "tiny-2x1", "--dialects", "native"],
        &["record-oracle", "--out", "target/o.json", "--workload", "sustained", "--warmups", "3"],
        &["record-oracle", "--out", "target/o.json", "--workload", "sustained", "--trials", "1"],
        &["record-oracle", "--out", "target/o.json", "--workload", "sustained", "--prompts", "same"],
        &["record-oracle", "--out", "target/o.json", "--workload", "sustained", "--cancel-every", "17"],
        &["record-oracle", "--out", "target/o.json", "--workload", "sustained", "--cancel-at", "1tok"],
        &["record-oracle", "--out", "target/o.json", "--workload", "sustained,tiny-2x1", "--cancel-at", "1tok"],
        &["record-oracle", "--out", "target/o.json", "--workload", "sustained", "--dialect", "native"],
        &["record-oracle", "--out", "target/o.json", "--workload", "tiny-2x1", "--threads", "2"],
        &["run", "--workload", "tiny-2x1", "--workloads", "config/workloads/chat.toml"],
        &["run", "--workload", "tiny-2x1", "--target", ELSEWHERE, "--gpu", "0"],
        &["run", "--workload", "tiny-2x1", "--target", ELSEWHERE, "--nvidia-smi", "nvidia-smi"],
        &["sustained", "--target", ELSEWHERE, "--gpu", "0"],
        &["pressure", "--target", ELSEWHERE, "--gpu", "0"],
        &["sustained", "--cancel-every", "0", "--cancel-at", "1tok"],
        &["overload", "--dialects", "openai-chat,anthropic", "--policies", "greedy,min-p"],
        &["soak", "--config", "config/cpu-test.toml", "--cancel-every", "0", "--cancelled", "0", "--cancel-at", "1tok"],
        &["stub", "--only", "anthropic", "--text-prompts", "--listen", "192.0.2.1:1"],
        &["sustained", "--cancel-at", "900tok", "--output-tokens", "16"],
        &["pressure", "--config", "config/cpu-test.toml", "--set", "kv.pages=99"],
        &["pressure", "--config", "config/cpu-test.toml", "--set", "limits.max_queue=9"],
    ] {
        let output = load(args);
        assert!(!output.status.success(), "{args:?}");
        let said = said(&output);
        let words = ["belongs to", "cannot be used with", "judges the native", "never comes", "is what --expect-"];
        assert!(words.iter().any(|w| said.contains(w)), "{args:?}: {said}");
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    fails(&["stub", "--listen", &address], &[&format!("cannot listen on {address}"), "choose another address"]);
}
