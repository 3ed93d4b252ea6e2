//! How far the server's own counters went between two looks at its /stats. A counter that is not told, or that fell because another
//! process answers, is absent: never 0. Pure.

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::watch::counter;

/// What /stats calls the seconds since the server's start.
const UPTIME: &str = "uptime_seconds";
/// An uptime may fall behind this client's clock by so much and by a thousandth of the time between, and be the same process's.
const UPTIME_MARGIN_S: f64 = 1.0;

/// Whether /stats tells how long its process runs, by which a restart between two looks at it is seen.
pub fn tells_uptime(stats: &Value) -> bool {
    stats.get(UPTIME).and_then(Value::as_f64).is_some()
}

/// The same process answered both times, as its uptime tells; `elapsed` is the time from the first answer to the second question.
///
/// # Errors
/// The uptime is told no more, or grew by less than the time that went by: the server was started again.
fn same_process(before: Option<&Value>, after: Option<&Value>, elapsed: Duration) -> Result<(), String> {
    let uptime = |stats: Option<&Value>| stats.and_then(|s| s.get(UPTIME)).and_then(Value::as_f64);
    let Some(before) = uptime(before) else { return Ok(()) };
    let Some(after) = uptime(after) else {
        return Err(format!("/stats told {UPTIME} before the run and does not after it; did the server end?"));
    };
    let (grown, elapsed) = (after - before, elapsed.as_secs_f64());
    if grown + UPTIME_MARGIN_S + elapsed / 1e3 >= elapsed {
        return Ok(());
    }
    Err(format!("{UPTIME} grew by {grown:.1} in {elapsed:.1} s; was the server started again?"))
}

/// How much one counter grew; `None` when it was not told before.
///
/// # Errors
/// It was there before and is not after, or is less: the server has gone or begun anew.
pub fn grown(before: Option<&Value>, after: Option<&Value>, name: &str) -> Result<Option<u64>, String> {
    let Some(before) = before.and_then(|s| counter(s, name)) else { return Ok(None) };
    let Some(after) = after.and_then(|s| counter(s, name)) else {
        return Err(format!("/stats told {name} before the run and does not after it; did the server end?"));
    };
    let less = || format!("{name} was {before} before the run and is {after}; was the server started again?");
    after.checked_sub(before).map(Some).ok_or_else(less)
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
    pub packed_batches: Option<u64>,
}

impl ServerGrowth {
    /// From one look to the next, so long after it; `None` when one of them is missing, does not count requests, or is another process's.
    pub fn between(before: Option<&Value>, after: Option<&Value>, elapsed: Duration) -> Option<Self> {
        Self::tried(before, after, elapsed).ok().flatten()
    }

    /// As `between`.
    ///
    /// # Errors
    /// As `grown`: what was told before is told no more; or the server was started again between.
    pub fn tried(before: Option<&Value>, after: Option<&Value>, elapsed: Duration) -> Result<Option<Self>, String> {
        let names =
            ["accepted_requests", "completed_requests", "cancelled_requests", "failed_requests", "rejected_requests"];
        let mut counts = [0; 5];
        for (count, name) in counts.iter_mut().zip(names) {
            let Some(growth) = grown(before, after, name)? else { return Ok(None) };
            *count = growth;
        }
        same_process(before, after, elapsed)?;
        let [accepted, completed, cancelled, failed, refused] = counts;
        let packed_batches = grown(before, after, "packed_prefill_batches").ok().flatten();
        Ok(Some(Self { accepted, completed, cancelled, failed, refused, packed_batches }))
    }

    /// Everything that entered has ended in one way.
    pub fn balances(&self) -> bool {
        self.accepted == self.completed + self.cancelled + self.failed
    }

    /// The balance as an equation.
    pub fn account(&self) -> String {
        let Self { accepted, completed, cancelled, failed, .. } = self;
        format!("{accepted} accepted = {completed} completed + {cancelled} cancelled + {failed} failed")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn stats(accepted: u64, completed: u64) -> Value {
        json!({"accepted_requests": accepted, "completed_requests": completed, "cancelled_requests": 0,
            "failed_requests": 0, "rejected_requests": 0})
    }

    #[test]
    fn what_is_not_told_or_fell_is_absent_and_not_0() {
        let (before, after) = (stats(3, 3), stats(5, 4));
        let between = |before, after| ServerGrowth::between(before, after, Duration::from_secs(60));
        let growth = between(Some(&before), Some(&after)).expect("counters");
        assert_eq!((growth.accepted, growth.completed, growth.packed_batches), (2, 1, None));
        assert!(!growth.balances());
        assert_eq!(between(Some(&before), None), None);
        assert_eq!(between(Some(&after), Some(&before)), None, "another server");
        assert_eq!(between(Some(&json!({})), Some(&after)), None);
    }

    #[test]
    fn a_process_that_is_younger_than_the_run_is_another_whatever_its_counters_say() {
        let at = |uptime: f64, completed: u64| {
            let mut stats = stats(completed, completed);
            stats["uptime_seconds"] = json!(uptime);
            stats
        };
        let tried = |before: f64, after: f64| {
            ServerGrowth::tried(Some(&at(before, 3)), Some(&at(after, 13)), Duration::from_secs(60))
                .map(|g| g.is_some())
        };
        assert_eq!(tried(5.0, 65.0), Ok(true));
        assert_eq!(tried(5.0, 70.0), Ok(true), "the looks themselves take time");
        assert_eq!(tried(5.0, 64.2), Ok(true), "clocks differ a little, and an uptime may be whole seconds");
        let restarted = Err("uptime_seconds grew by 25.0 in 60.0 s; was the server started again?".into());
        assert_eq!(tried(5.0, 30.0), restarted, "it is older than before, and not the same");
        let untold = ServerGrowth::tried(Some(&at(5.0, 3)), Some(&stats(5, 5)), Duration::ZERO);
        assert!(untold.is_err_and(|why| why.contains("did the server end?")));
    }
}
