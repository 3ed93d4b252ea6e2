//! The soak: one server from its start to its drain under stable traffic, overload, thousands of cancelled requests and a long mix, with
//! every output compared, every page counted and its memory watched. Sized by options, the same on every backend.

mod judge;
mod memory;
mod table;

use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::Value;

use crate::load::arrivals::{Arrivals, Law};
use crate::load::client::Fleet;
use crate::load::dialect::Capture;
use crate::load::drive::{Setup, capacity_per_s};
use crate::load::figures::{Counts, Origin, Round, round_of};
use crate::load::job::{Job, Outcome, Record};
use crate::load::open::{self, Mix};
use crate::load::oracle::Verification;
use crate::load::report::{Check, ClientFacts};
use crate::load::watch::{Observed, PageCheck, at_rest, counter};

use self::judge::judge;
use self::memory::memory_is_flat;
pub use self::memory::{MemorySample, MemoryWatch};

/// Names the form of the JSON.
pub const FORMAT: &str = "crucible-soak/1";
/// A server gets this long to become idle before its pages are counted.
const IDLE_WAIT: Duration = Duration::from_secs(60);
/// Cancelled requests are given up when so many times their number were sent.
const CANCEL_TRIES_MAX: usize = 6;

/// How long and how much.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SoakPlan {
    /// Capacity is measured for so long.
    pub calibrate_s: f64,
    /// Requests in flight meanwhile, and while requests are cancelled.
    pub concurrency: usize,
    /// Traffic at half the capacity.
    pub stable_s: f64,
    /// Traffic above the capacity.
    pub overload_s: f64,
    /// Its rate as a multiple of the capacity.
    pub overload_factor: f64,
    /// Requests that are cancelled.
    pub cancelled: usize,
    /// The mix.
    pub mixed_s: f64,
    /// The mix's rate as a share of the capacity.
    pub mixed_share: f64,
    /// The mix comes in windows; at the end of each nothing may be left inside.
    pub window_s: f64,
    /// The server's queue bound.
    pub queue: u64,
}

/// Requests that began and ended between two moments at which the server was idle.
#[derive(Clone, Debug, Serialize)]
pub struct Window {
    /// Seconds since the server's start.
    pub t_s: f64,
    /// First request due to last one ended, seconds.
    pub duration_s: f64,
    /// Ends as the client saw them; a cancelled request is a disconnected one.
    pub counts: Counts,
    /// Output tokens of completed requests a second.
    pub output_tok_per_s: f64,
    /// Milliseconds.
    pub ttft_p50_ms: Option<f64>,
    /// Milliseconds.
    pub ttft_p95_ms: Option<f64>,
    /// Milliseconds.
    pub gap_p95_ms: Option<f64>,
    /// Milliseconds.
    pub gap_worst_ms: Option<f64>,
    /// The comparison with the oracle.
    pub verification: Verification,
    /// The pool at its end.
    pub pages: Option<PageCheck>,
    /// How much the server's own counters grew.
    pub server: ServerGrowth,
}

/// Growth of counters of /stats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ServerGrowth {
    /// Requests that entered.
    pub accepted: u64,
    /// Ended in order.
    pub completed: u64,
    /// Whose client left.
    pub cancelled: u64,
    /// Failed.
    pub failed: u64,
    /// Refused.
    pub refused: u64,
    /// Prefill steps with slices of several requests.
    pub packed_batches: u64,
}

impl ServerGrowth {
    fn between(before: Option<&Value>, after: Option<&Value>) -> Self {
        let grown = |name| {
            let of = |stats: Option<&Value>| stats.and_then(|s| counter(s, name)).unwrap_or(0);
            of(after).saturating_sub(of(before))
        };
        Self {
            accepted: grown("accepted_requests"),
            completed: grown("completed_requests"),
            cancelled: grown("cancelled_requests"),
            failed: grown("failed_requests"),
            refused: grown("rejected_requests"),
            packed_batches: grown("packed_prefill_batches"),
        }
    }
}

/// One kind of traffic.
#[derive(Clone, Debug, Serialize)]
pub struct Phase {
    /// `stable`, `overload`, `cancelled` or `mixed`.
    pub name: &'static str,
    /// Requests a second due; absent in the closed loop.
    pub rate_per_s: Option<f64>,
    /// One, or one a minute.
    pub windows: Vec<Window>,
}

/// What a soak found.
#[derive(Clone, Debug, Serialize)]
pub struct Soak {
    /// `FORMAT`.
    pub format: &'static str,
    /// The client and its machine.
    pub client: ClientFacts,
    /// The server: program, arguments, SHA-256.
    pub server: Value,
    /// Its /health.
    pub health: Option<Value>,
    /// What was asked for.
    pub plan: SoakPlan,
    /// What was asked.
    pub mix: Mix,
    /// Requests a second with `plan.concurrency` always in flight.
    pub capacity_per_s: f64,
    /// In order.
    pub phases: Vec<Phase>,
    /// Twice a second.
    pub memory: Vec<MemorySample>,
    /// Server and devices, every second.
    pub observed: Observed,
    /// What had to hold.
    pub checks: Vec<Check>,
    /// All of `checks` hold.
    pub passed: bool,
}

/// What a soak works with: the setup must hold an oracle of every request of the mix.
#[derive(Debug)]
pub struct SoakRun<'a> {
    /// Client, target and oracle.
    pub setup: Setup<'a>,
    /// What is asked.
    pub mix: &'a Mix,
    /// How much of it.
    pub plan: SoakPlan,
    /// The server's memory.
    pub memory: &'a MemoryWatch,
}

impl SoakRun<'_> {
    /// Runs every phase. What was observed meanwhile is the caller's to add.
    pub fn run(&self, client: ClientFacts, server: Value, progress: &ProgressBar) -> Soak {
        let (plan, target) = (self.plan, self.setup.renderer.target());
        progress.set_message("measuring the capacity");
        let unverified = Setup { oracle: None, ..self.setup.clone() };
        let capacity =
            capacity_per_s(&unverified, plan.concurrency, plan.calibrate_s, |n| self.mix.wire(self.setup.renderer, n));
        // A rate of zero would wait for ever; a server that completes nothing fails the checks below.
        let rate = |share: f64| (capacity * share).max(0.1);
        let mut phases = vec![
            self.open("stable", rate(0.5), &[plan.stable_s], progress),
            self.open("overload", rate(plan.overload_factor), &[plan.overload_s], progress),
            Phase { name: "cancelled", rate_per_s: None, windows: vec![self.cancelled(progress)] },
        ];
        let mixed_from = self.memory.seconds();
        let windows = windows(plan.mixed_s, plan.window_s);
        phases.push(self.open("mixed", rate(plan.mixed_share), &windows, progress));
        let memory = self.memory.samples();
        let queue_peak = target.json("/stats").as_ref().and_then(|s| counter(s, "queue_peak"));
        let mut checks = judge(&phases, queue_peak, plan);
        checks.push(memory_is_flat(&memory, mixed_from));
        Soak {
            format: FORMAT,
            client,
            server,
            health: target.json("/health"),
            plan,
            mix: self.mix.clone(),
            capacity_per_s: capacity,
            phases,
            memory,
            observed: Observed::default(),
            passed: checks.iter().all(|c| c.passed),
            checks,
        }
    }

    /// Open-loop traffic at a rate, window after window.
    fn open(&self, name: &'static str, rate: f64, windows: &[f64], progress: &ProgressBar) -> Phase {
        let arrivals = Arrivals { law: Law::Poisson, rate, burst: 1 };
        let seed = self.setup.renderer.seeding().seed;
        let one = |(index, &seconds): (usize, &f64)| {
            progress.println(format!("{name}, window {} of {}: {rate:.2} requests/s", index + 1, windows.len()));
            let due = arrivals.schedule(seconds, seed.wrapping_add(index as u64));
            let planned = self.mix.plan(self.setup.renderer, &due);
            self.window(|| {
                let run = open::run(&self.setup, name, planned, progress);
                let round = run.measured.workloads.into_iter().next().and_then(|w| w.rounds.into_iter().next());
                (round, run.measured.verification.unwrap_or_default())
            })
        };
        Phase { name, rate_per_s: Some(rate), windows: windows.iter().enumerate().map(one).collect() }
    }

    /// Requests in a closed loop, each cancelled by disconnect, until enough were.
    fn cancelled(&self, progress: &ProgressBar) -> Window {
        progress.println(format!("cancelled: {} requests", self.plan.cancelled));
        progress.set_length(self.plan.cancelled as u64);
        self.window(|| {
            let start = Instant::now();
            let (records, verification) = self.cancel_all(progress);
            (Some(round_of(0, start, &records, Origin::Sent)), verification)
        })
    }

    fn cancel_all(&self, progress: &ProgressBar) -> (Vec<Record>, Verification) {
        let renderer = self.setup.renderer;
        let capture = Capture::Outputs;
        let fleet = Fleet::start(renderer.target().address, self.setup.threads, capture, self.setup.timeout);
        let mix = self.mix.all_cancelled();
        let (mut sent, mut live, mut cancelled) = (0, 0, 0);
        let (mut records, mut verification) = (Vec::new(), Verification::default());
        loop {
            let wanted = self.plan.cancelled.saturating_sub(cancelled);
            while live < self.plan.concurrency.min(wanted) && sent < CANCEL_TRIES_MAX * self.plan.cancelled {
                fleet.submit(Job { cancel: mix.turn(sent).1, ..Job::now(sent, mix.wire(renderer, sent as u64)) });
                (sent, live) = (sent + 1, live + 1);
            }
            if live == 0 {
                return (records, verification);
            }
            let Some(record) = fleet.next() else { return (records, verification) };
            live -= 1;
            match record.outcome {
                Outcome::Cancelled => cancelled += 1,
                Outcome::Refused { .. } => std::thread::sleep(Duration::from_millis(5)), // a closed loop backs off
                Outcome::Completed | Outcome::Failed { .. } => {}
            }
            progress.set_position(cancelled as u64);
            if let Some(oracle) = self.setup.oracle {
                verification.add(oracle, "cancelled", &record);
            }
            records.push(record);
        }
    }

    /// Measures between two moments at which the server is idle.
    fn window(&self, traffic: impl FnOnce() -> (Option<Round>, Verification)) -> Window {
        let target = self.setup.renderer.target();
        let t_s = self.memory.seconds();
        // What the traffic before this window has left inside, such as requests whose client went away, belongs to that.
        let before = at_rest(target, IDLE_WAIT);
        let (round, verification) = traffic();
        let pages = PageCheck::after(target, before.as_ref(), IDLE_WAIT);
        let server = ServerGrowth::between(before.as_ref(), target.json("/stats").as_ref());
        let Some(round) = round else {
            let (counts, duration_s, output_tok_per_s) = (Counts::default(), 0.0, 0.0);
            let (ttft_p50_ms, ttft_p95_ms, gap_p95_ms, gap_worst_ms) = (None, None, None, None);
            return Window {
                t_s,
                duration_s,
                counts,
                output_tok_per_s,
                ttft_p50_ms,
                ttft_p95_ms,
                gap_p95_ms,
                gap_worst_ms,
                verification,
                pages,
                server,
            };
        };
        Window {
            t_s,
            duration_s: round.duration_s,
            output_tok_per_s: round.output_tok_per_s,
            ttft_p50_ms: round.ttft_ms.p50,
            ttft_p95_ms: round.ttft_ms.p95,
            gap_p95_ms: round.gap_ms.p95,
            gap_worst_ms: round.gap_ms.worst,
            counts: round.counts,
            verification,
            pages,
            server,
        }
    }
}

/// `total` seconds in windows of `window`; the last takes what is left.
fn windows(total: f64, window: f64) -> Vec<f64> {
    let whole = (total / window.max(1.0)).floor().max(1.0) as usize;
    let mut windows = vec![window.max(1.0).min(total); whole];
    windows[whole - 1] += (total - windows.iter().sum::<f64>()).max(0.0);
    windows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_windows_of_a_mix_add_up_to_it() {
        assert_eq!(windows(1_800.0, 60.0), vec![60.0; 30]);
        assert_eq!(windows(150.0, 60.0), [60.0, 90.0]);
        assert_eq!(windows(10.0, 60.0), [10.0]);
    }
}
