//! Closed loop: one round of a workload is one burst, and the next begins when the last of its requests has ended.
//!
//! Warm-ups first, then trials; the order of the workloads is reversed on every other round, so that a drift of the machine falls on
//! all of them alike.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::client::Fleet;
use super::interrupt;
use super::job::{Job, Milestone, Record, Wire};
use super::render::Renderer;
use super::workload::Workload;

/// Longest wait for the established stream to reach its trigger.
const TRIGGER_WAIT: Duration = Duration::from_secs(120);
/// Index of the established stream's prompt, apart from the shots'.
const STREAM_INDEX: u64 = u64::MAX;

/// Whether rounds repeat each other's prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum PromptReuse {
    /// Every round has prompts of its own: no prefix cache can answer.
    Fresh,
    /// All rounds ask the same.
    Same,
}

/// How often.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Rounds {
    /// Rounds that are not reported.
    pub warmups: usize,
    /// Rounds that are.
    pub trials: usize,
    /// Prompts across rounds.
    pub prompts: PromptReuse,
}

impl Rounds {
    /// The variant of a round's prompts.
    pub fn variant(&self, round: usize) -> u64 {
        if self.prompts == PromptReuse::Same { 0 } else { round as u64 }
    }

    /// Rounds in all.
    pub fn total(&self) -> usize {
        self.warmups + self.trials
    }
}

/// One round of one workload, as it was seen.
#[derive(Debug)]
pub struct Burst {
    /// Counted over warm-ups and trials.
    pub round: usize,
    /// The moment that the shots' times count from.
    pub start: Instant,
    /// The measured requests, in the order of the shots.
    pub records: Vec<Record>,
    /// The disturbed stream.
    pub stream: Option<Record>,
}

/// The requests of one round, the established stream's last.
pub fn wires(renderer: &Renderer, workload: &Workload, variant: u64) -> Vec<Wire> {
    let shots = workload.shots.iter().enumerate().map(|(i, shot)| (i as u64, shot));
    let stream = workload.established.iter().map(|e| (STREAM_INDEX, &e.shot));
    shots.chain(stream).map(|(index, shot)| renderer.wire(&workload.name, variant, index, shot)).collect()
}

/// Sends one round of a workload and waits for all of it.
pub fn run_burst(fleet: &Fleet, renderer: &Renderer, workload: &Workload, round: usize, variant: u64) -> Burst {
    let mut wires = wires(renderer, workload, variant);
    let stream_wire = wires.split_off(workload.shots.len()).pop();
    let mut jobs: Vec<(f64, Job)> =
        wires.into_iter().enumerate().map(|(i, wire)| (workload.shots[i].at_ms, Job::now(i, wire))).collect();
    jobs.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut expected = jobs.len();
    let stream_id = workload.shots.len();
    let mut records = Vec::with_capacity(expected + 1);
    if let (Some(established), Some(wire)) = (workload.established, stream_wire) {
        let (tell, told) = mpsc::channel();
        let milestone = Some(Milestone { token: established.trigger_token, tell });
        fleet.submit(Job { milestone, ..Job::now(stream_id, wire) });
        expected += 1;
        if told.recv_timeout(TRIGGER_WAIT).is_err() {
            // The stream ended early: its own record says why, and nothing was disturbed.
            let why = "the established stream did not reach its trigger token";
            records.extend((0..stream_id).map(|id| Record::failed(id, why.into())));
            jobs.clear();
        }
    }
    let start = Instant::now();
    for (at_ms, job) in jobs {
        let due = start + Duration::from_secs_f64(at_ms / 1e3);
        interrupt::sleep(due.saturating_duration_since(Instant::now()));
        fleet.submit(Job { due, ..job });
    }
    while records.len() < expected {
        let Some(record) = fleet.next() else { break };
        records.push(record);
    }
    records.sort_by_key(|r| r.id);
    let stream = records.iter().position(|r| r.id == stream_id).map(|at| records.remove(at));
    Burst { round, start, records, stream }
}

/// Runs all rounds of all workloads, warm-ups included. `begins` learns the round and the index of the workload, `done` gets the burst; a
/// burst during which the measurement was ended is not handed over.
pub fn run(
    fleet: &Fleet,
    renderer: &Renderer,
    workloads: &[Workload],
    rounds: Rounds,
    begins: impl Fn(usize, usize),
    mut done: impl FnMut(usize, Burst),
) {
    for round in 0..rounds.total() {
        for turn in 0..workloads.len() {
            let index = if round % 2 == 1 { workloads.len() - 1 - turn } else { turn };
            begins(round, index);
            let burst = run_burst(fleet, renderer, &workloads[index], round, rounds.variant(round));
            if interrupt::raised() {
                return;
            }
            done(index, burst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::dialect::{Capture, Dialect};
    use crate::load::job::Outcome;
    use crate::load::prompts::TokenRange;
    use crate::load::render::Seeding;
    use crate::load::stub::{Pace, Stub, StubOptions};
    use crate::load::target::Target;

    fn against_stub(options: StubOptions) -> (Fleet, Renderer) {
        let stub = Stub::start(([127, 0, 0, 1], 0).into(), options).expect("a stub");
        let target = Target::new(&format!("http://{}", stub.address), None).expect("a target");
        let fleet = Fleet::start(target.address, 2, Capture::Outputs, Duration::from_secs(20));
        let seeding = Seeding { seed: 1, token_range: TokenRange::default() };
        (fleet, Renderer::unprobed(target, "stub", Dialect::Native, seeding))
    }

    #[test]
    fn the_order_of_the_workloads_is_reversed_on_every_other_round() {
        let (fleet, renderer) = against_stub(StubOptions::default());
        let workloads: Vec<Workload> =
            ["tiny-2x1", "isolated-8", "mixed-8"].map(|n| Workload::named(n).expect(n)).into();
        let rounds = Rounds { warmups: 1, trials: 2, prompts: PromptReuse::Fresh };
        let mut order = Vec::new();
        let begun = std::cell::RefCell::new(Vec::new());
        let begins = |round, index| begun.borrow_mut().push((round, index));
        run(&fleet, &renderer, &workloads, rounds, begins, |index, burst| {
            assert!(burst.records.iter().all(|r| r.outcome == Outcome::Completed));
            assert_eq!(burst.records.len(), workloads[index].shots.len());
            order.push((burst.round, index));
        });
        assert_eq!(*begun.borrow(), order, "each is named before it runs");
        assert_eq!(order, [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0), (2, 0), (2, 1), (2, 2)]);
    }

    #[test]
    fn arrivals_wait_for_the_stream_to_reach_its_trigger() {
        let pace = Pace::Every(Duration::from_millis(2));
        let (fleet, renderer) = against_stub(StubOptions { pace, ..StubOptions::default() });
        let burst = run_burst(&fleet, &renderer, &Workload::named("stall-33").expect("stall"), 0, 0);
        let stream = burst.stream.expect("the stream");
        let trigger = stream.sent + Duration::from_micros(u64::from(stream.event_us[31]));
        assert!(burst.records[0].sent >= trigger, "sent before the stream's token 32");
        assert_eq!((burst.records[0].output_tokens, stream.output_tokens), (8, 256));
    }

    #[test]
    fn refusals_and_broken_streams_are_told_apart() {
        let (fleet, renderer) = against_stub(StubOptions { refuse_every: 3, break_every: 4, ..StubOptions::default() });
        let burst = run_burst(&fleet, &renderer, &Workload::named("long-8x8").expect("long"), 0, 0);
        let refused = burst.records.iter().filter(|r| r.outcome == Outcome::Refused { status: 429 });
        assert_eq!(refused.clone().count(), 2);
        assert!(refused.clone().all(|r| r.has_retry_after));
        let failed = burst.records.iter().filter(|r| matches!(r.outcome, Outcome::Failed { .. }));
        assert_eq!(failed.count(), 2);
    }
}
