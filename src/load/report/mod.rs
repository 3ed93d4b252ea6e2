//! The report of a run: one value, written as JSON (docs/load.md describes every field), as a table on the terminal and as one HTML
//! page that needs nothing else.

pub mod comparison;
mod devices;
pub mod html;
pub mod svg;
pub mod table;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::Value;

use super::dialect::{Capabilities, Dialect};
use super::figures::{Round, Summary};
use super::oracle::Verification;
use super::render::{Renderer, Seeding};
use super::selftest::Capacity;
use super::watch::{Host, Observed, PageCheck, commit};
use super::workload::Workload;

/// Names the form of the JSON. The number grows when a field changes its meaning or goes; new fields may come without.
pub const FORMAT: &str = "crucible-load-report/1";

/// A report cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}: {source}")]
pub struct WriteError {
    path: PathBuf,
    source: std::io::Error,
}

/// Everything of one run against one server.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `FORMAT`.
    pub format: &'static str,
    /// `run`, `sustained`, `overload`, `pressure` or `soak`.
    pub kind: &'static str,
    /// When it began, milliseconds since 1970.
    pub started_unix_ms: u64,
    /// The client.
    pub client: ClientFacts,
    /// The server.
    pub target: TargetFacts,
    /// What prompts follow from.
    #[serde(flatten)]
    pub seeding: Seeding,
    /// The options of the run, as they were understood.
    pub options: Value,
    /// Every workload with every round.
    pub workloads: Vec<WorkloadReport>,
    /// Second by second, in open loop.
    pub timeline: Vec<Second>,
    /// Server and devices while it ran.
    pub observed: Observed,
    /// The comparison with the oracle.
    pub verification: Option<Verification>,
    /// The pool at the end.
    pub pages: Option<PageCheck>,
    /// The server's own counters before and after.
    pub stats_before: Option<Value>,
    /// See `stats_before`.
    pub stats_after: Option<Value>,
    /// What had to hold.
    pub checks: Vec<Check>,
    /// All of `checks` hold.
    pub passed: bool,
}

/// The client's side.
#[derive(Clone, Debug, Serialize)]
pub struct ClientFacts {
    /// Version of this program.
    pub version: &'static str,
    /// Commit of the working directory.
    pub commit: Option<String>,
    /// Worker threads.
    pub threads: usize,
    /// Its machine.
    pub host: Host,
    /// What it managed against the stub, when that was measured.
    pub capacity: Option<Capacity>,
}

/// The server's side.
#[derive(Clone, Debug, Serialize)]
pub struct TargetFacts {
    /// Its address.
    pub url: String,
    /// The model that requests name.
    pub model: String,
    /// /health as it stands.
    pub health: Option<Value>,
    /// What each dialect takes.
    pub dialects: BTreeMap<Dialect, Capabilities>,
}

/// One workload.
#[derive(Clone, Debug, Serialize)]
pub struct WorkloadReport {
    /// What was asked.
    pub workload: Workload,
    /// Its rounds, warm-ups left out.
    pub rounds: Vec<Round>,
    /// Their summary.
    pub summary: Summary,
    /// Requests a second that meet every objective, per round; empty without objectives.
    pub goodput_per_s: Vec<f64>,
}

/// One second of an open-loop run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Second {
    /// Which second.
    pub t_s: u64,
    /// Requests due in it.
    pub due: usize,
    /// Completed in it.
    pub completed: usize,
    /// Refused in it.
    pub refused: usize,
    /// Cancelled in it.
    pub cancelled: usize,
    /// Failed in it.
    pub failed: usize,
    /// Output events received in it.
    pub events: usize,
}

/// Something that had to hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What.
    pub name: String,
    /// Whether it held.
    pub passed: bool,
    /// With which figures.
    pub detail: String,
}

impl Check {
    /// A check and its figures.
    pub fn new(name: impl Into<String>, passed: bool, detail: impl Into<String>) -> Self {
        Self { name: name.into(), passed, detail: detail.into() }
    }
}

impl Report {
    /// A report without results.
    pub fn begin(kind: &'static str, renderer: &Renderer, threads: usize, options: Value) -> Self {
        let target = renderer.target();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            format: FORMAT,
            kind,
            started_unix_ms: u64::try_from(since.as_millis()).unwrap_or(0),
            client: ClientFacts {
                version: env!("CARGO_PKG_VERSION"),
                commit: commit(),
                threads,
                host: Host::here(),
                capacity: None,
            },
            target: TargetFacts {
                url: target.url.clone(),
                model: renderer.model().to_owned(),
                health: target.json("/health"),
                dialects: renderer.takes().clone(),
            },
            seeding: renderer.seeding(),
            options,
            workloads: Vec::new(),
            timeline: Vec::new(),
            observed: Observed::default(),
            verification: None,
            pages: None,
            stats_before: target.json("/stats"),
            stats_after: None,
            checks: Vec::new(),
            passed: false,
        }
    }

    /// Adds the checks of oracle and pages, where there are any, and settles whether the run passed.
    pub fn settle(&mut self) {
        if let Some(v) = &self.verification {
            let mut detail = format!(
                "{} outputs and {} token ids compared, {} different, {} unknown",
                v.compared, v.token_ids_compared, v.different, v.unknown
            );
            if v.unseeded > 0 {
                detail.push_str(&format!(", {} drawn without a seed and not compared", v.unseeded));
            }
            self.checks.push(Check::new("every output equals the oracle", v.passed(), detail));
        }
        if let Some(p) = &self.pages {
            let detail = format!(
                "{} free before, {} after, {} used, {} requests inside",
                p.free_before, p.free_after, p.used_after, p.live_after
            );
            self.checks.push(Check::new("every page is back", p.passed(), detail));
        }
        self.passed = self.checks.iter().all(|c| c.passed);
    }
}

/// Writes JSON under a temporary name first.
///
/// # Errors
/// The folder cannot be written.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<(), WriteError> {
    let bytes = serde_json::to_vec_pretty(value)
        .map_err(|e| WriteError { path: path.to_owned(), source: std::io::Error::from(e) })?;
    write(path, &bytes)
}

/// Writes a file under a temporary name first.
///
/// # Errors
/// The folder cannot be written.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    let part = path.with_extension("part");
    std::fs::write(&part, bytes)
        .and_then(|()| std::fs::rename(&part, path))
        .map_err(|source| WriteError { path: path.to_owned(), source })
}
