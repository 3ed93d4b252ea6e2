//! The load generator as a real process against the stub as a real process: exit codes, files and what they say.

mod load_support;

use std::path::Path;

use load_support::{folder, json, run, said, stub};
use serde_json::Value;

#[test]
fn every_standard_workload_runs_in_a_closed_loop_and_the_report_keeps_every_round() {
    let stub = stub(&["--gap-us", "1000"]);
    let folder = folder("all");
    let (out, html) = (folder.join("report.json"), folder.join("report.html"));
    let output = run(&[
        "run",
        "--workload",
        "all",
        "--target",
        &stub.url,
        "--warmups",
        "1",
        "--trials",
        "2",
        "--out",
        out.to_str().expect("a path"),
        "--html",
        html.to_str().expect("a path"),
    ]);
    let report = json(&out);
    assert_eq!(report["format"], "crucible-load-report/1");
    let workloads = report["workloads"].as_array().expect("workloads");
    // The stub packs nothing and tells nothing of batches: the one workload that promises them is left out, and said so.
    assert_eq!(workloads.len(), 31);
    assert!(said(&output).contains("skipped shared-packed-batch"), "{}", said(&output));
    for w in workloads {
        let rounds = w["rounds"].as_array().expect("rounds");
        let (name, shots) = (&w["workload"]["name"], w["workload"]["shots"].as_array().expect("shots").len());
        assert_eq!(rounds.len(), 2, "{name}");
        for round in rounds {
            assert_eq!(round["requests"].as_array().map(Vec::len), Some(shots), "{name}");
            assert_eq!(round["counts"]["failed"], 0, "{name}: {round}");
        }
    }
    assert!(output.status.success(), "{}", said(&output));
    let page = std::fs::read_to_string(&html).expect("the page");
    assert!(page.contains("<svg") && page.contains("stall-941") && !page.contains("NaN"));
    assert!(!page.contains("http-equiv") && !page.contains("<script") && !page.contains("src="));
}

#[test]
fn gaps_are_those_that_the_stub_makes() {
    let stub = stub(&["--gap-us", "10000"]);
    let out = folder("gaps").join("report.json");
    let path = out.to_str().expect("a path");
    let output = run(&["run", "--workload", "isolated-8", "--target", &stub.url, "--out", path]);
    assert!(output.status.success(), "{}", said(&output));
    let gap = json(&out)["workloads"][0]["summary"]["gap_p50_ms"]["median"].as_f64().expect("a gap");
    // Timers of the stub have millisecond steps and may be late on a busy machine, never early.
    assert!((9.9..30.0).contains(&gap), "{gap}");
}

#[test]
fn one_changed_bit_in_the_oracle_is_found_and_the_exit_code_says_so() {
    let stub = stub(&[]);
    let folder = folder("oracle");
    let oracle = folder.join("oracle.json");
    let path = oracle.to_str().expect("a path");
    let common = ["--workload", "short-4,stall-33", "--target", &stub.url, "--warmups", "1", "--trials", "2"];
    let recorded = run(&[&["record-oracle", "--out", path], &common[..]].concat());
    assert!(recorded.status.success(), "{}", said(&recorded));
    let verified = run(&[&["run", "--verify", path], &common[..]].concat());
    assert!(verified.status.success(), "{}", said(&verified));

    let mut changed = json(&oracle);
    let entries = changed["entries"].as_object_mut().expect("entries");
    let ids = entries.values_mut().next_back().expect("an entry")["token_ids"].as_array_mut().expect("ids");
    ids[3] = Value::from(ids[3].as_u64().expect("an id") ^ 1);
    std::fs::write(&oracle, changed.to_string()).expect("written");
    let refuted = run(&[&["run", "--verify", path], &common[..]].concat());
    assert_eq!(refuted.status.code(), Some(1), "{}", said(&refuted));
    assert!(said(&refuted).contains("FAIL every output equals the oracle"), "{}", said(&refuted));

    let other_seed = run(&[&["run", "--verify", path, "--seed", "2"], &common[..]].concat());
    assert_eq!(other_seed.status.code(), Some(1), "an oracle of another seed must not pass");
}

#[test]
fn a_missed_objective_fails_and_a_met_one_does_not() {
    let stub = stub(&["--gap-us", "5000"]);
    let common = ["run", "--workload", "isolated-8", "--target", &stub.url, "--warmups", "0", "--trials", "1"];
    let met = run(&[&common[..], &["--slo", "ttft_p95_ms=5000", "--slo", "gap_p50_ms=2000"]].concat());
    assert!(met.status.success(), "{}", said(&met));
    let missed = run(&[&common[..], &["--slo", "gap_p50_ms=1"]].concat());
    assert_eq!(missed.status.code(), Some(1), "{}", said(&missed));
}

#[test]
fn an_open_loop_in_every_dialect_counts_refusals_apart_from_failures() {
    let busy = stub(&["--refuse-every", "5", "--gap-us", "1000"]);
    let out = folder("overload").join("report.json");
    let path = out.to_str().expect("a path");
    let common = ["--rate", "150", "--duration-s", "2", "--output-tokens", "8"];
    let output = run(&[&["overload", "--target", &busy.url, "--out", path], &common[..]].concat());
    assert!(output.status.success(), "{}", said(&output));
    let report = json(&out);
    let counts = &report["workloads"][0]["summary"]["counts"];
    assert!(counts["refused"].as_u64() > Some(20) && counts["failed"] == 0, "{counts}");
    assert!(counts["cancelled"].as_u64() > Some(0), "{counts}");
    assert_eq!(report["workloads"].as_array().map(Vec::len), Some(5));
    drop(busy);

    let broken = stub(&["--break-every", "5"]);
    let output = run(&[&["sustained", "--target", &broken.url], &common[..]].concat());
    assert_eq!(output.status.code(), Some(1), "broken streams are failures: {}", said(&output));
}

#[test]
fn a_trace_is_replayed_at_its_own_times_and_lengths() {
    let stub = stub(&[]);
    let out = folder("trace").join("report.json");
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/config/workloads/trace-example.jsonl");
    let output = run(&[
        "sustained",
        "--target",
        &stub.url,
        "--trace",
        trace,
        "--cancel-every",
        "0",
        "--dialects",
        "native",
        "--out",
        out.to_str().expect("a path"),
    ]);
    assert!(output.status.success(), "{}", said(&output));
    let report = json(&out);
    let options = &report["options"];
    for own in ["/mix/prompts", "/mix/output", "/mix/variants", "/arrivals", "/duration_s"] {
        assert!(options.pointer(own).is_some_and(Value::is_null), "{own} is the trace's: {options}");
    }
    let requests = report["workloads"][0]["rounds"][0]["requests"].as_array().expect("requests").clone();
    let seen: Vec<(f64, u64)> = requests
        .iter()
        .map(|r| (r["due_s"].as_f64().expect("a time"), r["output_tokens"].as_u64().expect("a count")))
        .collect();
    let expected = [(0.0, 48), (0.35, 24), (0.4, 96), (1.2, 64), (1.2, 64), (2.7, 32)];
    assert!(seen.iter().zip(expected).all(|(s, e)| (s.0 - e.0).abs() < 1e-6 && s.1 == e.1), "{seen:?}");
}

#[test]
fn two_servers_are_started_in_alternating_order_and_compared_pair_by_pair() {
    let folder = folder("ab");
    let exe = env!("CARGO_BIN_EXE_crucible");
    let variant = |name: &str, gap_us: &str| {
        let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port();
        let path = folder.join(format!("{name}.toml"));
        let text = format!(
            "command = ['{exe}', 'load', 'stub', '--listen', '127.0.0.1:{port}', '--gap-us', '{gap_us}']\n\
             url = 'http://127.0.0.1:{port}'\n"
        );
        std::fs::write(&path, text).expect("written");
        path.to_str().expect("a path").to_owned()
    };
    let (slow, fast) = (variant("slow", "20000"), variant("fast", "5000"));
    let out = folder.join("comparison.json");
    let html = folder.join("comparison.html");
    let logs = folder.join("logs");
    let output = run(&[
        "run",
        "--workload",
        "isolated-8",
        "--ab",
        &slow,
        &fast,
        "--pairs",
        "2",
        "--warmups",
        "0",
        "--trials",
        "1",
        "--logs",
        logs.to_str().expect("a path"),
        "--out",
        out.to_str().expect("a path"),
        "--html",
        html.to_str().expect("a path"),
    ]);
    assert!(output.status.success(), "{}", said(&output));
    let comparison = json(&out);
    let order: Vec<&str> =
        comparison["runs"].as_array().expect("runs").iter().filter_map(|r| r["variant"].as_str()).collect();
    assert_eq!(order, ["slow", "fast", "fast", "slow"]);
    let hash = comparison["variants"][0]["sha256"].as_str().expect("a hash");
    assert_eq!(hash.len(), 64);
    let changes = comparison["changes"].as_array().expect("changes");
    let tokens = changes.iter().find(|c| c["figure"] == "output_tok_per_s").expect("the figure");
    assert_eq!(tokens["rounds"].as_array().map(Vec::len), Some(2));
    assert!(tokens["percent"]["min"].as_f64() > Some(50.0), "{tokens}");
    assert!(std::fs::read_to_string(html).expect("the page").contains("<svg"));
}

/// A program that talks like nvidia-smi; its n-th start prints the n-th of `lines` for ever.
fn fake_nvidia_smi(folder: &Path, lines: &[&str]) -> String {
    use std::os::unix::fs::PermissionsExt;
    let (path, starts) = (folder.join("nvidia-smi"), folder.join("starts"));
    let _ = std::fs::remove_file(&starts);
    let cases: String = lines.iter().enumerate().map(|(n, line)| format!("  {}) line='{line}' ;;\n", n + 1)).collect();
    let script = format!(
        "#!/bin/sh\ncase \" $* \" in *' --query-gpu=index,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu \
         --format=csv,noheader,nounits --loop-ms '*) ;; *) exit 2 ;; esac\n\
         echo start >> '{0}'\ncase $(wc -l < '{0}' | tr -d ' ') in\n{cases}  *) exit 3 ;;\nesac\n\
         while echo \"$line\"; do sleep 0.2; done\n",
        starts.display()
    );
    std::fs::write(&path, script).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("a program");
    path.to_str().expect("a path").to_owned()
}

#[test]
fn the_report_carries_clocks_and_power_of_every_second_and_null_for_what_the_gpu_does_not_tell() {
    let stub = stub(&["--gap-us", "20000"]);
    let folder = folder("devices");
    let path = |name: &str| folder.join(name).to_str().expect("a path").to_owned();
    let (out, html) = (path("report.json"), path("report.html"));
    let smi = fake_nvidia_smi(&folder, &["0, 1980, 3201, [N/A], 45, 97"]);
    let common = ["run", "--workload", "isolated-8", "--target", &stub.url, "--warmups", "0", "--nvidia-smi", &smi];
    let output = run(&[&common[..], &["--out", &out, "--html", &html]].concat());
    assert!(output.status.success(), "{}", said(&output));
    let observed = &json(Path::new(&out))["observed"];
    assert_eq!((&observed["sampler"], &observed["same_machine"]), (&"nvidia-smi".into(), &true.into()));
    // Three trials of 1.3 s at least.
    let devices = observed["devices"].as_array().expect("a timeline");
    assert!(devices.len() >= 3, "{observed}");
    for (second, sample) in devices.iter().enumerate() {
        assert!(sample["t_s"].as_f64() >= Some(second as f64), "{sample}");
        let gpu = &sample["gpus"][0];
        assert_eq!((&gpu["sm_mhz"], &gpu["memory_mhz"]), (&1_980.into(), &3_201.into()), "{sample}");
        assert_eq!((&gpu["celsius"], &gpu["utilisation_percent"]), (&45.into(), &97.into()), "{sample}");
        assert!(gpu.get("power_w").is_some_and(Value::is_null), "absent is null, not 0: {sample}");
    }
    let loaded = &observed["loaded"];
    assert!(loaded["samples"].as_u64() >= Some(1), "{loaded}");
    assert_eq!((&loaded["sm_mhz"], &loaded["power_w"]), (&1_980.0.into(), &Value::Null), "{loaded}");
    assert!(said(&output).contains("SM 1980 MHz, memory 3201 MHz, - W (GPU 0 by nvidia-smi)"), "{}", said(&output));
    let page = std::fs::read_to_string(&html).expect("the page");
    assert!(page.contains("aria-label=\"clocks, MHz\"") && page.contains("aria-label=\"GPU utilisation, %\""));
    assert!(!page.contains("aria-label=\"GPU power, W\"") && !page.contains("NaN"), "no sample, no plot");

    let silent = run(&[&common[..7], &["--nvidia-smi", "/bin/true"]].concat());
    assert!(!silent.status.success() && said(&silent).contains("gave no reading"), "{}", said(&silent));
}

#[test]
fn a_pair_whose_loaded_clocks_differ_by_more_than_one_percent_is_marked_in_table_json_and_page() {
    let folder = folder("clocks");
    let exe = env!("CARGO_BIN_EXE_crucible");
    let variant = |name: &str| {
        let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port();
        let path = folder.join(format!("{name}.toml"));
        let text = format!(
            "command = ['{exe}', 'load', 'stub', '--listen', '127.0.0.1:{port}', '--gap-us', '20000']\n\
             url = 'http://127.0.0.1:{port}'\n"
        );
        std::fs::write(&path, text).expect("written");
        path.to_str().expect("a path").to_owned()
    };
    let path = |name: &str| folder.join(name).to_str().expect("a path").to_owned();
    let (out, html, logs) = (path("comparison.json"), path("comparison.html"), path("logs"));
    // In the order of the starts: a, b, then b, a, then a, b. The first pair differs by 4 %, the second by 0.5 %, the third's b tells nothing.
    let smi = fake_nvidia_smi(
        &folder,
        &[
            "0, 1980, 3201, 240.0, 45, 97",
            "0, 1900, 3201, 241.0, 45, 97",
            "0, 1980, 3201, 240.0, 45, 97",
            "0, 1970, 3201, 250.0, 45, 97",
            "0, 1980, 3201, 240.0, 45, 97",
            "0, [N/A], [N/A], [N/A], 45, 97",
        ],
    );
    let (a, b) = (variant("a"), variant("b"));
    let mut arguments = vec!["run", "--workload", "isolated-8", "--ab", &a, &b, "--pairs", "3", "--warmups", "0"];
    arguments.extend(["--logs", &logs, "--out", &out, "--html", &html, "--nvidia-smi", &smi]);
    let output = run(&arguments);
    assert!(output.status.success(), "{}", said(&output));
    let comparison = json(Path::new(&out));
    assert_eq!(comparison["format"], "crucible-load-comparison/3");
    let runs = comparison["runs"].as_array().expect("runs");
    let medians: Vec<&Value> = runs.iter().map(|r| &r["observed"]["loaded"]["sm_mhz"]).collect();
    let told = [1_980.0, 1_900.0, 1_980.0, 1_970.0, 1_980.0].map(Value::from);
    assert_eq!(medians[..5], told.iter().collect::<Vec<_>>());
    assert!(medians[5].is_null(), "{}", runs[5]["observed"]["loaded"]);
    assert!(runs.iter().all(|r| r["observed"]["devices"].as_array().is_some_and(|d| d.len() >= 3)));
    let marks = [Value::from(true), Value::from(false), Value::Null];
    for change in comparison["changes"].as_array().expect("changes") {
        let seen = change["rounds"].as_array().expect("rounds").iter().map(|r| r["clocks_differ"].clone());
        assert_eq!(seen.collect::<Vec<_>>(), marks, "{change}");
    }
    let loaded = comparison["loaded"].as_array().expect("pairs");
    assert_eq!(loaded.iter().map(|p| p["clocks_differ"].clone()).collect::<Vec<_>>(), marks);
    // Power may differ where clocks do not: it has a mark of its own.
    let power = loaded[1]["figures"].as_array().expect("figures").iter().find(|f| f["figure"] == "power_w");
    assert_eq!(power.expect("power")["differs"], true, "{}", loaded[1]);
    let table = said(&output);
    assert!(table.contains("1 differ, 1 unknown") && table.contains("1900*") && table.contains("240*"), "{table}");
    let page = std::fs::read_to_string(&html).expect("the page");
    assert!(page.contains("1900*") && page.contains("<td>differ</td>") && page.contains("<td>unknown</td>"));
    assert!(page.contains("pair 1: SM clock, MHz") && page.contains("pair 3: GPU power, W") && !page.contains("NaN"));
    assert!(page.contains(" %)*") && page.contains(" %)?"), "rounds are marked too");
}

#[test]
fn wrong_arguments_end_with_one_line_that_says_what_to_do() {
    for args in [
        &["run", "--workload", "isolated-0"][..],
        &["run", "--workload", "mixed-8", "--target", "https://example.org"],
        &["run", "--workload", "mixed-8", "--target", "http://127.0.0.1:9"],
        &["run", "--workload", "mixed-8", "--slo", "fast=1"],
        &["sustained", "--target", "http://127.0.0.1:9", "--rate", "0"],
    ] {
        let output = run(args);
        assert!(!output.status.success(), "{args:?}");
        assert!(!said(&output).contains("panicked"), "{args:?}: {}", said(&output));
    }
}

#[test]
fn a_client_that_is_slower_than_expected_is_told_so() {
    let test = ["selftest", "--dialect", "native", "--duration-s", "0.05", "--expect-events-per-s"];
    let output = run(&[&test[..], &["900000000"]].concat());
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("FAIL the client is fast enough: native: "), "{}", said(&output));
    assert!(run(&[&test[..], &["1"]].concat()).status.success());
}
