//! Every mutant of tests/mutations still applies to the code it was made for, and every broken kernel compiles. Running them takes
//! minutes or a GPU: tests/mutations/run.py, tests/mutations/kernels/run.py.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crucible::backend::cuda::program::{Kind, Program};
use crucible::check::compile::compile;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Past the capture of the test harness: a skip must be seen.
fn skip(what: &str) {
    let _ = writeln!(std::io::stderr(), "skipped 1 check: {what}");
}

fn patches(folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join(folder)).unwrap();
    let paths = entries.map(|e| e.unwrap().path());
    let mut patches: Vec<PathBuf> = paths.filter(|p| p.extension().is_some_and(|e| e == "patch")).collect();
    patches.sort();
    patches
}

fn has_git() -> bool {
    Command::new("git").arg("--version").output().is_ok()
}

fn applies(folder: &str, keys: [&[&str]; 2], least: usize) {
    if !has_git() {
        return skip("no git to apply mutants with");
    }
    let patches = patches(folder);
    for path in &patches {
        let text = std::fs::read_to_string(path).unwrap();
        for key in keys {
            let named = text.lines().any(|l| key.iter().any(|k| l.starts_with(k)));
            assert!(named, "{}: no line `{}…`", path.display(), key.join("…` or `"));
        }
        let applies = Command::new("git").current_dir(root()).args(["apply", "--check"]).arg(path).output().unwrap();
        assert!(applies.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&applies.stderr));
    }
    assert!(patches.len() >= least, "{} mutants in {folder}, at least {least} are promised", patches.len());
}

#[test]
fn every_mutant_still_applies_and_names_its_test() {
    applies("tests/mutations", [&["invariant: "], &["test: ", "check: "]], 20);
}

#[test]
fn every_broken_kernel_still_applies_and_names_its_check() {
    applies("tests/mutations/kernels", [&["breaks: "], &["check: "]], 12);
}

/// Programs that are made of a file; of a header one that includes it will do.
fn programs_of(file: &str) -> Vec<Program> {
    let all = Program::of_model(&Kind::ALL, 64);
    let users = |file: &str| all.iter().copied().filter(|p| p.file() == file).collect::<Vec<_>>();
    match file {
        "attention.cuh" => vec![Program::AttendPrefill { head_dim: 64 }],
        "common.cuh" => vec![Program::Rows, Program::LinearTile(Kind::F32), Program::AttendPrefill { head_dim: 64 }],
        "linear.cuh" => users("linear_rows_q8.cu"),
        file => users(file),
    }
}

#[test]
fn every_broken_kernel_compiles() {
    let wheel = root().join("target/nvrtc-13.0");
    if !has_git() || !wheel.join("nvidia").is_dir() {
        return skip("broken kernels were not compiled: no NVRTC under target/nvrtc-13.0 (the gate fetches it)");
    }
    for patch in patches("tests/mutations/kernels") {
        let scratch = std::env::temp_dir().join(format!("crucible-kernels-{}", std::process::id()));
        std::fs::create_dir_all(scratch.join("kernels")).unwrap();
        for entry in std::fs::read_dir(root().join("kernels")).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, scratch.join("kernels").join(path.file_name().unwrap())).unwrap();
        }
        let applied = Command::new("git").current_dir(&scratch).args(["apply"]).arg(&patch).output().unwrap();
        assert!(applied.status.success(), "{}", patch.display());
        let text = std::fs::read_to_string(&patch).unwrap();
        let files = text.lines().filter_map(|l| l.strip_prefix("+++ b/kernels/"));
        let programs: Vec<Program> = files.flat_map(programs_of).collect();
        assert!(!programs.is_empty(), "{} changes no program", patch.display());
        let kernels = scratch.join("kernels");
        let report = compile(Some(&wheel), Some(&kernels), &["sm_90a".to_string()], &programs);
        std::fs::remove_dir_all(&scratch).unwrap();
        report.unwrap_or_else(|e| panic!("{}: {e}", patch.display()));
    }
}
