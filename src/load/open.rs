//! Open loop: requests are sent when they are due, whatever the server does, and every latency counts from the due time.
//!
//! The requests come from a finite set (dialect × prompt length × policy × prompt variant), so that an oracle of solo runs covers a
//! run of any length.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use serde::Serialize;

use super::arrivals::TraceEntry;
use super::dialect::{Dialect, Policy};
use super::drive::{Measured, Setup};
use super::figures::{Counts, Origin, round_of};
use super::interrupt;
use super::job::{CancelPoint, Job, Outcome, Record, Wire};
use super::limits;
use super::oracle::Verification;
use super::render::Renderer;
use super::report::Second;
use super::workload::{Shot, Workload};

/// Prompt lengths of the sustained mix.
pub const SUSTAINED_PROMPTS: [u32; 4] = [16, 64, 256, 512];
/// Names the mix in prompts and keys.
const SUSTAINED: &str = "sustained";
/// Names traces in prompts and keys.
const TRACE: &str = "trace";

/// What an open-loop run asks.
#[derive(Clone, Debug, Serialize)]
pub struct Mix {
    /// Surfaces, in turn.
    pub dialects: Vec<Dialect>,
    /// Policies, in turn, of those that a surface can express.
    pub policies: Vec<Policy>,
    /// Prompt lengths, in turn.
    pub prompts: Vec<u32>,
    /// Generated tokens.
    pub output: u32,
    /// Distinct prompts of each kind; at least 1.
    pub variants: u64,
    /// Every n-th request is cancelled; 0 cancels none.
    pub cancel_every: usize,
    /// Where, in turn.
    pub cancel_at: Vec<CancelPoint>,
}

/// One request and when it is due.
#[derive(Clone, Debug)]
pub struct Planned {
    /// Seconds from the start.
    pub due_s: f64,
    /// The request.
    pub wire: Wire,
    /// Whether and when it is cancelled.
    pub cancel: Option<CancelPoint>,
}

impl Mix {
    fn policies_on(&self, dialect: Dialect) -> Vec<Policy> {
        let known: Vec<Policy> = self.policies.iter().copied().filter(|p| Policy::on(dialect).contains(p)).collect();
        if known.is_empty() { vec![Policy::Greedy] } else { known }
    }

    /// The same mix, in which every request is cancelled.
    #[must_use]
    pub fn all_cancelled(&self) -> Self {
        Self { cancel_every: 1, ..self.clone() }
    }

    /// Dialect and cancel point of the n-th request: the one rule for every kind of run. Whatever the numbers of dialects and points and
    /// the distance of cancelled requests are, `dialects` cancelled requests after one another meet every dialect once, and the next
    /// point is taken only then, so that every point meets every dialect. Points shift once more when they and the prompt lengths have
    /// come round together, so that every point meets every length
    /// that cancelled requests have.
    pub fn turn(&self, n: usize) -> (Dialect, Option<CancelPoint>) {
        let (dialects, every) = (self.dialects.len(), self.cancel_every.max(1));
        let dialect = self.dialects[(n + n / least_common_multiple(every, dialects)) % dialects];
        if self.cancel_every == 0 || self.cancel_at.is_empty() || !(n + 1).is_multiple_of(every) {
            return (dialect, None);
        }
        let (points, cycle) = (self.cancel_at.len(), n / every / dialects);
        let shift = cycle / least_common_multiple(self.prompts.len(), points);
        (dialect, Some(self.cancel_at[(cycle + shift) % points]))
    }

    /// The n-th request's shot and prompt variant: dialects turn fastest, then lengths, policies, variants.
    fn shot(&self, n: u64) -> (u64, Shot) {
        let (dialect, _) = self.turn(n as usize);
        let mut rest = n as usize / self.dialects.len();
        let mut turn = |of: usize| {
            let at = rest % of;
            rest /= of;
            at
        };
        let prompt = self.prompts[turn(self.prompts.len())];
        let policies = self.policies_on(dialect);
        let policy = policies[turn(policies.len())];
        let variant = rest as u64 % self.variants;
        (variant, Shot { dialect: Some(dialect), policy, ..Shot::new(prompt, self.output) })
    }

    /// The n-th request.
    pub fn wire(&self, renderer: &Renderer, n: u64) -> Wire {
        let (variant, shot) = self.shot(n);
        renderer.wire(SUSTAINED, variant, u64::from(shot.prompt), &shot)
    }

    /// Every distinct request, for an oracle.
    pub fn wires(&self, renderer: &Renderer) -> Vec<Wire> {
        let mut wires = Vec::new();
        for &dialect in &self.dialects {
            for policy in self.policies_on(dialect) {
                for &prompt in &self.prompts {
                    for variant in 0..self.variants {
                        let shot = Shot { dialect: Some(dialect), policy, ..Shot::new(prompt, self.output) };
                        wires.push(renderer.wire(SUSTAINED, variant, u64::from(prompt), &shot));
                    }
                }
            }
        }
        wires
    }

    /// The n-th request, due at that time.
    pub fn planned(&self, renderer: &Renderer, n: usize, due_s: f64) -> Planned {
        Planned { due_s, wire: self.wire(renderer, n as u64), cancel: self.turn(n).1 }
    }

    /// The mix at these times.
    pub fn plan(&self, renderer: &Renderer, due_s: &[f64]) -> Vec<Planned> {
        due_s.iter().enumerate().map(|(n, &due_s)| self.planned(renderer, n, due_s)).collect()
    }

    /// Whether so many requests of the mix can be written before the first is sent.
    ///
    /// # Errors
    /// There is none, or they are too many or too long, and what to do.
    pub fn check(&self, requests: usize) -> Result<(), String> {
        if requests == 0 {
            return Err("no request is due in this time; raise the rate or the duration".into());
        }
        let requests =
            limits::RUN_REQUESTS.check(requests as u64).map_err(|e| format!("the number of requests {e}"))?;
        let lengths = self.prompts.iter().map(|&p| u64::from(p)).sum::<u64>();
        let tokens = lengths / self.prompts.len().max(1) as u64 * requests;
        limits::RUN_TOKENS.check(tokens.max(1)).map_err(|e| format!("the number of prompt tokens in all {e}"))?;
        Ok(())
    }

    /// A trace in the mix's dialects and policies, with the trace's times and lengths.
    pub fn plan_trace(&self, renderer: &Renderer, trace: &[TraceEntry]) -> Vec<Planned> {
        let one = |(n, entry): (usize, &TraceEntry)| {
            let (_, like) = self.shot(n as u64);
            let shot = Shot { prompt: entry.prompt_length, output: entry.output_length, ..like };
            let wire = renderer.wire(TRACE, 0, n as u64, &shot);
            Planned { due_s: entry.timestamp, wire, cancel: self.turn(n).1 }
        };
        trace.iter().enumerate().map(one).collect()
    }
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a.max(1), b.max(1));
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a.max(1) / x * b.max(1)
}

/// What an open-loop run gave.
#[derive(Debug, Default)]
pub struct OpenRun {
    /// One entry for the whole run and one a dialect.
    pub measured: Measured,
    /// Second by second.
    pub timeline: Vec<Second>,
    /// All requests by end.
    pub counts: Counts,
}

/// Sends every request when it is due and waits for all of them.
pub fn run(setup: &Setup<'_>, name: &str, plan: Vec<Planned>, progress: &ProgressBar) -> OpenRun {
    let fleet = setup.fleet();
    let total = plan.len();
    progress.set_length(total as u64);
    let mut records: Vec<Record> = Vec::with_capacity(total);
    let start = Instant::now() + Duration::from_millis(20);
    for (id, planned) in plan.into_iter().enumerate() {
        let due = start + Duration::from_secs_f64(planned.due_s);
        loop {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() || interrupt::raised() {
                break;
            }
            records.extend(fleet.next_within(left));
        }
        if interrupt::raised() {
            break;
        }
        fleet.submit(Job { id, wire: planned.wire, due, cancel: planned.cancel, milestone: None });
        progress.set_position(records.len() as u64);
        progress.set_message(format!("{} in flight", id + 1 - records.len()));
    }
    while records.len() < total {
        let Some(record) = fleet.next() else { break };
        records.push(record);
        progress.set_position(records.len() as u64);
    }
    conclude(setup, name, start, records)
}

fn conclude(setup: &Setup<'_>, name: &str, start: Instant, mut records: Vec<Record>) -> OpenRun {
    records.sort_by_key(|r| r.id);
    let mut run = OpenRun { timeline: timeline(start, &records), counts: Counts::of(&records), ..OpenRun::default() };
    if let Some(oracle) = setup.oracle {
        let mut verification = Verification::default();
        for record in &records {
            verification.add(oracle, name, record);
        }
        run.measured.verification = Some(verification);
    }
    let workload = |name: String| Workload { name, established: None, shots: Vec::new() };
    let whole = round_of(0, start, &records, Origin::Due);
    run.measured.push(workload(name.to_owned()), vec![whole], setup.objectives);
    let mut by_dialect: BTreeMap<Dialect, Vec<Record>> = BTreeMap::new();
    for record in records {
        by_dialect.entry(record.dialect).or_default().push(record);
    }
    if by_dialect.len() > 1 {
        for (dialect, records) in by_dialect {
            let round = round_of(0, start, &records, Origin::Due);
            run.measured.push(workload(format!("{name}/{}", dialect.name())), vec![round], &[]);
        }
    }
    run
}

fn timeline(start: Instant, records: &[Record]) -> Vec<Second> {
    let second = |at: Instant| at.saturating_duration_since(start).as_secs() as usize;
    let last = records.iter().map(|r| second(r.ended).max(second(r.due))).max();
    let mut seconds: Vec<Second> =
        (0..last.map_or(0, |l| l + 1)).map(|t| Second { t_s: t as u64, ..Second::default() }).collect();
    for record in records {
        seconds[second(record.due)].due += 1;
        let ended = &mut seconds[second(record.ended)];
        match record.outcome {
            Outcome::Completed => ended.completed += 1,
            Outcome::Refused { .. } => ended.refused += 1,
            Outcome::Cancelled => ended.cancelled += 1,
            Outcome::Failed { .. } => ended.failed += 1,
        }
        for &us in &record.event_us {
            let at = second(record.sent + Duration::from_micros(u64::from(us)));
            if let Some(second) = seconds.get_mut(at) {
                second.events += 1;
            }
        }
    }
    seconds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::arrivals::{Arrivals, Law};
    use crate::load::prompts::TokenRange;
    use crate::load::render::Seeding;
    use crate::load::stub::{Pace, Stub, StubOptions};
    use crate::load::target::Target;

    fn mix() -> Mix {
        Mix {
            dialects: Dialect::ALL.to_vec(),
            policies: Policy::ALL.to_vec(),
            prompts: SUSTAINED_PROMPTS.to_vec(),
            output: 4,
            variants: 2,
            cancel_every: 17,
            cancel_at: vec![CancelPoint::AtOnce, CancelPoint::AfterTokens(1)],
        }
    }

    fn renderer(options: StubOptions) -> Renderer {
        let stub = Stub::start(([127, 0, 0, 1], 0).into(), options).expect("a stub");
        let target = Target::new(&format!("http://{}", stub.address), None).expect("a target");
        let seeding = Seeding { seed: 1, token_range: TokenRange::default() };
        Renderer::unprobed(target, "stub", Dialect::Native, seeding)
    }

    fn setup(renderer: &Renderer) -> Setup<'_> {
        Setup { renderer, threads: 2, timeout: Duration::from_secs(20), objectives: &[], oracle: None }
    }

    #[test]
    fn the_oracles_requests_are_exactly_those_that_a_long_run_sends() {
        let (mix, renderer) = (mix(), renderer(StubOptions::default()));
        let keys = |wires: Vec<Wire>| -> std::collections::BTreeSet<String> {
            wires.iter().map(|w| w.key.to_string()).collect()
        };
        let sent = keys((0..2_000).map(|n| mix.wire(&renderer, n)).collect());
        let known = keys(mix.wires(&renderer));
        assert_eq!(sent, known);
        assert_eq!(known.len(), (5 + 3 + 3 + 4) * 4 * 2);
    }

    #[test]
    fn every_cancel_point_meets_every_dialect_and_every_prompt_length_equally_often() {
        let points = vec![
            CancelPoint::AtOnce,
            CancelPoint::AfterMs(20),
            CancelPoint::AfterTokens(1),
            CancelPoint::AfterTokens(8),
        ];
        // Distances that share every, some or no factor with the number of dialects; 17 is the default.
        for cancel_every in [1, 2, 3, 4, 6, 8, 16, 17, 20] {
            let mix = Mix { cancel_every, cancel_at: points.clone(), ..mix() };
            let mut pairs = BTreeMap::new();
            let mut lengths = BTreeMap::new();
            for n in 0..64 * cancel_every {
                let (dialect, Some(point)) = mix.turn(n) else { continue };
                let (_, shot) = mix.shot(n as u64);
                assert_eq!(shot.dialect, Some(dialect));
                *pairs.entry((dialect, format!("{point:?}"))).or_insert(0) += 1;
                *lengths.entry((shot.prompt, format!("{point:?}"))).or_insert(0) += 1;
            }
            assert!(pairs.len() == 16 && pairs.values().all(|&n| n == 4), "every {cancel_every}: {pairs:?}");
            let seen: std::collections::BTreeSet<u32> = lengths.keys().map(|(length, _)| *length).collect();
            assert!(lengths.len() == 4 * seen.len(), "every {cancel_every}: {lengths:?}");
        }
        let all = Mix { cancel_at: points, ..mix() }.all_cancelled();
        assert!((0..100).all(|n| all.turn(n).1.is_some()));
    }

    #[test]
    fn a_plan_of_nothing_or_of_too_much_is_refused_before_it_is_written() {
        assert!(mix().check(0).is_err_and(|e| e.contains("no request is due")));
        assert!(mix().check(1_000_000).is_ok() && mix().check(1_000_001).is_err());
        let long = Mix { prompts: vec![1 << 20], ..mix() };
        assert!(long.check(512).is_ok() && long.check(513).is_err());
    }

    #[test]
    fn every_seventeenth_is_cancelled_and_nothing_is_lost() {
        let pace = Pace::Every(Duration::from_millis(1));
        let renderer = renderer(StubOptions { pace, refuse_every: 5, ..StubOptions::default() });
        let due = Arrivals { law: Law::Poisson, rate: 400.0, burst: 1 }.schedule(0.5, 3);
        let run = run(&setup(&renderer), "sustained", mix().plan(&renderer, &due), &ProgressBar::hidden());
        let c = &run.counts;
        assert_eq!(c.submitted, due.len());
        assert_eq!(c.submitted, c.completed + c.refused + c.cancelled + c.failed);
        assert!(c.failed == 0 && c.refused > 0, "{c:?}");
        let planned = due.len() / 17;
        assert!(c.cancelled > 0 && c.cancelled <= planned, "{c:?}");
        let seconds = |figure: fn(&Second) -> usize| run.timeline.iter().map(figure).sum::<usize>();
        assert_eq!((seconds(|s| s.due), seconds(|s| s.completed)), (c.submitted, c.completed));
        assert_eq!(run.measured.workloads.len(), 5);
    }

    #[test]
    fn a_stall_of_the_server_shows_in_every_request_that_was_due_meanwhile() {
        // 20 requests 5 ms apart on a server that needs 100 ms each: from the due time none can be faster.
        let pace = Pace::Every(Duration::from_millis(25));
        let renderer = renderer(StubOptions { pace, ..StubOptions::default() });
        let due: Vec<f64> = (0..20).map(|i| f64::from(i) * 0.005).collect();
        let mix = Mix { cancel_every: 0, dialects: vec![Dialect::Native], ..mix() };
        let run = run(&setup(&renderer), "x", mix.plan(&renderer, &due), &ProgressBar::hidden());
        let round = &run.measured.workloads[0].rounds[0];
        assert!(round.requests.iter().all(|r| r.e2e_ms >= 100.0 && r.ttft_ms.is_some_and(|t| t >= 25.0)));
    }
}
