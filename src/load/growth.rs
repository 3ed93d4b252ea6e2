//! How far the server's own counters went between two looks at its /stats. A counter that is not told, or that fell because another
//! process answers, is absent: never 0. Pure.

use serde::Serialize;
use serde_json::Value;

use super::watch::counter;

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
    /// From one look to the next; `None` when one of them is missing or does not count requests.
    pub fn between(before: Option<&Value>, after: Option<&Value>) -> Option<Self> {
        Self::tried(before, after).ok().flatten()
    }

    /// As `between`.
    ///
    /// # Errors
    /// As `grown`: what was told before is told no more.
    pub fn tried(before: Option<&Value>, after: Option<&Value>) -> Result<Option<Self>, String> {
        let names =
            ["accepted_requests", "completed_requests", "cancelled_requests", "failed_requests", "rejected_requests"];
        let mut counts = [0; 5];
        for (count, name) in counts.iter_mut().zip(names) {
            let Some(growth) = grown(before, after, name)? else { return Ok(None) };
            *count = growth;
        }
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
        let growth = ServerGrowth::between(Some(&before), Some(&after)).expect("counters");
        assert_eq!((growth.accepted, growth.completed, growth.packed_batches), (2, 1, None));
        assert!(!growth.balances());
        assert_eq!(ServerGrowth::between(Some(&before), None), None);
        assert_eq!(ServerGrowth::between(Some(&after), Some(&before)), None, "another server");
        assert_eq!(ServerGrowth::between(Some(&json!({})), Some(&after)), None);
    }
}
