//! GPU figures stay fresh: docs/evidence.json names the sources that its figures were made with, and goes stale with them. The program
//! that gathers them, tests/evidence.py, is tried against a program that passes, fails and hangs.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use sha2::{Digest, Sha256};

/// Every file under `dir`, sorted by path.
fn files_under(dir: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> = fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            files_under(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// SHA-256 over `path NUL sha256(contents) LF` of every file of kernels/ and src/backend/cuda, in path order.
fn sources_sha256(root: &Path) -> String {
    let mut files = Vec::new();
    for dir in ["kernels", "src/backend/cuda"] {
        files_under(&root.join(dir), &mut files);
    }
    let mut all = Sha256::new();
    for file in &files {
        let name = file.strip_prefix(root).unwrap().to_string_lossy().replace('\\', "/");
        let contents = Sha256::digest(fs::read(file).unwrap());
        all.update(format!("{name}\0{contents:x}\n"));
    }
    format!("{:x}", all.finalize())
}

#[test]
fn gpu_evidence_belongs_to_these_kernels_or_says_that_it_does_not() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("docs/evidence.json")).expect("docs/evidence.json");
    let evidence: serde_json::Value = serde_json::from_str(&text).expect("docs/evidence.json is JSON");
    let now = sources_sha256(root);
    let recorded = evidence["sources_sha256"].as_str().unwrap_or_default();
    let reason = evidence["unverified"].as_str().unwrap_or_default();
    if recorded == now {
        assert!(reason.is_empty(), "the evidence matches the sources, so `unverified` must go");
        return;
    }
    assert!(
        reason.len() >= 20,
        "kernels/ or src/backend/cuda changed (now {now}, evidence of {recorded:?}): measure again, or set `unverified` in \
         docs/evidence.json to the reason"
    );
    println!("1 skipped: GPU evidence is unverified: {reason}");
}

#[test]
fn a_changed_kernel_changes_the_hash() {
    let dir = std::env::temp_dir().join(format!("crucible-evidence-{}", std::process::id()));
    let (kernels, cuda) = (dir.join("kernels"), dir.join("src/backend/cuda"));
    fs::create_dir_all(&kernels).unwrap();
    fs::create_dir_all(&cuda).unwrap();
    fs::write(kernels.join("a.cu"), "one").unwrap();
    fs::write(cuda.join("b.rs"), "two").unwrap();
    let before = sources_sha256(&dir);
    fs::write(kernels.join("a.cu"), "onf").unwrap();
    let after = sources_sha256(&dir);
    fs::remove_dir_all(&dir).unwrap();
    assert_ne!(before, after);
}

/// A program whose `check batch` fails, whose `check paged` hangs with a child, whose benches are unknown, whose other checks pass, the sum
/// of its lines said twice, and whose soak writes its report when it is told to end.
fn pretender(dir: &Path) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = dir.join("pretender");
    let script = format!(
        "#!/bin/sh\ncase \"$1 $2\" in\n\
         'inspect --device') echo 'a device' ;;\n\
         'check batch') echo 'FAIL a bit'; exit 1 ;;\n\
         'check paged') sleep 1000 & echo $! >> '{}'; wait ;;\n\
         'check '*) echo 'Suite q8: seed 1, 2 cases, 30 values, 2 passed, 0 failed'\n\
             echo 'kernels: seed 1, 2 cases, 30 values, 2 passed, 0 failed'; echo 'check: seed 1, 0 failures' ;;\n\
         'load soak') trap 'echo a report so far; exit 2' TERM; sleep 1000 & wait ;;\n\
         *) exit 9 ;;\nesac\n",
        dir.join("children").display()
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn gather(program: &Path, out: &Path, arguments: &[&str]) -> Option<Output> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence.py");
    let mut command = Command::new("python3");
    command.arg(script).arg(program).arg("--out").arg(out).args(["--backend", "cpu", "--quick", "--jobs", "4"]);
    command.args(arguments).output().ok()
}

fn evidence_of(out: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(out.join("evidence.json")).expect("the file")).expect("JSON")
}

/// (job, verdict) of one stage.
fn verdicts(evidence: &serde_json::Value, stage: &str) -> Vec<(String, String)> {
    let stages = evidence["stages"].as_array().expect("stages");
    let stage = stages.iter().find(|s| s["stage"] == stage).expect("the stage");
    let text = |value: &serde_json::Value| value.as_str().expect("text").to_owned();
    stage["jobs"].as_array().expect("jobs").iter().map(|j| (text(&j["job"]), text(&j["verdict"]))).collect()
}

/// The process is gone, or has ended and nobody has asked for its exit code.
fn ended(process: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"));
    stat.map_or(true, |s| s.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z')))
}

#[test]
fn gathering_evidence_goes_on_after_a_failure_and_a_hang_and_writes_both_down() {
    let dir = std::env::temp_dir().join(format!("crucible-gather-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let (program, out) = (pretender(&dir), dir.join("out"));
    let Some(first) = gather(&program, &out, &["--stages", "checks,steps", "--seconds", "10"]) else {
        let _ = writeln!(std::io::stderr(), "skipped 1 check: no python3 to gather evidence with");
        return;
    };
    let said = String::from_utf8_lossy(&[first.stdout, first.stderr].concat()).into_owned();
    assert_eq!(first.status.code(), Some(1), "{said}");
    let evidence = evidence_of(&out);
    assert_eq!(evidence["format"], "crucible-evidence/1");
    assert_eq!(evidence["sources_sha256"], sources_sha256(Path::new(env!("CARGO_MANIFEST_DIR"))));
    let checks = verdicts(&evidence, "checks");
    for (job, verdict) in &checks {
        let expected = match job.split(' ').next() {
            Some("batch") => "failed",
            Some("paged") => "timed out",
            _ => "passed",
        };
        assert_eq!(verdict, expected, "{job}: {said}");
    }
    let count = |expected: &str| checks.iter().filter(|(_, v)| v == expected).count();
    assert_eq!((count("failed"), count("timed out"), count("passed")), (3, 3, 16), "{checks:?}");
    assert!(verdicts(&evidence, "steps").iter().all(|(_, verdict)| verdict == "failed"), "the next stage ran: {said}");
    let jobs = evidence["stages"][0]["jobs"].as_array().unwrap();
    let sampling = jobs.iter().find(|j| j["job"] == "sampling q8").expect("the job");
    let figures = &sampling["figures"];
    assert_eq!((&figures["cases"], &figures["values"], &figures["failed"]), (&2.into(), &30.into(), &0.into()));
    assert!(
        sampling["command"].as_str().is_some_and(|c| c.ends_with("check sampling --profile q8 --backend cpu --quick"))
    );
    assert!(sampling["clocks"].get("sm_mhz").is_some(), "{sampling}");
    let children = fs::read_to_string(dir.join("children")).unwrap();
    assert!(children.lines().count() == 3 && children.lines().all(ended), "a hanging job's children outlived it");

    // A soak that is past its limit may still write what it has.
    let soak = ["--stages", "soak,phases", "--seconds", "2", "--soak-run", "2", "--set", "model.profile=int8"];
    assert_eq!(gather(&program, &out, &soak).expect("python3").status.code(), Some(1));
    let evidence = evidence_of(&out);
    for (stage, job) in [("soak", "soak 2 model.profile=int8"), ("phases", "phases model.profile=int8")] {
        assert_eq!(verdicts(&evidence, stage), [(job.to_owned(), "timed out".to_owned())]);
        let log = fs::read_to_string(out.join(stage).join(format!("{}.log", job.replace([' ', '='], "-")))).unwrap();
        assert_eq!(log.trim(), "a report so far");
    }

    // A call without time runs nothing and says so; what earlier calls found stays.
    let late = gather(&program, &out, &["--stages", "checks", "--only", "pressure", "--within", "0"]).expect("python3");
    assert_eq!(late.status.code(), Some(1));
    let after = verdicts(&evidence_of(&out), "checks");
    assert_eq!(after.len(), checks.len());
    assert!(after.iter().all(|(job, v)| job.starts_with("pressure") == (v == "not run")), "{after:?}");
    assert_eq!(verdicts(&evidence_of(&out), "steps").len(), 2);

    // Another program's evidence is not mixed with this one's.
    fs::OpenOptions::new().append(true).open(&program).unwrap().write_all(b"# changed\n").unwrap();
    let again = gather(&program, &out, &["--stages", "checks", "--only", "pressure q8"]).expect("python3");
    assert_eq!(again.status.code(), Some(0));
    assert_eq!(verdicts(&evidence_of(&out), "checks"), [("pressure q8".to_owned(), "passed".to_owned())]);
    fs::remove_dir_all(&dir).unwrap();
}
