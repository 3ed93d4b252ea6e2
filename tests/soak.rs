//! A miniature of the soak against the real binary with the tiny model: every phase, every check, and an oracle that can fail.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

fn soak(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_crucible"))
        .args(["load", "soak", "--config", "config/cpu-test.toml", "--token-range", "0..300", "--output-tokens", "12"])
        .args(["--prompt-tokens", "8,24,64", "--prompt-variants", "2", "--dialects", DIALECTS])
        .args([
            "--calibrate-s",
            "2",
            "--stable-s",
            "3",
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
        .args(arguments)
        .output()
        .expect("the binary")
}

const DIALECTS: &str = "native,openai-completions,openai-chat,anthropic";

fn folder() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("crucible-soak-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), output.stderr.as_slice()].concat()).into_owned()
}

#[test]
fn a_small_soak_keeps_every_promise_and_one_against_a_wrong_oracle_does_not() {
    let folder = folder();
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
    assert_eq!((&report["format"], &report["passed"]), (&"crucible-soak/1".into(), &true.into()));
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
    assert!(std::fs::read_to_string(&html).expect("the page").contains("<svg"));

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
