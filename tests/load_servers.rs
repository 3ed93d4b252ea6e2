//! The load generator and the servers that it starts: what answers is what was started, nothing that was measured is lost, and nothing that
//! was started is left.

mod load_support;

use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use load_support::{
    counted, crucible, described, failed_checks, folder, is_silent, json, run, said, signal, stub, text, until_counted,
};

fn begun(args: &[&str]) -> Child {
    crucible(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the generator starts")
}

fn ended(child: Child) -> Output {
    child.wait_with_output().expect("its end")
}

/// A comparison of two files, in rounds of one short workload.
fn ab<'a>(a: &'a str, b: &'a str, logs: &'a str) -> Vec<&'a str> {
    let rounds = ["--warmups", "0", "--trials", "2", "--pairs", "2", "--logs", logs];
    [&["run", "--workload", "tiny-4x1", "--ab", a, b][..], &rounds].concat()
}

#[test]
fn a_server_that_someone_else_answers_for_or_that_ends_is_not_measured() {
    let folder = folder("not-started");
    let logs = folder.join("logs");
    let other = stub(&[]);
    let taken = folder.join("taken.toml");
    std::fs::write(&taken, format!("command = ['/bin/false']\nurl = '{}'\n", other.url)).expect("written");
    let output = run(&ab(text(&taken), text(&taken), text(&logs)));
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("answers already"), "{}", said(&output));
    assert_eq!(counted(&other.url, "accepted_requests"), Some(0), "nobody else was asked");

    let gone = described(&folder, "gone", "", Some("echo no such weights; exit 7"));
    let output = run(&ab(&gone.file, &gone.file, text(&logs)));
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let told = said(&output);
    assert!(told.contains("ended before it was ready (exit status: 7)") && told.contains("no such weights"), "{told}");
    assert!(!told.contains("not ready within"), "{told}");
}

#[test]
fn rounds_that_were_measured_before_a_start_failed_are_kept_and_the_failure_is_a_check() {
    let folder = folder("kept");
    let (out, html, logs, once) =
        (folder.join("ab.json"), folder.join("ab.html"), folder.join("logs"), folder.join("once"));
    let _ = std::fs::remove_file(&once);
    let good = described(&folder, "good", "", None);
    let line = format!("test -e {0} && exit 7; touch {0}; exec $STUB", text(&once));
    let bad = described(&folder, "bad", "", Some(&line));
    let files = ["--out", text(&out), "--html", text(&html)];
    let output = run(&[&ab(&good.file, &bad.file, text(&logs))[..], &files].concat());
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let report = json(&out);
    let runs = report["runs"].as_array().expect("runs");
    assert_eq!(runs.iter().filter_map(|r| r["variant"].as_str()).collect::<Vec<_>>(), ["good", "bad"]);
    assert_eq!(report["changes"][0]["rounds"].as_array().map(Vec::len), Some(1));
    let failed = failed_checks(&report);
    assert_eq!((failed.len(), failed[0].0.as_str()), (1, "every server is started and measured"), "{failed:?}");
    assert!(failed[0].1.starts_with("2 of 4, then pair 2: bad ended") && report["passed"] == false, "{failed:?}");
    let page = std::fs::read_to_string(&html).expect("the page");
    assert!(page.contains("exit status: 7") && page.contains("class=\"fail\""));
}

#[test]
fn a_comparison_fails_when_requests_fail_or_nothing_is_answered() {
    let folder = folder("ab-checks");
    let (out, logs) = (folder.join("ab.json"), folder.join("logs"));
    let good = described(&folder, "good", "", None);
    for (name, arguments, check) in [
        ("broken", "--break-every 5", "no request fails"),
        ("full", "--refuse-every 2", "requests complete, with tokens"),
    ] {
        let bad = described(&folder, name, arguments, None);
        let mut args = ab(&good.file, &bad.file, text(&logs));
        if name == "full" {
            // One request, after the one that asks what the server takes.
            args[2] = "tiny-1x1";
            *args.iter_mut().find(|a| **a == "2").expect("the trials") = "1";
        }
        let output = run(&[&args[..], &["--out", text(&out)]].concat());
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        let failed = failed_checks(&json(&out));
        assert!(failed.iter().any(|f| f.0 == check && f.1.contains(&format!("{name}, pair "))), "{failed:?}");
    }
}

#[test]
fn every_flag_of_a_comparison_does_something_or_is_refused() {
    let folder = folder("ab-flags");
    let (out, logs, oracle) = (folder.join("ab.json"), folder.join("logs"), folder.join("oracle.json"));
    let html = folder.join("ab.html");
    let (a, b) = (described(&folder, "a", "", None), described(&folder, "b", "", Some("exec $STUB # -k s3cret")));
    let common = ab(&a.file, &b.file, text(&logs));
    let lone = stub(&[]);
    let dialect = ["--dialect", "openai-completions", "--model", "stub"];
    let recorded = ["--workload", "tiny-4x1", "--warmups", "0", "--trials", "2", "--target", &lone.url];
    let output = run(&[&["record-oracle", "--out", text(&oracle)], &recorded[..], &dialect].concat());
    assert!(output.status.success(), "{}", said(&output));
    let all = ["--capacity", "--slo", "ttft_p95_ms=60000", "--verify", text(&oracle), "--api-key", "s3cret"];
    let output = run(&[&common[..], &dialect, &all, &["--out", text(&out), "--html", text(&html)]].concat());
    assert!(output.status.success(), "{}", said(&output));
    let report = json(&out);
    let run_of = &report["runs"][0];
    assert!(run_of["target"]["dialects"]["openai-completions"].is_object(), "{}", run_of["target"]);
    assert_eq!((&run_of["target"]["model"], &run_of["verification"]["compared"]), (&"stub".into(), &8.into()));
    assert!(report["client"]["busiest_percent"].as_f64() > Some(0.0), "{}", report["client"]);
    let names: Vec<&str> =
        report["checks"].as_array().expect("checks").iter().filter_map(|c| c["name"].as_str()).collect();
    assert!(
        names.contains(&"tiny-4x1: ttft_p95_ms=60000") && names.contains(&"every output equals the oracle"),
        "{names:?}"
    );
    for file in [&out, &html] {
        let told = std::fs::read_to_string(file).expect("the report");
        assert!(told.contains("# -k (hidden)") && !told.contains("s3cret"), "{file:?}: {told}");
    }

    let missed = run(&[&common[..], &["--slo", "e2e_p50_ms=0.000001"]].concat());
    assert_eq!(missed.status.code(), Some(1), "{}", said(&missed));
    let both = run(&[&common[..], &["--target", &lone.url]].concat());
    assert!(!both.status.success() && said(&both).contains("cannot be used with"), "{}", said(&both));
    let program = run(&[&common[..], &["--binary", "/bin/true"]].concat());
    let why = "--binary belongs to configurations, and a has a command";
    assert!(!program.status.success() && said(&program).contains(why), "{}", said(&program));
    let mixed = ab("config/cpu-test.toml", &b.file, text(&logs));
    let programs = run(&[&mixed[..], &["--binary", "/bin/true", "--binary", "/bin/true"]].concat());
    assert!(!programs.status.success() && said(&programs).contains("and b has a command"), "{}", said(&programs));
    let own = folder.join("own.toml");
    let named = std::fs::read_to_string(&a.file).expect("a file") + "dialect = 'native'\n";
    std::fs::write(&own, named).expect("written");
    let both_named = ab(text(&own), text(&own), text(&logs));
    let spoken = run(&[&both_named[..], &["--dialect", "openai-chat"]].concat());
    let why = "--dialect belongs to files that name none, and both do";
    assert!(!spoken.status.success() && said(&spoken).contains(why), "{}", said(&spoken));
    let alone = run(&["run", "--workload", "tiny-4x1", "--target", &lone.url, "--pairs", "2"]);
    assert!(!alone.status.success() && said(&alone).contains("give --ab"), "{}", said(&alone));
    let sweep = ["sweep", "--config", "config/cpu-test.toml", "--workload", "tiny-4x1"];
    let twice = run(&[&sweep[..], &["--budgets", "64,64", "--caps", "off"]].concat());
    assert!(!twice.status.success() && said(&twice).contains("64/off is given twice"), "{}", said(&twice));
}

#[test]
fn a_signal_ends_a_run_with_what_was_measured_and_says_so() {
    for (name, arguments, signal_name) in [
        ("run", &["run", "--workload", "tiny-4x1", "--warmups", "0", "--trials", "10000"][..], "-INT"),
        ("sustained", &["sustained", "--rate", "100", "--duration-s", "300", "--output-tokens", "4"], "-TERM"),
    ] {
        let folder = folder(&format!("signal-{name}"));
        let (out, html) = (folder.join("report.json"), folder.join("report.html"));
        let server = stub(&["--gap-us", "1000"]);
        let files = ["--target", &server.url, "--out", text(&out), "--html", text(&html)];
        let mut child = begun(&[arguments, &files].concat());
        until_counted(&mut child, &server.url, "completed_requests", 50);
        signal(child.id(), signal_name);
        let output = ended(child);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        let report = json(&out);
        let failed = failed_checks(&report);
        let cut = ("the measurement ran to its end".to_owned(), format!("cut short: SIG{} came", &signal_name[1..]));
        assert_eq!(failed, [cut], "{}", said(&output));
        let summary = &report["workloads"][0]["summary"];
        assert!(summary["counts"]["completed"].as_u64() >= Some(20), "{summary}");
        assert!(said(&output).contains("FAIL the measurement ran to its end"), "{}", said(&output));
        assert!(std::fs::read_to_string(&html).expect("the page").contains("cut short"));
    }
}

#[test]
fn a_signal_ends_the_servers_that_were_started_and_a_later_one_kills_them() {
    let folder = folder("signal-ab");
    let (out, logs) = (folder.join("ab.json"), folder.join("logs"));
    let (a, b) = (described(&folder, "a", "", None), described(&folder, "b", "--gap-us 500000", None));
    let mut args = ab(&a.file, &b.file, text(&logs));
    args.extend(["--out", text(&out)]);
    let at = args.iter().position(|a| *a == "tiny-4x1").expect("the workload");
    args[at] = "long-8x8";
    let mut child = begun(&args);
    until_counted(&mut child, &b.url, "accepted_requests", 2);
    signal(child.id(), "-TERM");
    let output = ended(child);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(is_silent(&a.url) && is_silent(&b.url), "no server is left");
    let report = json(&out);
    assert_eq!(report["runs"][0]["variant"], "a", "what was measured is kept: {}", said(&output));
    let failed = failed_checks(&report);
    assert!(
        failed.iter().any(|f| f.0 == "every server is started and measured" && f.1.contains("SIGTERM")),
        "{failed:?}"
    );

    // A server that does not listen to SIGTERM; its children inherit that.
    let deaf = described(&folder, "deaf", "--gap-us 500000", Some("trap \"\" TERM; $STUB & wait"));
    let mut child = begun(&ab(&deaf.file, &a.file, text(&logs)));
    until_counted(&mut child, &deaf.url, "accepted_requests", 2);
    signal(child.id(), "-INT");
    // The first has been taken when the connections of the running requests are closed.
    until_counted(&mut child, &deaf.url, "cancelled_requests", 1);
    // Kernel and shell both tell of a closed terminal: no impatience.
    signal(child.id(), "-HUP");
    std::thread::sleep(Duration::from_millis(1_100));
    assert!(child.try_wait().expect("a child").is_none(), "a hang-up hastens nothing");
    signal(child.id(), "-INT");
    let output = ended(child);
    assert_eq!(output.status.code(), Some(130), "{}", said(&output));
    while !is_silent(&deaf.url) {
        std::thread::yield_now(); // the kernel ends what was killed
    }
}

#[test]
fn a_server_that_dies_while_it_is_measured_is_asked_no_more_and_compared_with_none() {
    let number = folder("dies").join("number");
    // The answer that the death cut short may count where the started shell outlives what answered; nothing after it does.
    dies(&format!("echo $$ > {}; exec $STUB", text(&number)), "(signal: 9", 0);
    dies(&format!("$STUB & echo $! > {}; wait; sleep 0.1", text(&number)), "(exit status: 0", 1);
}

fn dies(line: &str, how: &str, failed_most: u64) {
    let folder = folder("dies");
    let (out, logs, number) = (folder.join("ab.json"), folder.join("logs"), folder.join("number"));
    let (a, b) = (described(&folder, "a", "", None), described(&folder, "b", "--gap-us 20000", Some(line)));
    let mut args = ab(&a.file, &b.file, text(&logs));
    args.extend(["--out", text(&out)]);
    *args.iter_mut().find(|a| **a == "2").expect("the trials") = "5000";
    *args.iter_mut().find(|a| **a == "tiny-4x1").expect("the workload") = "isolated-8";
    let mut child = begun(&args);
    until_counted(&mut child, &b.url, "accepted_requests", 3);
    let process = std::fs::read_to_string(&number).expect("its number").trim().parse().expect("a number");
    signal(process, "-KILL");
    let output = ended(child);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let report = json(&out);
    assert_eq!((&report["runs"][1]["variant"], &report["runs"][1]["cut_short"]), (&"b".into(), &true.into()));
    let rounds: Vec<_> = report["changes"].as_array().expect("changes").iter().map(|c| c["rounds"].clone()).collect();
    assert!(rounds.iter().all(|r| r.as_array().is_some_and(Vec::is_empty)), "{rounds:?}");
    let failed = failed_checks(&report);
    let cause = format!("1 of 4, then b ended while it was measured {how}");
    assert!(failed[0].0 == "every server is started and measured" && failed[0].1.starts_with(&cause), "{failed:?}");
    let counts = &report["runs"][1]["workloads"][0]["summary"]["counts"];
    let of = |name: &str| counts[name].as_u64().expect("a count");
    assert!(of("completed") >= 1 && of("failed") <= failed_most, "what nobody could answer is not counted: {counts}");
}

#[test]
fn a_server_that_dies_under_pressure_cuts_the_run_short() {
    let folder = folder("dies-pressure");
    let (out, logs, there) = (folder.join("x.json"), folder.join("logs"), folder.join("there"));
    let _ = std::fs::remove_file(&there);
    // The stub in the place of the server: the last argument is server.port=N.
    let program = folder.join("program");
    let script = format!(
        "#!/bin/sh\nfor last; do :; done\nport=${{last#server.port=}}\necho \"$$ $port\" > {0}.part; mv {0}.part {0}\n\
         exec {1} load stub --listen 127.0.0.1:$port --gap-us 500000\n",
        text(&there),
        env!("CARGO_BIN_EXE_crucible")
    );
    std::fs::write(&program, script).expect("written");
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("a program");
    let own = ["pressure", "--config", "config/cpu-test.toml", "--binary", text(&program), "--expect-pages", "0"];
    let mut child = begun(&[&own[..], &["--logs", text(&logs), "--out", text(&out)]].concat());
    while !there.exists() {
        assert!(child.try_wait().expect("its state").is_none(), "{}", said(&ended(child)));
        std::thread::yield_now();
    }
    let there = std::fs::read_to_string(&there).expect("number and port");
    let (process, port) = there.trim().split_once(' ').expect("both");
    until_counted(&mut child, &format!("http://127.0.0.1:{port}"), "accepted_requests", 10);
    signal(process.parse().expect("a number"), "-KILL");
    let output = ended(child);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let failed = failed_checks(&json(&out));
    let cut = "cut short: pressure ended while it was measured (signal: 9";
    let end = failed.iter().find(|f| f.0 == "the measurement ran to its end");
    assert!(end.is_some_and(|f| f.1.starts_with(cut)), "{failed:?}");
}

#[test]
fn servers_are_stopped_where_there_is_no_program_to_do_it() {
    let folder = folder("no-kill");
    let logs = folder.join("logs");
    let (a, b) = (described(&folder, "a", "", None), described(&folder, "b", "", None));
    let output = crucible(&ab(&a.file, &b.file, text(&logs))).env("PATH", "/nowhere").output().expect("its end");
    assert!(output.status.success(), "{}", said(&output));
    assert!(is_silent(&a.url) && is_silent(&b.url));
}

#[test]
fn servers_that_are_not_asked_the_same_are_not_compared_in_silence() {
    let folder = folder("forms");
    let (out, logs) = (folder.join("ab.json"), folder.join("logs"));
    let only = "--only openai-completions";
    let a = described(&folder, "a", only, None);
    let b = described(&folder, "b", &format!("{only} --text-prompts"), None);
    let dialect = ["--dialect", "openai-completions", "--out", text(&out)];
    let output = run(&[&ab(&a.file, &b.file, text(&logs))[..], &dialect].concat());
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("note: openai-completions: token ids are not taken"), "{}", said(&output));
    let failed = failed_checks(&json(&out));
    assert_eq!((failed.len(), failed[0].0.as_str()), (1, "every server is asked the same"), "{failed:?}");
    assert!(failed[0].1.starts_with("a: everything, b: token ids are not taken"), "{failed:?}");

    // Of a pattern, what neither speaks is left out and said.
    let mut args = ab(&a.file, &a.file, text(&logs));
    args[2] = "tiny-*,shared-*";
    let output = run(&[&args[..], &dialect].concat());
    assert!(output.status.success(), "{}", said(&output));
    let left_out = "skipped shared-packed-batch: the target does not take native requests";
    assert!(said(&output).contains(left_out), "{}", said(&output));
    assert_eq!(json(&out)["runs"][0]["skipped"], serde_json::json!(["shared-packed-batch"]));
    args[2] = "tiny-4x1,shared-packed-batch";
    let output = run(&[&args[..], &dialect].concat());
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let failed = failed_checks(&json(&out));
    let why = "a is not measured: shared-packed-batch cannot be run: the target does not take native requests";
    assert!(failed[0].1.contains(why), "named in full it is no matter of skipping: {failed:?}");
}

/// An oracle of two rounds of `tiny-4x1`, as the stub answers in this dialect.
fn oracle_of(folder: &Path, dialect: &str) -> String {
    let (path, lone) = (folder.join(format!("{dialect}.json")), stub(&[]));
    let record = ["--workload", "tiny-4x1", "--warmups", "0", "--trials", "2", "--target", &lone.url];
    let output = run(&[&["record-oracle", "--out", text(&path), "--dialect", dialect], &record[..]].concat());
    assert!(output.status.success(), "{}", said(&output));
    text(&path).to_owned()
}

#[test]
fn an_oracle_that_cannot_judge_the_last_server_is_refused_before_the_first_is_started() {
    let folder = folder("ab-oracle");
    let (out, logs) = (folder.join("ab.json"), folder.join("logs"));
    let _ = (std::fs::remove_dir_all(&logs), std::fs::remove_file(&out));
    let (a, native) = (described(&folder, "a", "", None), oracle_of(&folder, "native"));
    let other = described(&folder, "other", "", None).file;
    let spoken = std::fs::read_to_string(&other).expect("a file") + "dialect = 'openai-chat'\n";
    std::fs::write(&other, spoken).expect("written");
    let (old, missing) = (folder.join("old.json"), folder.join("missing.json"));
    let text_of =
        std::fs::read_to_string(&native).expect("an oracle").replace("crucible-oracle/1", "crucible-oracle/0");
    std::fs::write(&old, text_of).expect("written");
    let verify = |last: &str, oracle: &str, more: &[&str]| {
        let mut args = ab(&a.file, last, text(&logs));
        if let Some(at) = more.first().and_then(|flag| args.iter().position(|a| a == flag)) {
            args.drain(at..at + 2);
        }
        run(&[&args[..], more, &["--verify", oracle, "--out", text(&out)]].concat())
    };
    for (last, oracle, more, why) in [
        (
            a.file.as_str(),
            native.as_str(),
            &["--seed", "2"][..],
            "a is not measured: the oracle was recorded with seed 1",
        ),
        (&a.file, &native, &["--trials", "3"], "does not know 4 of 12 requests"),
        (&a.file, &native, &["--model", "n"], "recorded with model stub, this run has n"),
        ("config/cpu-test.toml", &native, &[], "cpu-test is not measured: the oracle was recorded with model stub"),
        (&other, &native, &[], "other is not measured: the oracle does not know 8 of 8 requests"),
        (&a.file, text(&old), &[], "is no oracle of this version: its format is crucible-oracle/0"),
        (&a.file, text(&missing), &[], "cannot read the oracle"),
    ] {
        let output = verify(last, oracle, more);
        assert!(!output.status.success() && said(&output).contains(why), "{why}: {}", said(&output));
        let started = std::fs::read_dir(&logs).map_or(0, Iterator::count);
        assert!(started == 0 && !out.exists(), "{why}: nothing was started");
    }
    let pressure = ["pressure", "--config", "config/cpu-test.toml", "--logs", text(&logs), "--verify", text(&missing)];
    let output = run(&pressure);
    assert!(!output.status.success() && said(&output).contains("cannot read the oracle"), "{}", said(&output));
    assert_eq!(std::fs::read_dir(&logs).map_or(0, Iterator::count), 0);
}

#[test]
fn an_oracle_that_only_a_start_can_refuse_costs_no_round_that_was_measured() {
    let folder = folder("ab-oracle-late");
    let (out, logs) = (folder.join("ab.json"), folder.join("logs"));
    let ids = oracle_of(&folder, "openai-completions");
    let (a, b) = (described(&folder, "a", "", None), described(&folder, "b", "--text-prompts", None));
    let more = ["--dialect", "openai-completions", "--verify", &ids, "--out", text(&out)];
    // What a server may be unable to be asked for is not wanted of the oracle before it is known.
    let mut skipping = ab(&a.file, &a.file, text(&logs));
    skipping[2] = "tiny-4x1,shared-*";
    let output = run(&[&skipping[..], &more].concat());
    assert!(output.status.success(), "{}", said(&output));
    let output = run(&[&ab(&a.file, &b.file, text(&logs))[..], &more].concat());
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let report = json(&out);
    assert_eq!(report["runs"].as_array().map(Vec::len), Some(1), "the first was measured");
    let failed = failed_checks(&report);
    assert!(failed[0].1.contains("b is not measured: the oracle does not know 8 of 8 requests"), "{failed:?}");
}

#[test]
fn what_is_wrong_with_a_comparison_is_said_before_a_server_is_started() {
    let folder = folder("ab-first");
    let logs = folder.join("logs");
    let _ = std::fs::remove_dir_all(&logs);
    let a = described(&folder, "a", "", None);
    let bad = folder.join("bad.toml");
    std::fs::write(&bad, "command = ['/bin/false']\nurl = 'ftp://x'\n").expect("written");
    let sweep = [
        "sweep",
        "--config",
        "config/cpu-test.toml",
        "--workload",
        "tiny-4x1",
        "--budgets",
        "64",
        "--logs",
        text(&logs),
    ];
    let sweep = |more: &[&'static str]| -> Vec<&str> { [&sweep[..], more].concat() };
    for (args, why) in [
        (ab(&a.file, text(&bad), text(&logs)), "bad is not measured: ftp://x is no target"),
        (
            [&ab(&a.file, &a.file, text(&logs))[..], &["--nvidia-smi", "/nowhere/smi"]].concat(),
            "cannot start /nowhere/smi",
        ),
        (ab(&a.file, &a.file, "/proc/x"), "cannot write /proc/x: "),
        (sweep(&["--caps", "off,some"]), "prefill.chunk_cap"),
        (sweep(&["--caps", "off,65"]), "prefill.chunk_cap is 65, above prefill.token_budget (64)"),
        (sweep(&["--caps", "off,32", "--set", "prefill.token_budget=8"]), "prefill.token_budget is what a sweep sets"),
        (sweep(&["--caps", "off,32", "--set", "server.port=5"]), "server.port is chosen for it"),
    ] {
        let output = run(&args);
        assert!(!output.status.success() && said(&output).contains(why), "{why}: {}", said(&output));
        let started = std::fs::read_dir(&logs).map_or(0, Iterator::count);
        assert_eq!(started, 0, "{why}");
    }
}

#[test]
fn files_that_cannot_be_written_are_refused_before_anything_is_asked() {
    let folder = folder("refused-files");
    let server = stub(&[]);
    let missing = folder.join("missing").join("x.json");
    let (here, logs) = (folder.join("x.json"), folder.join("logs"));
    let run_ = ["run", "--workload", "tiny-4x1", "--target", &server.url];
    let record = ["record-oracle", "--workload", "tiny-4x1", "--target", &server.url];
    let soak = ["soak", "--config", "config/cpu-test.toml", "--logs", text(&logs)];
    let wrong: [(&[&str], Vec<&str>); 6] = [
        (&run_, vec!["--out", text(&missing)]),
        (&run_, vec!["--html", text(&missing)]),
        (&run_, vec!["--out", text(&folder)]),
        (&run_, vec!["--out", text(&here), "--html", text(&here)]),
        (&record, vec!["--out", text(&missing)]),
        (&soak, vec!["--oracle-out", text(&missing)]),
    ];
    for (command, files) in wrong {
        let output = run(&[command, &files].concat());
        assert!(!output.status.success() && said(&output).contains("cannot write"), "{files:?}: {}", said(&output));
        assert!(output.stdout.is_empty(), "{}", said(&output));
    }
    assert_eq!(counted(&server.url, "accepted_requests"), Some(0));
    assert!(!logs.exists() && !here.exists(), "nothing was started or written");
}

#[test]
fn one_file_that_cannot_be_written_at_the_end_costs_neither_the_table_nor_the_other() {
    let folder = folder("lost-file");
    let (out, there) = (folder.join("x.json"), folder.join("there"));
    std::fs::create_dir_all(&there).expect("a folder");
    let server = stub(&["--gap-us", "5000"]);
    let html = there.join("x.html");
    let run_ = ["run", "--workload", "isolated-8", "--target", &server.url, "--warmups", "0", "--trials", "1"];
    let mut child = begun(&[&run_[..], &["--out", text(&out), "--html", text(&html)]].concat());
    until_counted(&mut child, &server.url, "accepted_requests", 2);
    std::fs::remove_dir_all(&there).expect("ours");
    let output = ended(child);
    assert!(!output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("isolated-8") && said(&output).contains("x.html: "), "{}", said(&output));
    assert_eq!(json(&out)["passed"], true);
}

#[test]
fn a_fifo_stays_a_fifo_and_gets_the_whole_report() {
    use std::os::unix::fs::FileTypeExt;
    let folder = folder("fifo");
    let fifo = folder.join("report");
    let _ = std::fs::remove_file(&fifo);
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo");
    assert!(made.success());
    let server = stub(&[]);
    let child = begun(&["run", "--workload", "tiny-4x1", "--target", &server.url, "--out", text(&fifo)]);
    assert_eq!(json(&fifo)["format"], "crucible-load-report/1");
    assert!(ended(child).status.success());
    assert!(std::fs::metadata(&fifo).expect("it is there").file_type().is_fifo());
}

#[test]
fn a_report_names_the_commit_that_the_program_was_built_from_wherever_it_runs() {
    let folder = folder("elsewhere");
    let out = folder.join("x.json");
    let server = stub(&[]);
    let at = |place: &Path| {
        let args = ["run", "--workload", "tiny-4x1", "--target", &server.url, "--out", text(&out)];
        let output = crucible(&args).current_dir(place).output().expect("the generator runs");
        assert!(output.status.success(), "{}", said(&output));
        json(&out)["client"]["commit"].clone()
    };
    assert_eq!(at(Path::new("/")), at(Path::new(env!("CARGO_MANIFEST_DIR"))));
}

#[test]
fn pressure_is_put_only_on_the_pool_that_it_was_made_for() {
    let server = stub(&[]);
    let wrong = run(&["pressure", "--target", &server.url]);
    assert!(!wrong.status.success() && said(&wrong).contains("give --config"), "{}", said(&wrong));
    let folder = folder("pressure");
    let (out, logs) = (folder.join("x.json"), folder.join("logs"));
    let own = ["pressure", "--config", "config/cpu-test.toml", "--token-range", "1..300", "--logs", text(&logs)];
    let output = run(&[&own[..], &["--out", text(&out)]].concat());
    assert!(output.status.success(), "{}", said(&output));
    let report = json(&out);
    assert_eq!(report["target"]["health"]["kv_pages"], 32);
    assert_eq!(report["options"]["server"]["config"]["limits.max_queue"], 4);
}
