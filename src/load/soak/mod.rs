//! The soak: one server from its start to its drain under stable traffic, overload, thousands of cancelled requests and a long mix, with
//! every output compared, every page counted and its memory watched. Sized by options, the same on every backend. It ends when its server
//! does.

mod judge;
mod memory;
mod table;

use std::process::ExitStatus;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::Value;

use crate::load::arrivals::{Arrivals, Law};
use crate::load::calibrate::{Calibration, Came, Places, capacity};
use crate::load::client::Fleet;
use crate::load::dialect::Capture;
use crate::load::drive::Setup;
use crate::load::figures::{Origin, Round, round_of};
use crate::load::growth::ServerGrowth;
use crate::load::interrupt;
use crate::load::job::{Job, Outcome, Record};
use crate::load::open::{self, Mix};
use crate::load::oracle::Verification;
use crate::load::render::Seeding;
use crate::load::report::{Check, ClientFacts, TargetFacts, check, unix_ms};
use crate::load::variant::Variant;
use crate::load::watch::{Observed, PageCheck, Watch, at_rest, counter, say};

use self::judge::judge;
pub use self::memory::{MemorySample, MemoryWatch};

/// Names the form of the JSON.
pub const FORMAT: &str = "crucible-soak/2";
/// A server gets this long to become idle before its pages are counted.
const IDLE_WAIT: Duration = Duration::from_secs(60);
/// Cancelled requests are given up when so many times their number were sent.
const CANCEL_TRIES_MAX: usize = 6;

/// Most windows of a mix.
pub const WINDOWS_MAX: f64 = 100_000.0;

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
#[derive(Clone, Debug, Default, Serialize)]
pub struct Window {
    /// The requests' figures as those of a round, without their rows; `t_s` counts from the server's start, and a cancelled request is a
    /// disconnected one.
    #[serde(flatten)]
    pub round: Round,
    /// When the server was idle again, seconds since its start.
    pub ended_s: f64,
    /// The comparison with the oracle.
    pub verification: Verification,
    /// The pool at its end; absent when the server told it no more.
    pub pages: Option<PageCheck>,
    /// How much the server's own counters grew; absent when it told them no more.
    pub server: Option<ServerGrowth>,
    /// The server's `queue_peak`, when it was reached in this window.
    pub queue_peak: Option<u64>,
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
    /// Why there is none, when the capacity asks for more than a run may hold.
    pub left_out: Option<String>,
}

impl Phase {
    fn of(name: &'static str, rate_per_s: Option<f64>, windows: Vec<Window>) -> Self {
        Self { name, rate_per_s, windows, left_out: None }
    }
}

/// What a soak found.
#[derive(Clone, Debug, Serialize)]
pub struct Soak {
    /// `FORMAT`.
    pub format: &'static str,
    /// When it began, milliseconds since 1970.
    pub started_unix_ms: u64,
    /// The client and its machine.
    pub client: ClientFacts,
    /// The server as it was started: program, arguments, configuration, SHA-256.
    pub server: Variant,
    /// Its address, model, /health and dialects.
    pub target: TargetFacts,
    /// What prompts follow from.
    #[serde(flatten)]
    pub seeding: Seeding,
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
    /// The server's /stats before the capacity was measured.
    pub stats_before: Option<Value>,
    /// Its /stats at the end.
    pub stats_after: Option<Value>,
    /// Server and devices.
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
    /// The server's memory; it ends the soak when the process does.
    pub memory: &'a MemoryWatch,
}

impl SoakRun<'_> {
    /// Runs every phase, until the measurement is ended, and judges them. `watch` must count from the same moment as the memory.
    pub fn run(&self, client: ClientFacts, server: &Variant, watch: Watch, progress: &ProgressBar) -> Soak {
        let (started_unix_ms, target) = (unix_ms(), self.setup.renderer.target());
        let (facts, stats_before) = (TargetFacts::of(self.setup.renderer), target.json("/stats"));
        let (calibration, phases) = self.phases(progress);
        let mut soak = Soak {
            format: FORMAT,
            started_unix_ms,
            client,
            server: server.clone(),
            target: facts,
            seeding: self.setup.renderer.seeding(),
            plan: self.plan,
            mix: self.mix.clone(),
            capacity_per_s: calibration.per_s,
            phases,
            memory: self.memory.samples(),
            stats_before,
            stats_after: target.json("/stats"),
            observed: watch.end(),
            checks: Vec::new(),
            passed: false,
        };
        soak.client.set_against(soak.phases.iter().flat_map(|p| &p.windows).map(|w| &w.round));
        let mut checks: Vec<Check> = check::of_end(interrupt::cause().as_deref()).into_iter().collect();
        checks.push(calibration.check());
        checks.extend(judge(&soak));
        soak.checks = checks;
        soak
    }

    /// The capacity and the phases, as far as the measurement goes.
    fn phases(&self, progress: &ProgressBar) -> (Calibration, Vec<Phase>) {
        let plan = self.plan;
        if interrupt::raised() {
            return (Calibration::default(), Vec::new());
        }
        say(progress, &format!("capacity: {} s with {} requests in flight", plan.calibrate_s, plan.concurrency));
        progress.set_message("measuring the capacity");
        let unverified = Setup { oracle: None, ..self.setup.clone() };
        let found =
            capacity(&unverified, plan.concurrency, plan.calibrate_s, |n| self.mix.wire(self.setup.renderer, n));
        // A rate of zero would wait for ever; a server that completes nothing fails the checks below.
        let rate = |share: f64| (found.per_s * share).max(0.1);
        let stages: [&dyn Fn() -> Phase; 4] = [
            &|| self.open("stable", rate(0.5), &[plan.stable_s], progress),
            &|| self.open("overload", rate(plan.overload_factor), &[plan.overload_s], progress),
            &|| Phase::of("cancelled", None, vec![self.cancelled(progress)]),
            &|| self.open("mixed", rate(plan.mixed_share), &windows(plan.mixed_s, plan.window_s), progress),
        ];
        let phases = stages.iter().take_while(|_| !interrupt::raised()).map(|stage| stage()).collect();
        (found, phases)
    }

    /// Open-loop traffic at a rate, window after window; none where a window would hold more requests than a run can.
    fn open(&self, name: &'static str, rate: f64, windows: &[f64], progress: &ProgressBar) -> Phase {
        let arrivals = Arrivals { law: Law::Poisson, rate, burst: 1 };
        let seed = self.setup.renderer.seeding().seed;
        let one = |(index, &seconds): (usize, &f64)| {
            say(progress, &format!("{name}, window {} of {}: {rate:.2} requests/s", index + 1, windows.len()));
            let due = arrivals.schedule(seconds, seed.wrapping_add(index as u64));
            let planned = self.mix.plan(self.setup.renderer, &due);
            self.window(index, || {
                let run = open::run(&self.setup, name, planned, progress);
                let round = run.measured.workloads.into_iter().next().and_then(|w| w.rounds.into_iter().next());
                (round, run.measured.verification.unwrap_or_default())
            })
        };
        if let Err(why) = windows.iter().try_for_each(|&seconds| arrivals.check(seconds)) {
            say(progress, &format!("{name} is left out: {why}"));
            return Phase { left_out: Some(why), ..Phase::of(name, Some(rate), Vec::new()) };
        }
        let done = windows.iter().enumerate().take_while(|_| !interrupt::raised()).map(one).collect();
        Phase::of(name, Some(rate), done)
    }

    /// Requests in a closed loop, each cancelled by disconnect, until enough were.
    fn cancelled(&self, progress: &ProgressBar) -> Window {
        say(progress, &format!("cancelled: {} requests", self.plan.cancelled));
        progress.set_message("cancelled");
        progress.set_length(self.plan.cancelled as u64);
        self.window(0, || {
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
        let (mut sent, mut cancelled, mut places) = (0, 0, Places::new(self.plan.concurrency));
        let most = CANCEL_TRIES_MAX * self.plan.cancelled;
        let (mut records, mut verification) = (Vec::new(), Verification::default());
        loop {
            let wanted = self.plan.cancelled.saturating_sub(cancelled);
            while places.taken() < wanted && sent < most && places.take(Instant::now()) {
                fleet.submit(Job { cancel: mix.turn(sent).1, ..Job::now(sent, mix.wire(renderer, sent as u64)) });
                sent += 1;
            }
            if places.taken() == 0 && (wanted == 0 || sent >= most) {
                return (records, verification);
            }
            let record = match places.wait(&fleet) {
                Came::Ended(record) => *record,
                Came::Place => continue,
                Came::Nothing => return (records, verification),
            };
            cancelled += usize::from(record.outcome == Outcome::Cancelled);
            progress.set_position(cancelled as u64);
            if let Some(oracle) = self.setup.oracle {
                verification.add(oracle, "cancelled", &record);
            }
            records.push(record);
        }
    }

    /// Measures between two moments at which the server is idle.
    fn window(&self, index: usize, traffic: impl FnOnce() -> (Option<Round>, Verification)) -> Window {
        let target = self.setup.renderer.target();
        let t_s = self.memory.seconds();
        // What the traffic before this window has left inside, such as requests whose client went away, belongs to that.
        let (before, begun) = (at_rest(target, IDLE_WAIT), Instant::now());
        let (round, verification) = traffic();
        let pages = PageCheck::after(target, before.as_ref(), IDLE_WAIT);
        let (elapsed, after) = (begun.elapsed(), target.json("/stats"));
        let peak = |stats: Option<&Value>| stats.and_then(|s| counter(s, "queue_peak"));
        let (peak_before, peak_after) = (peak(before.as_ref()), peak(after.as_ref()));
        Window {
            round: Round { round: index, t_s, requests: Vec::new(), ..round.unwrap_or_default() },
            ended_s: self.memory.seconds(),
            verification,
            pages,
            server: ServerGrowth::between(before.as_ref(), after.as_ref(), elapsed),
            queue_peak: peak_after.filter(|peak| peak_before.is_some_and(|before| *peak > before)),
        }
    }
}

impl Soak {
    /// The end of the server belongs to the soak: asked to, it must drain. Settles whether the soak passed.
    pub fn close(&mut self, ended: Option<ExitStatus>) {
        let detail = ended.map_or("it did not end".into(), |status| status.to_string());
        let drained = ended.is_some_and(|status| status.success());
        self.checks.push(Check::when(drained, "the server drains and exits with 0", detail));
        self.passed = self.checks.iter().all(|c| c.passed);
    }
}

/// `total` seconds in windows of `window`; the last takes what is left.
fn windows(total: f64, window: f64) -> Vec<f64> {
    let whole = (total / window).floor().max(1.0) as usize;
    let mut windows = vec![window.min(total); whole];
    windows[whole - 1] += (total - windows.iter().sum::<f64>()).max(0.0);
    windows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::dialect::{Dialect, Policy};
    use crate::load::prompts::TokenRange;
    use crate::load::render::Renderer;
    use crate::load::stub::{Stub, StubOptions};
    use crate::load::target::Target;

    #[test]
    fn a_phase_of_a_window_that_wants_more_requests_than_a_run_may_hold_is_left_out_and_says_so() {
        let stub = Stub::start(([127, 0, 0, 1], 0).into(), StubOptions::default()).expect("a stub");
        let target = Target::new(&format!("http://{}", stub.address), None).expect("a target");
        let seeding = Seeding { seed: 1, token_range: TokenRange::default() };
        let renderer = Renderer::unprobed(target, "stub", Dialect::Native, seeding);
        let (timeout, begin) = (Duration::from_secs(20), Instant::now());
        let setup = Setup { renderer: &renderer, threads: 1, timeout, objectives: &[], oracle: None };
        let mix = Mix {
            dialects: vec![Dialect::Native],
            policies: vec![Policy::Greedy],
            prompts: vec![8],
            output: 2,
            variants: 1,
            cancel_every: 0,
            cancel_at: Vec::new(),
        };
        let memory = MemoryWatch::begin(std::process::id(), begin, || ());
        let soak = SoakRun { setup, mix: &mix, plan: judge::tests::plan(), memory: &memory };
        let phase = |rate: f64, windows: &[f64]| soak.open("mixed", rate, windows, &ProgressBar::hidden());
        let done = phase(200.0, &[0.1, 0.1]);
        assert_eq!((done.windows.len(), &done.left_out), (2, &None));
        assert!(done.windows.iter().all(|w| w.round.counts.completed == w.round.counts.submitted));
        // The first window would fit.
        let none = phase(2e8, &[1e-6, 0.005_1]);
        assert_eq!((none.windows.len(), none.rate_per_s), (0, Some(2e8)));
        let why = none.left_out.expect("why");
        assert!(why.contains("200000000 requests/s for 0.0051 s are more than 1000000 requests"), "{why}");
        let sent: u64 = done.windows.iter().map(|w| w.round.counts.submitted as u64).sum();
        assert_eq!(stub_requests(&renderer), sent);
    }

    fn stub_requests(renderer: &Renderer) -> u64 {
        let stats = renderer.target().json("/stats").expect("statistics");
        counter(&stats, "accepted_requests").expect("a counter")
    }

    #[test]
    fn the_windows_of_a_mix_add_up_to_it() {
        assert_eq!(windows(1_800.0, 60.0), vec![60.0; 30]);
        assert_eq!(windows(150.0, 60.0), [60.0, 90.0]);
        assert_eq!(windows(10.0, 60.0), [10.0]);
        assert_eq!(windows(2.0, 0.5), [0.5; 4]);
    }
}
