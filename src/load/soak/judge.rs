//! What a soak promises, each promise with its figures. Pure.

use super::{Phase, SoakPlan, Window};
use crate::load::report::Check;
use crate::load::watch::PageCheck;

/// Every check of the phases; memory and the server's end are judged beside them.
pub(super) fn judge(phases: &[Phase], queue_peak: Option<u64>, plan: SoakPlan) -> Vec<Check> {
    let all = || phases.iter().flat_map(|p| p.windows.iter().map(move |w| (p.name, w)));
    let of = |name: &str| phases.iter().filter(|p| p.name == name).flat_map(|p| &p.windows).collect::<Vec<_>>();
    let count = |windows: &[&Window], figure: fn(&Window) -> usize| windows.iter().map(|w| figure(w)).sum::<usize>();
    let whole: Vec<&Window> = all().map(|(_, w)| w).collect();
    let failed = count(&whole, |w| w.counts.failed);
    let failed_inside: u64 = whole.iter().map(|w| w.server.failed).sum();
    let sent = count(&whole, |w| w.counts.submitted);
    let mut checks = vec![Check::new(
        "no request fails",
        failed == 0 && failed_inside == 0 && sent > 0,
        format!("{failed} of {sent} as the client saw them, {failed_inside} as the server did"),
    )];
    let unbalanced = |w: &Window| {
        let (c, s) = (&w.counts, &w.server);
        c.submitted != c.completed + c.cancelled + c.refused + c.failed
            || s.accepted != s.completed + s.cancelled + s.failed
    };
    let lost: Vec<&str> = all().filter(|(_, w)| unbalanced(w)).map(|(name, _)| name).collect();
    let detail = format!("{} windows, without balance: {lost:?}", whole.len());
    checks.push(Check::new(
        "submitted = completed + disconnected + refused + failed, everywhere",
        lost.is_empty(),
        detail,
    ));
    let missing = whole.iter().filter(|w| !w.pages.as_ref().is_some_and(PageCheck::passed)).count();
    checks.push(Check::new(
        "every page is back after every window",
        missing == 0,
        format!("{missing} windows with pages out"),
    ));
    let compared = count(&whole, |w| w.verification.compared);
    let ids = count(&whole, |w| w.verification.token_ids_compared);
    let wrong = count(&whole, |w| w.verification.different + w.verification.unknown);
    let detail = format!("{compared} outputs and {ids} token ids compared, {wrong} different or unknown");
    checks.push(Check::new("every output equals the oracle", wrong == 0 && compared > 0, detail));
    let stable = of("stable");
    let (refused, completed) = (count(&stable, |w| w.counts.refused), count(&stable, |w| w.counts.completed));
    let detail = format!("{completed} completed, {refused} refused");
    checks.push(Check::new("half the capacity is served without refusals", refused == 0 && completed > 0, detail));
    let overload = of("overload");
    let refused = count(&overload, |w| w.counts.refused);
    let silent = count(&overload, |w| w.counts.refused_without_retry_after);
    let detail = format!("{refused} refused, {silent} of them without Retry-After");
    checks.push(Check::new("overload is refused, and told when to retry", refused > 0 && silent == 0, detail));
    let packed: u64 = overload.iter().map(|w| w.server.packed_batches).sum();
    checks.push(Check::new("prefill is packed under overload", packed > 0, format!("{packed} packed batches")));
    let detail = format!("queue_peak {}, bound {}", queue_peak.map_or("unknown".into(), |p| p.to_string()), plan.queue);
    checks.push(Check::new("the queue reaches its bound and no more", queue_peak == Some(plan.queue), detail));
    let cancelled = count(&of("cancelled"), |w| w.counts.cancelled);
    let detail = format!("{cancelled} of {}", plan.cancelled);
    checks.push(Check::new("enough requests were cancelled", cancelled >= plan.cancelled, detail));
    checks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::figures::Counts;
    use crate::load::oracle::Verification;
    use crate::load::soak::ServerGrowth;

    fn window(counts: Counts, server: ServerGrowth) -> Window {
        let pages = Some(PageCheck { free_before: 8, free_after: 8, used_after: 0, live_after: 0 });
        let verification = Verification { compared: 5, token_ids_compared: 50, ..Verification::default() };
        Window {
            t_s: 0.0,
            duration_s: 1.0,
            counts,
            output_tok_per_s: 1.0,
            ttft_p50_ms: None,
            ttft_p95_ms: None,
            gap_p95_ms: None,
            gap_worst_ms: None,
            verification,
            pages,
            server,
        }
    }

    /// A soak in which everything holds.
    fn phases() -> Vec<Phase> {
        let done = |n: usize| Counts { submitted: n, completed: n, ..Counts::default() };
        let inside = |n: u64| ServerGrowth { accepted: n, completed: n, ..ServerGrowth::default() };
        let refused = Counts { submitted: 9, completed: 5, refused: 4, ..Counts::default() };
        let packed = ServerGrowth { refused: 4, packed_batches: 2, ..inside(5) };
        let gone = Counts { submitted: 7, cancelled: 7, ..Counts::default() };
        let left = ServerGrowth { accepted: 7, cancelled: 7, ..ServerGrowth::default() };
        let phase = |name, counts, server| Phase { name, rate_per_s: None, windows: vec![window(counts, server)] };
        vec![
            phase("stable", done(5), inside(5)),
            phase("overload", refused, packed),
            phase("cancelled", gone, left),
            phase("mixed", done(9), inside(9)),
        ]
    }

    fn plan() -> SoakPlan {
        SoakPlan {
            calibrate_s: 1.0,
            concurrency: 4,
            stable_s: 1.0,
            overload_s: 1.0,
            overload_factor: 2.0,
            cancelled: 7,
            mixed_s: 3.0,
            mixed_share: 0.5,
            window_s: 1.0,
            queue: 4,
        }
    }

    fn failures(phases: &[Phase], queue_peak: u64) -> Vec<String> {
        judge(phases, Some(queue_peak), plan()).into_iter().filter(|c| !c.passed).map(|c| c.name).collect()
    }

    #[test]
    fn each_broken_promise_fails_its_own_check_and_no_other() {
        assert_eq!(failures(&phases(), 4), Vec::<String>::new());
        let broken = |change: fn(&mut [Phase])| {
            let mut phases = phases();
            change(&mut phases);
            failures(&phases, 4).join("; ")
        };
        assert_eq!(
            broken(|p| p[3].windows[0].server.completed -= 1),
            "submitted = completed + disconnected + refused + failed, everywhere"
        );
        assert_eq!(broken(|p| p[3].windows[0].verification.different = 1), "every output equals the oracle");
        assert_eq!(broken(|p| p[0].windows[0].verification.unknown = 1), "every output equals the oracle");
        assert_eq!(broken(|p| p[2].windows[0].pages = None), "every page is back after every window");
        assert_eq!(broken(|p| p[1].windows[0].server.packed_batches = 0), "prefill is packed under overload");
        assert_eq!(
            broken(|p| p[1].windows[0].counts.refused_without_retry_after = 1),
            "overload is refused, and told when to retry"
        );
        assert_eq!(
            broken(|p| (p[2].windows[0].counts.submitted, p[2].windows[0].counts.cancelled) = (6, 6)),
            "enough requests were cancelled"
        );
        assert_eq!(failures(&phases(), 5), ["the queue reaches its bound and no more"]);
        let failed = broken(|p| {
            p[3].windows[0].counts.completed -= 1;
            p[3].windows[0].counts.failed += 1;
        });
        assert_eq!(failed, "no request fails");
    }
}
