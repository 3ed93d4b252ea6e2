//! What had to hold, and the promises that every kind of measurement makes: none fails, the account balances, the pages are back, the
//! outputs are the oracle's, and it ran to its end. Pure.

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::WorkloadReport;
use crate::load::figures::Counts;
use crate::load::growth::{ServerGrowth, tells_uptime};
use crate::load::job::Outcome;
use crate::load::oracle::Verification;
use crate::load::watch::{PageCheck, counter};

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
    /// A check that passed when `holds`.
    pub fn when(holds: bool, name: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { name: name.into(), passed: holds, detail: detail.into() }
    }

    /// A check that did not hold.
    pub fn failed(name: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::when(false, name, detail)
    }
}

/// The measurement ran to its end; present only when it did not.
pub fn of_end(cause: Option<&str>) -> Option<Check> {
    cause.map(|cause| Check::failed("the measurement ran to its end", format!("cut short: {cause}")))
}

/// No request fails, and something comes of every workload.
pub fn of_requests(workloads: &[WorkloadReport]) -> [Check; 2] {
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
    [
        Check::when(total.failed == 0, "no request fails", detail),
        Check::when(barren.is_empty() && !workloads.is_empty(), "requests complete, with tokens", came),
    ]
}

/// Why nothing came of a workload; `None` when a request completed, with a token.
fn barren(workload: &WorkloadReport) -> Option<String> {
    let (name, counts) = (&workload.workload.name, &workload.summary.counts);
    let tokens: u64 = workload.rounds.iter().map(|r| r.output_tokens).sum();
    let Counts { submitted, completed, refused, cancelled, failed, .. } = *counts;
    if submitted == 0 {
        return Some(format!("{name}: no request was sent"));
    }
    if completed == 0 {
        let others = format!("{refused} refused, {cancelled} cancelled, {failed} failed");
        return Some(format!("{name}: none of {submitted} completed, {others}"));
    }
    (tokens == 0).then(|| format!("{name}: {completed} completed without a token"))
}

/// The server's own account balances over the run (I2), in one process; only where it told one before. `elapsed` is the time between the looks.
pub fn of_account(before: Option<&Value>, after: Option<&Value>, elapsed: Duration) -> Option<Check> {
    let name = "the server's account balances";
    match ServerGrowth::tried(before, after, elapsed) {
        Ok(growth) => growth.map(|growth| Check::when(growth.balances(), name, growth.account())),
        Err(why) => Some(Check::failed(name, why)),
    }
}

/// How far a restart of the target would have been seen; that fails nothing, and is absent where the target tells how long it runs.
pub fn of_restart(before: Option<&Value>) -> Option<Check> {
    let told = match before {
        Some(stats) if tells_uptime(stats) => return None,
        Some(_) => "/stats tells no uptime_seconds: a restart could not be seen, but for a counter that fell",
        None => "it has no /stats: a restart could not be seen",
    };
    Some(Check::when(true, "the target is one process, as far as it tells", told))
}

/// Every page is back; only where the server told of pages before. One that tells no more has failed.
pub fn of_pages(before: Option<&Value>, pages: Option<&PageCheck>) -> Option<Check> {
    let name = "every page is back";
    let Some(p) = pages else {
        counter(before?, "kv_pages_free")?;
        return Some(Check::failed(
            name,
            "/stats told of pages before the run and does not after it; did the server end?",
        ));
    };
    let detail = format!(
        "{} free before, {} after, {} used, {} requests inside",
        p.free_before, p.free_after, p.used_after, p.live_after
    );
    Some(Check::when(p.passed(), name, detail))
}

/// Every output equals the oracle.
pub fn of_verification(v: &Verification) -> Check {
    let mut detail = format!(
        "{} outputs and {} token ids compared, {} different, {} unknown",
        v.compared, v.token_ids_compared, v.different, v.unknown
    );
    if v.unseeded > 0 {
        detail.push_str(&format!(", {} drawn without a seed and not compared", v.unseeded));
    }
    Check::when(v.passed(), "every output equals the oracle", detail)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_server_that_told_of_pages_and_tells_no_more_has_not_given_them_back() {
        let before = json!({"kv_pages_free": 32});
        assert_eq!(of_pages(Some(&before), None).map(|c| c.passed), Some(false));
        assert_eq!(of_pages(Some(&json!({})), None), None, "a peer without pages");
        assert_eq!(of_pages(None, None), None);
        let back = PageCheck { free_before: 32, free_after: 32, used_after: 0, live_after: 0 };
        assert_eq!(of_pages(Some(&before), Some(&back)).map(|c| c.passed), Some(true));
    }

    #[test]
    fn nothing_comes_of_a_measurement_without_a_workload() {
        assert_eq!(of_requests(&[]).map(|c| c.passed), [true, false]);
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
        assert_eq!(
            barren(&workload(3, 0, 3)).as_deref(),
            Some("w: none of 3 completed, 3 refused, 0 cancelled, 0 failed")
        );
        assert_eq!(barren(&workload(3, 2, 1)).as_deref(), Some("w: 2 completed without a token"));
        let mut cancelled = workload(3, 0, 0);
        cancelled.summary.counts.cancelled = 3;
        let why = barren(&cancelled);
        assert_eq!(why.as_deref(), Some("w: none of 3 completed, 0 refused, 3 cancelled, 0 failed"));
    }

    #[test]
    fn a_counter_that_went_away_or_back_is_no_balance() {
        let stats = |n: u64| {
            json!({"accepted_requests": n, "completed_requests": n, "cancelled_requests": 0, "failed_requests": 0,
                "rejected_requests": 0})
        };
        let of = |before, after| of_account(Some(&before), Some(&after), Duration::ZERO).map(|c| (c.passed, c.detail));
        assert_eq!(of(stats(2), stats(5)).map(|c| c.0), Some(true));
        assert_eq!(of(json!({}), stats(5)), None, "a server without such counters is not judged by them");
        assert!(of(stats(2), json!({})).is_some_and(|(passed, why)| !passed && why.contains("did the server end?")));
        assert!(of(stats(5), stats(2)).is_some_and(|(passed, why)| !passed && why.contains("started again")));
    }
}
