//! The official Python packages of both dialects, unmodified, against the real binary with the real model (tests/sdk/).
//!
//! The packages live in a virtual environment that this test makes under target/, at the versions of tests/sdk/requirements.txt.
//! Where Python, pip or the package index is missing, the checks are skipped visibly, with their count.

mod common;
mod http_support;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use crucible::model::pull::sha256;
use http_support::binary::Binary;
use serde::Deserialize;
use serde_json::json;

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sdk");
const KEY: &str = "a-key-of-this-test";

/// What a suite says of itself on its last line.
#[derive(Debug, Deserialize, PartialEq)]
struct Counts {
    ran: usize,
    failed: usize,
    skipped: usize,
}

fn run(command: &mut Command) -> Result<(), String> {
    let Output { status, stderr, .. } = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{command:?}: {}", String::from_utf8_lossy(&stderr))) }
}

/// The interpreter of the virtual environment, made once for these requirements; `None` where it cannot be had.
fn python() -> Option<&'static PathBuf> {
    static PYTHON: OnceLock<Option<PathBuf>> = OnceLock::new();
    PYTHON.get_or_init(|| make_environment().map_err(|error| eprintln!("{error}")).ok()).as_ref()
}

fn make_environment() -> Result<PathBuf, String> {
    let requirements = Path::new(SOURCE).join("requirements.txt");
    let base = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sdk");
    fs::create_dir_all(&base).expect("the target folder is writable");
    let lock = File::create(base.join("lock")).expect("the target folder is writable");
    lock.lock().expect("the lock can be taken");
    let key = sha256(&requirements).expect("the file is in the repository");
    let venv = base.join(&key[..12]);
    let (python, done) = (venv.join("bin").join("python"), venv.join("complete"));
    if done.exists() {
        return Ok(python);
    }
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"];
    run(Command::new(&python).args(install).arg(&requirements))?;
    File::create(done).expect("the target folder is writable");
    Ok(python)
}

/// The servers that a suite talks to.
struct Servers {
    open: Binary,
    keyed: Binary,
    tight: Binary,
    doomed: Binary,
}

impl Servers {
    fn start() -> Self {
        let model = format!("model.path=\"{}\"", common::default_model().display());
        let start = |overrides: &[&str]| {
            Binary::start("config/crucible.toml", &[&[model.as_str(), "executor.backend=cpu"], overrides].concat())
        };
        let key = format!("server.api_key={KEY}");
        Self {
            open: start(&[]),
            keyed: start(&[&key]),
            tight: start(&["limits.max_batch=1", "limits.max_queue=1", "server.body_limit_bytes=16384"]),
            // No step over a long prompt is done in ten milliseconds: its engine dies of the first such request.
            doomed: start(&["executor.step_timeout_ms=10", "server.fatal_linger_ms=60000"]),
        }
    }

    fn targets(&self) -> String {
        let url = |server: &Binary| format!("http://{}", server.address);
        let Self { open, keyed, tight, doomed } = self;
        let targets = json!({
            "open": url(open), "keyed": url(keyed), "tight": url(tight), "doomed": url(doomed), "key": KEY,
        });
        targets.to_string()
    }
}

/// Runs a suite of so many checks.
fn check(suite: &str, checks: usize) {
    let Some(python) = python() else {
        // Past the capture of the test harness: a skip must be seen.
        let _ = writeln!(
            std::io::stderr(),
            "skipped {checks} checks of {suite}: they need python3 with venv, pip and a package index"
        );
        return;
    };
    let servers = Servers::start();
    let mut command = Command::new(python);
    command.arg(Path::new(SOURCE).join("run.py")).args([suite, &servers.targets()]);
    // The packages take addresses, keys and proxies from the environment; these servers are named by the test alone.
    for (name, _) in std::env::vars().filter(|(name, _)| foreign(name)) {
        command.env_remove(name);
    }
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sdk");
    command.env("HOME", &home).env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::null());
    let output = command.output().expect("the interpreter runs");
    let report = String::from_utf8_lossy(&output.stderr);
    let said = String::from_utf8_lossy(&output.stdout);
    let counts: Counts = said
        .lines()
        .last()
        .and_then(|line| serde_json::from_str(line).ok())
        .unwrap_or_else(|| panic!("{suite} ended with {} and no counts:\n{report}", output.status));
    assert_eq!(counts, Counts { ran: checks, failed: 0, skipped: 0 }, "{report}");
    let _ = writeln!(std::io::stderr(), "{suite}: {checks} checks passed");
}

fn foreign(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    ["OPENAI_", "ANTHROPIC_"].iter().any(|prefix| name.starts_with(prefix)) || name.ends_with("_PROXY")
}

#[test]
fn the_openai_package_is_served_as_it_documents() {
    check("openai_suite", 56);
}

#[test]
fn the_anthropic_package_is_served_as_it_documents() {
    check("anthropic_suite", 38);
}

#[test]
fn both_packages_get_the_same_text_for_the_same_prompt() {
    check("agreement_suite", 6);
}
