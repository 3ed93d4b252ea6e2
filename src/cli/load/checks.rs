//! What a run must keep beyond its own objectives: requests that complete and none that fails, a balanced account on the server, the
//! bounds of queue and pool. What a target tells before a run it must tell after it: a check that can no longer be made has failed.

use serde_json::Value;

use crate::load::dialect::Dialect;
use crate::load::figures::Counts;
use crate::load::growth;
use crate::load::report::{Check, Report, check};
use crate::load::target::given_up;
use crate::load::watch::{ServerSample, counter};

fn grown(report: &Report, name: &str) -> Result<Option<u64>, String> {
    growth::grown(report.stats_before.as_ref(), report.stats_after.as_ref(), name)
}

fn last(stats: Option<&Value>, name: &str) -> Option<u64> {
    stats.and_then(|s| counter(s, name))
}

fn shown(value: Option<u64>) -> String {
    value.map_or("unknown".into(), |v| v.to_string())
}

/// What was given up to be answered at all, as the report's readers must know it.
pub fn given_up_for(report: &Report) -> Vec<String> {
    let of = |dialect: Dialect| report.target.dialects.get(&dialect).map(|&takes| given_up(dialect, takes));
    let told =
        |dialect: Dialect| of(dialect).into_iter().flatten().map(move |lost| format!("{}: {lost}", dialect.name()));
    Dialect::ALL.into_iter().flat_map(told).collect()
}

/// Says in the report what was given up; that fails nothing.
pub fn of_target(report: &mut Report) {
    let given_up = given_up_for(report);
    if !given_up.is_empty() {
        report.checks.push(Check::when(true, "requests are what the target takes", given_up.join("; ")));
    }
}

/// No request fails, and something comes of every one of the first `count` workloads; in open loop the others are parts of the first.
pub fn of_requests(report: &mut Report, count: usize) {
    let checks = check::of_requests(&report.workloads[..count.min(report.workloads.len())]);
    report.checks.extend(checks);
}

/// Open loop: nothing fails, client and server count the same, and overload refuses within the queue's bound.
pub fn of_open_loop(report: &mut Report, counts: &Counts, queue: Option<u64>) {
    of_requests(report, 1);
    // A request that its client gave up at once may have been refused without the client's seeing it.
    let (low, high) = (counts.refused as u64, (counts.refused + counts.cancelled) as u64);
    let agreed = grown(report, "rejected_requests").map(|grown| {
        grown.map(|refused| {
            let detail = format!("{refused} refused by the server, {low} seen by the client");
            ((low..=high).contains(&refused), detail)
        })
    });
    if let Some((passed, detail)) = agreed.unwrap_or_else(|why| Some((false, why))) {
        report.checks.push(Check::when(passed, "refusals agree", detail));
    }
    if report.kind != "overload" {
        return;
    }
    let silent = counts.refused_without_retry_after;
    let detail = format!("{} refused, {silent} of them without Retry-After", counts.refused);
    report.checks.push(Check::when(
        counts.refused > 0 && silent == 0,
        "overload is refused, and told when to retry",
        detail,
    ));
    if let Some(bound) = queue {
        report.checks.push(queue_reaches(report, bound));
    }
    if let Ok(Some(packed)) = grown(report, "packed_prefill_batches") {
        report.checks.push(Check::when(packed > 0, "prefill is packed under load", format!("{packed} packed batches")));
    }
}

/// A figure of this run alone, whatever the server saw before: a lifetime peak that grew was reached in the run, otherwise the greatest
/// sample of its gauge tells.
struct Peak {
    before: Option<u64>,
    after: Option<u64>,
    sampled: Option<u64>,
}

impl Peak {
    fn of(report: &Report, lifetime: &str, gauge: fn(&ServerSample) -> Option<u64>) -> Self {
        Self {
            before: last(report.stats_before.as_ref(), lifetime),
            after: last(report.stats_after.as_ref(), lifetime),
            sampled: report.observed.server.iter().filter_map(gauge).max(),
        }
    }

    fn in_run(&self) -> Option<u64> {
        if self.after > self.before { self.after } else { self.after.and(self.sampled) }
    }

    fn told(&self) -> String {
        format!(
            "{} before the run, {} after it, {} in its samples",
            shown(self.before),
            shown(self.after),
            shown(self.sampled)
        )
    }
}

fn queue_reaches(report: &Report, bound: u64) -> Check {
    let peak = Peak::of(report, "queue_peak", |s| s.queued);
    let refused = grown(report, "rejected_requests").ok().flatten().unwrap_or(0);
    // A refusal says that the queue was full at that moment, even between two samples of it; a queue is full at one length only.
    let was_full = refused > 0 && peak.after == Some(bound);
    let reached = peak.in_run() == Some(bound) || was_full && peak.in_run().is_none_or(|p| p <= bound);
    let detail = format!("queue_peak {}, {refused} refused, bound {bound}", peak.told());
    Check::when(reached, "the queue reaches its bound and no more", detail)
}

/// The pressure burst: answered or refused, within pool and queue.
pub fn of_pressure(report: &mut Report, pages: u64, queue: u64) {
    let Some(counts) = report.workloads.first().map(|w| w.summary.counts.clone()) else { return };
    let Counts { submitted, completed, refused, refused_without_retry_after, failed, .. } = counts;
    let detail = format!("{submitted} sent = {completed} completed + {refused} refused, {failed} failed");
    let both = completed > 0 && refused > 0 && completed + refused == submitted && failed == 0;
    report.checks.push(Check::when(both, "every request is answered or refused, and both occur", detail));
    let detail = format!("{refused_without_retry_after} refusals without Retry-After");
    report.checks.push(Check::when(refused_without_retry_after == 0, "refusals say when to retry", detail));
    report.checks.push(queue_reaches(report, queue));
    let peak = Peak::of(report, "kv_pages_peak", |s| s.pages_used);
    let held = peak.in_run().is_some_and(|p| p <= pages);
    let detail = format!("kv_pages_peak {}, pages {pages}", peak.told());
    report.checks.push(Check::when(held, "the pool is never exceeded", detail));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::load::prompts::TokenRange;
    use crate::load::render::{Renderer, Seeding};
    use crate::load::report::{ClientFacts, WorkloadReport};
    use crate::load::target::Target;

    /// A report of nothing, with what the server told before and after and how long its queue was in the samples.
    fn report(kind: &'static str, before: Value, after: Value, queued: &[u64]) -> Report {
        let target = Target::new("http://127.0.0.1:9", None).expect("a target");
        let seeding = Seeding { seed: 1, token_range: TokenRange::default() };
        let mut report = Report::begin(
            kind,
            &Renderer::unprobed(target, "m", Dialect::Native, seeding),
            ClientFacts::here(1),
            json!({}),
        );
        (report.stats_before, report.stats_after) = (Some(before), Some(after));
        let sample = |&queued: &u64| ServerSample {
            t_s: 0.0,
            active: Some(1),
            queued: Some(queued),
            pages_used: Some(2 * queued),
            pages_free: None,
            tokens: None,
        };
        report.observed.server = queued.iter().map(sample).collect();
        report
    }

    fn queue(before: u64, after: u64, refused: u64, queued: &[u64]) -> bool {
        let stats = |peak: u64, rejected: u64| json!({"queue_peak": peak, "rejected_requests": rejected});
        queue_reaches(&report("overload", stats(before, 5), stats(after, 5 + refused), queued), 4).passed
    }

    #[test]
    fn the_peak_of_an_earlier_run_says_nothing_of_this_one() {
        assert!(queue(0, 4, 3, &[]), "it grew to the bound");
        assert!(!queue(0, 3, 0, &[3]) && !queue(0, 5, 3, &[5]));
        assert!(!queue(4, 4, 0, &[1, 2, 1]), "an earlier run reached it, this one did not");
        assert!(queue(4, 4, 0, &[1, 4, 1]), "a sample saw it");
        assert!(queue(4, 4, 2, &[1, 3]), "a refusal says so");
        assert!(
            !queue(9, 9, 2, &[4, 5]) && queue(9, 9, 0, &[4]),
            "an earlier peak does not fail this run, its own does"
        );
        assert!(!queue(4, 4, 0, &[]), "nothing is known");
    }

    #[test]
    fn pressure_is_judged_by_its_own_pages() {
        let stats = |pages: u64| json!({"queue_peak": 4, "kv_pages_peak": pages, "rejected_requests": 0});
        let passed = |before, after, queued: &[u64]| {
            let mut report = report("pressure", stats(before), stats(after), queued);
            report.workloads = vec![workload(9, 5, 4)];
            of_pressure(&mut report, 8, 4);
            report.checks.into_iter().find(|c| c.name == "the pool is never exceeded").expect("the check").passed
        };
        assert!(passed(0, 8, &[4]) && !passed(0, 9, &[4]));
        assert!(passed(100, 100, &[4]), "an earlier run used more");
        assert!(!passed(100, 100, &[5]) && !passed(100, 100, &[]));
    }

    fn workload(submitted: usize, completed: usize, refused: usize) -> WorkloadReport {
        let counts = Counts { submitted, completed, refused, ..Counts::default() };
        let workload = crate::load::workload::Workload { name: "w".into(), established: None, shots: Vec::new() };
        let summary = crate::load::figures::Summary { counts, ..Default::default() };
        WorkloadReport { workload, rounds: Vec::new(), summary, goodput_per_s: Vec::new() }
    }
}
