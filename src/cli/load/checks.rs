//! What a run must keep beyond its own objectives: no failures, a balanced account on the server, the bounds of queue and pool.

use serde_json::Value;

use crate::load::figures::Counts;
use crate::load::report::{Check, Report};
use crate::load::watch::counter;

/// How much a counter of /stats grew over the run.
fn grown(report: &Report, name: &str) -> Option<u64> {
    let (before, after) = (report.stats_before.as_ref()?, report.stats_after.as_ref()?);
    counter(after, name)?.checked_sub(counter(before, name)?)
}

fn last(stats: Option<&Value>, name: &str) -> Option<u64> {
    stats.and_then(|s| counter(s, name))
}

fn shown(value: Option<u64>) -> String {
    value.map_or("unknown".into(), |v| v.to_string())
}

/// No request of a closed loop fails.
pub fn no_failures(report: &mut Report) {
    let failed: usize = report.workloads.iter().map(|w| w.summary.counts.failed).sum();
    let first = report.workloads.iter().flat_map(|w| &w.rounds).flat_map(|r| &r.requests).find_map(|q| {
        if let crate::load::job::Outcome::Failed { message } = &q.outcome { Some(message.clone()) } else { None }
    });
    let detail = first.map_or(format!("{failed} failed"), |message| format!("{failed} failed, first: {message}"));
    report.checks.push(Check::new("no request fails", failed == 0, detail));
}

/// The server's own account balances over the run (I2); only where it has one.
pub fn of_account(report: &mut Report) {
    let Some(accepted) = grown(report, "accepted_requests") else { return };
    let ends = ["completed_requests", "cancelled_requests", "failed_requests"].map(|n| grown(report, n));
    let [Some(completed), Some(cancelled), Some(failed)] = ends else { return };
    let detail = format!("{accepted} accepted = {completed} completed + {cancelled} cancelled + {failed} failed");
    let balanced = accepted == completed + cancelled + failed;
    report.checks.push(Check::new("the server's account balances", balanced, detail));
}

/// Open loop: nothing fails, client and server count the same, and overload refuses within the queue's bound.
pub fn of_open_loop(report: &mut Report, counts: &Counts, queue: Option<u64>) {
    no_failures(report);
    if let Some(refused) = grown(report, "rejected_requests") {
        // A request that its client gave up at once may have been refused without the client's seeing it.
        let (low, high) = (counts.refused as u64, (counts.refused + counts.cancelled) as u64);
        let detail = format!("{refused} refused by the server, {low} seen by the client");
        report.checks.push(Check::new("refusals agree", (low..=high).contains(&refused), detail));
    }
    if report.kind != "overload" {
        return;
    }
    let detail =
        format!("{} refused, {} of them without Retry-After", counts.refused, counts.refused_without_retry_after);
    report.checks.push(Check::new("overload is refused", counts.refused > 0, detail));
    let stats = report.stats_after.as_ref();
    if let Some(bound) = queue {
        let peak = last(stats, "queue_peak");
        let detail = format!("queue_peak {}, bound {bound}", shown(peak));
        report.checks.push(Check::new("the queue reaches its bound and no more", peak == Some(bound), detail));
    }
    if let Some(packed) = grown(report, "packed_prefill_batches") {
        report.checks.push(Check::new("prefill is packed under load", packed > 0, format!("{packed} packed batches")));
    }
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
    let stats = report.stats_after.as_ref();
    let (queue_peak, pages_peak) = (last(stats, "queue_peak"), last(stats, "kv_pages_peak"));
    let detail = format!("queue_peak {}, bound {queue}", shown(queue_peak));
    let queue_held = queue_peak == Some(queue);
    let pages_held = pages_peak.is_some_and(|p| p <= pages);
    report.checks.push(Check::new("the queue reaches its bound and no more", queue_held, detail));
    let detail = format!("kv_pages_peak {}, pages {pages}", shown(pages_peak));
    report.checks.push(Check::new("the pool is never exceeded", pages_held, detail));
}
