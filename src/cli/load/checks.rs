//! What a run must keep beyond its own objectives: requests that complete and none that fails, a balanced account on the server, the
//! bounds of queue and pool. What a target tells before a run it must tell after it: a check that can no longer be made has failed.

use serde_json::Value;

use crate::load::dialect::Dialect;
use crate::load::figures::Counts;
use crate::load::job::Outcome;
use crate::load::report::{Check, Report, WorkloadReport};
use crate::load::target::given_up;
use crate::load::watch::{ServerSample, counter};

/// How much a counter of /stats grew over the run.
///
/// # Errors
/// It was there before the run and is not after it, or is less: the server has gone or begun anew.
fn grown(report: &Report, name: &str) -> Result<Option<u64>, String> {
    let Some(before) = last(report.stats_before.as_ref(), name) else { return Ok(None) };
    let Some(after) = last(report.stats_after.as_ref(), name) else {
        return Err(format!("/stats told {name} before the run and does not after it; did the server end?"));
    };
    let less = || format!("{name} was {before} before the run and is {after}; was the server started again?");
    after.checked_sub(before).map(Some).ok_or_else(less)
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
        report.checks.push(Check::new("requests are what the target takes", true, given_up.join("; ")));
    }
}

/// No request fails, and something comes of every one of the first `count` workloads; in open loop the others are parts of the first.
pub fn of_requests(report: &mut Report, count: usize) {
    let workloads = &report.workloads[..count.min(report.workloads.len())];
    let total: Counts = workloads.iter().map(|w| w.summary.counts.clone()).sum();
    let failure = |w: &WorkloadReport| {
        w.rounds.iter().flat_map(|r| &r.requests).find_map(|q| match &q.outcome {
            Outcome::Failed { message } => Some(format!(", first: {}: {message}", w.workload.name)),
            Outcome::Completed | Outcome::Refused { .. } | Outcome::Cancelled => None,
        })
    };
    let first = workloads.iter().find_map(failure).unwrap_or_default();
    let detail = format!("{} of {} failed{first}", total.failed, total.submitted);
    let barren: Vec<String> = workloads.iter().filter_map(barren).collect();
    let came = if barren.is_empty() { format!("{} completed", total.completed) } else { barren.join("; ") };
    report.checks.push(Check::new("no request fails", total.failed == 0, detail));
    report.checks.push(Check::new("requests complete, with tokens", barren.is_empty() && count > 0, came));
}

/// Why nothing came of a workload; `None` when something did, or when all of its requests were to be cancelled and were.
fn barren(workload: &WorkloadReport) -> Option<String> {
    let (name, counts) = (&workload.workload.name, &workload.summary.counts);
    let tokens: u64 = workload.rounds.iter().map(|r| r.output_tokens).sum();
    let Counts { submitted, completed, refused, cancelled, failed, .. } = *counts;
    if submitted == 0 {
        return Some(format!("{name}: no request was sent"));
    }
    if completed == 0 && cancelled < submitted {
        return Some(format!("{name}: none of {submitted} completed, {refused} refused, {failed} failed"));
    }
    (completed > 0 && tokens == 0).then(|| format!("{name}: {completed} completed without a token"))
}

/// The server's own account balances over the run (I2), and its pages could be counted; only where it told of them before.
pub fn of_account(report: &mut Report) {
    if report.pages.is_none() && last(report.stats_before.as_ref(), "kv_pages_free").is_some() {
        let detail = "/stats told of pages before the run and does not after it; did the server end?";
        report.checks.push(Check::new("every page is back", false, detail));
    }
    if let Some(check) = balance(report) {
        report.checks.push(check);
    }
}

fn balance(report: &Report) -> Option<Check> {
    let name = "the server's account balances";
    let [accepted, completed, cancelled, failed] =
        ["accepted_requests", "completed_requests", "cancelled_requests", "failed_requests"].map(|n| grown(report, n));
    let (accepted, completed, cancelled, failed) = match (accepted, completed, cancelled, failed) {
        (Ok(Some(accepted)), Ok(Some(completed)), Ok(Some(cancelled)), Ok(Some(failed))) => {
            (accepted, completed, cancelled, failed)
        }
        (Err(why), ..) | (_, Err(why), ..) | (_, _, Err(why), _) | (.., Err(why)) => {
            return Some(Check::new(name, false, why));
        }
        _ => return None,
    };
    let detail = format!("{accepted} accepted = {completed} completed + {cancelled} cancelled + {failed} failed");
    Some(Check::new(name, accepted == completed + cancelled + failed, detail))
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
        report.checks.push(Check::new("refusals agree", passed, detail));
    }
    if report.kind != "overload" {
        return;
    }
    let silent = counts.refused_without_retry_after;
    let detail = format!("{} refused, {silent} of them without Retry-After", counts.refused);
    report.checks.push(Check::new(
        "overload is refused, and told when to retry",
        counts.refused > 0 && silent == 0,
        detail,
    ));
    if let Some(bound) = queue {
        report.checks.push(queue_reaches(report, bound));
    }
    if let Ok(Some(packed)) = grown(report, "packed_prefill_batches") {
        report.checks.push(Check::new("prefill is packed under load", packed > 0, format!("{packed} packed batches")));
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
    Check::new("the queue reaches its bound and no more", reached, detail)
}

/// The pressure burst: answered or refused, within pool and queue.
pub fn of_pressure(report: &mut Report, pages: u64, queue: u64) {
    let Some(counts) = report.workloads.first().map(|w| w.summary.counts.clone()) else { return };
    let Counts { submitted, completed, refused, refused_without_retry_after, failed, .. } = counts;
    let detail = format!("{submitted} sent = {completed} completed + {refused} refused, {failed} failed");
    let both = completed > 0 && refused > 0 && completed + refused == submitted && failed == 0;
    report.checks.push(Check::new("every request is answered or refused, and both occur", both, detail));
    let detail = format!("{refused_without_retry_after} refusals without Retry-After");
    report.checks.push(Check::new("refusals say when to retry", refused_without_retry_after == 0, detail));
    report.checks.push(queue_reaches(report, queue));
    let peak = Peak::of(report, "kv_pages_peak", |s| s.pages_used);
    let held = peak.in_run().is_some_and(|p| p <= pages);
    let detail = format!("kv_pages_peak {}, pages {pages}", peak.told());
    report.checks.push(Check::new("the pool is never exceeded", held, detail));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::load::prompts::TokenRange;
    use crate::load::render::{Renderer, Seeding};
    use crate::load::target::Target;

    /// A report of nothing, with what the server told before and after and how long its queue was in the samples.
    fn report(kind: &'static str, before: Value, after: Value, queued: &[u64]) -> Report {
        let target = Target::new("http://127.0.0.1:9", None).expect("a target");
        let seeding = Seeding { seed: 1, token_range: TokenRange::default() };
        let mut report = Report::begin(kind, &Renderer::unprobed(target, "m", Dialect::Native, seeding), 1, json!({}));
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

    #[test]
    fn a_workload_of_which_nothing_came_is_named() {
        assert_eq!(barren(&workload(0, 0, 0)).as_deref(), Some("w: no request was sent"));
        assert_eq!(barren(&workload(3, 0, 3)).as_deref(), Some("w: none of 3 completed, 3 refused, 0 failed"));
        assert_eq!(barren(&workload(3, 2, 1)).as_deref(), Some("w: 2 completed without a token"));
        let mut cancelled = workload(3, 0, 0);
        cancelled.summary.counts.cancelled = 3;
        assert_eq!(barren(&cancelled), None, "all were to be cancelled");
    }

    #[test]
    fn a_counter_that_went_away_or_back_is_no_balance() {
        let stats = |n: u64| json!({"accepted_requests": n, "completed_requests": n, "cancelled_requests": 0, "failed_requests": 0});
        let of = |before, after| balance(&report("run", before, after, &[])).map(|c| (c.passed, c.detail));
        assert_eq!(of(stats(2), stats(5)).map(|c| c.0), Some(true));
        assert_eq!(of(json!({}), stats(5)), None, "a server without such counters is not judged by them");
        assert!(of(stats(2), json!({})).is_some_and(|(passed, why)| !passed && why.contains("did the server end?")));
        assert!(of(stats(5), stats(2)).is_some_and(|(passed, why)| !passed && why.contains("started again")));
    }
}
