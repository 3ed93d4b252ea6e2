//! The report of a run: one value, written as JSON (docs/load.md describes every field), as a table on the terminal and as one HTML
//! page that needs nothing else.

pub mod check;
pub mod comparison;
mod devices;
mod facts;
pub mod html;
mod plots;
pub mod soak;
pub mod svg;
pub mod table;

use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use super::figures::{Counts, Round, Summary};
use super::oracle::Verification;
use super::render::{Renderer, Seeding};
use super::target::Target;
use super::watch::{Observed, PageCheck};
use super::workload::Workload;

pub use self::check::Check;
pub use self::facts::{COMMIT, ClientFacts, TargetFacts, unix_ms};

/// Names the form of the JSON. The number grows when a field changes its meaning or goes; new fields may come without.
pub const FORMAT: &str = "crucible-load-report/1";

/// Everything of one run against one server.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `FORMAT`.
    pub format: &'static str,
    /// `run`, `sustained`, `overload` or `pressure`.
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
    /// The requests of warm-ups, which are in no round.
    pub warmups: Counts,
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
    /// When `stats_before` had come.
    #[serde(skip)]
    begun: Instant,
    /// From then until `stats_after` was asked for.
    #[serde(skip)]
    elapsed: Duration,
    /// What had to hold.
    pub checks: Vec<Check>,
    /// All of `checks` hold.
    pub passed: bool,
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

impl Report {
    /// A report without results.
    pub fn begin(kind: &'static str, renderer: &Renderer, client: ClientFacts, options: Value) -> Self {
        Self {
            format: FORMAT,
            kind,
            started_unix_ms: unix_ms(),
            client,
            target: TargetFacts::of(renderer),
            seeding: renderer.seeding(),
            options,
            warmups: Counts::default(),
            workloads: Vec::new(),
            timeline: Vec::new(),
            observed: Observed::default(),
            verification: None,
            pages: None,
            stats_before: renderer.target().json("/stats"),
            stats_after: None,
            begun: Instant::now(),
            elapsed: Duration::ZERO,
            checks: Vec::new(),
            passed: false,
        }
    }

    /// Asks the server for its counters after the run.
    pub fn look_again(&mut self, target: &Target) {
        self.elapsed = self.begun.elapsed();
        self.stats_after = target.json("/stats");
    }

    /// Adds the checks of oracle, account, process and pages, where there are any, and that of the run's end; settles whether the run
    /// passed. `cut_short` says why it ended early.
    pub fn settle(&mut self, cut_short: Option<&str>) {
        self.checks.extend(self.verification.as_ref().map(check::of_verification));
        let (before, after) = (self.stats_before.as_ref(), self.stats_after.as_ref());
        self.checks.extend(check::of_account(before, after, self.elapsed));
        self.checks.extend(check::of_restart(before));
        self.checks.extend(check::of_pages(self.stats_before.as_ref(), self.pages.as_ref()));
        self.checks.extend(check::of_end(cut_short));
        self.client.set_against(self.workloads.iter().flat_map(|w| &w.rounds));
        self.passed = self.checks.iter().all(|c| c.passed);
    }
}
