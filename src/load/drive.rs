//! Drives a measurement: a fleet against a target, burst after burst, with every output compared when there is an oracle.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;

use super::burst::{self, Burst, Rounds};
use super::client::Fleet;
use super::dialect::Capture;
use super::figures::{Counts, Round, round_of_burst, summarise};
use super::job::{Job, Outcome, Wire};
use super::oracle::{Oracle, OracleError, Verification};
use super::render::Renderer;
use super::report::table::figure;
use super::report::{Check, WorkloadReport};
use super::slo::{Objective, goodput_per_s};
use super::watch::counter;
use super::workload::Workload;

/// The workload whose arrivals must share one prefill batch, and how many they are.
pub const SHARED_BATCH: (&str, u64) = ("shared-packed-batch", 5);
/// The counter of /stats that says so.
pub const SHARED_BATCH_COUNTER: &str = "last_prefill_batch_requests";

/// What every kind of run needs.
#[derive(Clone, Debug)]
pub struct Setup<'a> {
    /// Writes the requests and knows the target.
    pub renderer: &'a Renderer,
    /// Worker threads of the client.
    pub threads: usize,
    /// A request that takes longer has failed.
    pub timeout: Duration,
    /// Bounds that rounds must keep.
    pub objectives: &'a [Objective],
    /// Answers to compare with.
    pub oracle: Option<&'a Oracle>,
}

impl Setup<'_> {
    /// Starts the client.
    pub fn fleet(&self) -> Fleet {
        let capture = if self.oracle.is_some() { Capture::Outputs } else { Capture::Counts };
        Fleet::start(self.renderer.target().address, self.threads, capture, self.timeout)
    }
}

/// What a measurement gave.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Every workload.
    pub workloads: Vec<WorkloadReport>,
    /// The requests of warm-ups, which are in no round.
    pub warmups: Counts,
    /// The comparison, with an oracle.
    pub verification: Option<Verification>,
    /// Objectives and whatever else the workloads promise.
    pub checks: Vec<Check>,
}

impl Measured {
    /// Takes the rounds of one workload: summary, goodput and objectives.
    pub fn push(&mut self, workload: Workload, rounds: Vec<Round>, objectives: &[Objective]) {
        let goodput = if objectives.is_empty() {
            Vec::new()
        } else {
            rounds.iter().map(|r| goodput_per_s(r, objectives)).collect()
        };
        for objective in objectives {
            let figure =
                |round: &Round| objective.figure(round).map_or_else(|why| why, |ms| format!("{} ms", figure(Some(ms))));
            let figures: Vec<String> = rounds.iter().map(figure).collect();
            let passed = !rounds.is_empty() && rounds.iter().all(|r| objective.met_by(r));
            self.checks.push(Check::when(
                passed,
                format!("{}: {}", workload.name, objective.text),
                format!("rounds: {}", figures.join(", ")),
            ));
        }
        let summary = summarise(&rounds);
        self.workloads.push(WorkloadReport { workload, rounds, summary, goodput_per_s: goodput });
    }
}

/// Runs workloads in a closed loop: warm-ups, trials, the order reversed on every other round.
pub fn closed_loop(setup: &Setup<'_>, workloads: &[Workload], rounds: Rounds, progress: &ProgressBar) -> Measured {
    let fleet = setup.fleet();
    let mut trials: Vec<Vec<Round>> = workloads.iter().map(|_| Vec::new()).collect();
    let mut measured = Measured { verification: setup.oracle.map(|_| Verification::default()), ..Measured::default() };
    let (mut shared, mut warmup_failure) = (Vec::new(), None);
    progress.set_length((workloads.len() * rounds.total()) as u64);
    let start = Instant::now();
    let begins = |round: usize, index: usize| {
        let (what, number) =
            if round < rounds.warmups { ("warm-up", round + 1) } else { ("trial", round + 1 - rounds.warmups) };
        progress.set_message(format!("{}, {what} {number}", workloads[index].name));
    };
    burst::run(&fleet, setup.renderer, workloads, rounds, begins, |index, burst| {
        let workload = &workloads[index];
        progress.inc(1);
        if let (Some(oracle), Some(verification)) = (setup.oracle, &mut measured.verification) {
            verify(verification, oracle, workload, &burst);
        }
        if burst.round < rounds.warmups {
            let records = || burst.records.iter().chain(&burst.stream);
            measured.warmups += Counts::of(records());
            warmup_failure =
                warmup_failure.take().or_else(|| records().find_map(|r| failure(&workload.name, &r.outcome)));
        } else {
            if workload.name == SHARED_BATCH.0 {
                let stats = setup.renderer.target().json("/stats");
                shared.push(stats.as_ref().and_then(|s| counter(s, SHARED_BATCH_COUNTER)));
            }
            let t_s = burst.start.saturating_duration_since(start).as_secs_f64();
            trials[index].push(Round { t_s, ..round_of_burst(&burst) });
        }
    });
    if rounds.warmups > 0 {
        let Counts { submitted, failed, .. } = measured.warmups;
        let first = warmup_failure.map_or(String::new(), |message| format!(", first: {message}"));
        let detail = format!("{failed} of {submitted} failed{first}");
        measured.checks.push(Check::when(failed == 0, "no request of a warm-up fails", detail));
    }
    if !shared.is_empty() {
        let passed = shared.iter().all(|&n| n == Some(SHARED_BATCH.1));
        let detail = format!("requests of the last prefill batch, per round: {shared:?}");
        measured.checks.push(Check::when(passed, "requests of every dialect share one prefill batch", detail));
    }
    for (workload, rounds) in workloads.iter().zip(trials) {
        measured.push(workload.clone(), rounds, setup.objectives);
    }
    measured
}

fn failure(workload: &str, outcome: &Outcome) -> Option<String> {
    match outcome {
        Outcome::Failed { message } => Some(format!("{workload}: {message}")),
        Outcome::Completed | Outcome::Refused { .. } | Outcome::Cancelled => None,
    }
}

fn verify(verification: &mut Verification, oracle: &Oracle, workload: &Workload, burst: &Burst) {
    for record in burst.records.iter().chain(&burst.stream) {
        verification.add(oracle, &workload.name, record);
    }
}

/// The requests of a closed-loop run, each once, for an oracle.
pub fn wires_of<'a>(
    renderer: &'a Renderer,
    workloads: &'a [Workload],
    rounds: Rounds,
) -> impl Iterator<Item = Wire> + 'a {
    let mut variants: Vec<u64> = (0..rounds.total()).map(|r| rounds.variant(r)).collect();
    variants.dedup();
    let of = move |workload: &'a Workload| {
        variants.clone().into_iter().flat_map(move |variant| burst::wires(renderer, workload, variant))
    };
    workloads.iter().flat_map(of)
}

/// Sends every request alone and keeps its answer.
///
/// # Errors
/// A request does not complete.
pub fn record_oracle(setup: &Setup<'_>, wires: Vec<Wire>, progress: &ProgressBar) -> Result<Oracle, OracleError> {
    let renderer = setup.renderer;
    let mut oracle = Oracle::new(renderer.model(), renderer.seeding().seed);
    let fleet = Fleet::start(renderer.target().address, 1, Capture::Outputs, setup.timeout);
    progress.set_length(wires.len() as u64);
    for (id, wire) in wires.into_iter().enumerate() {
        progress.inc(1);
        if wire.key.is_empty() || oracle.entries.contains_key(&*wire.key) {
            continue;
        }
        fleet.submit(Job::now(id, wire));
        let record = fleet.next().ok_or_else(|| OracleError::Incomplete("the client's thread ended".into()))?;
        oracle.record(&record)?;
    }
    Ok(oracle)
}
