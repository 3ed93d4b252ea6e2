//! What a soak promises, each promise with its figures. Pure.

use super::memory::memory_is_flat;
use super::{Phase, Soak, Window};
use crate::load::report::Check;
use crate::load::watch::{Observed, PageCheck, counter};

/// Every check of the phases and of the memory; the server's end is judged beside them. A phase that did not run is not judged: the end that
/// came before it is, or that it was left out.
pub(super) fn judge(soak: &Soak) -> Vec<Check> {
    let phase = |name: &str| soak.phases.iter().find(|p| p.name == name).filter(|p| !p.windows.is_empty());
    let mut checks = everywhere(&soak.phases);
    let left_out = soak.phases.iter().filter_map(|p| p.left_out.as_ref().map(|why| format!("{}: {why}", p.name)));
    let left_out: Vec<String> = left_out.collect();
    checks.extend((!left_out.is_empty()).then(|| Check::failed("every phase is run", left_out.join("; "))));
    checks.extend(phase("stable").map(stable));
    if let Some(overload) = phase("overload") {
        let lifetime = soak.stats_after.as_ref().and_then(|s| counter(s, "queue_peak"));
        checks.extend(refusals(overload));
        checks.push(queue(overload, &soak.observed, lifetime, soak.plan.queue));
    }
    checks.extend(phase("cancelled").map(|p| {
        let (cancelled, wanted) = (count(&p.windows, |w| w.round.counts.cancelled), soak.plan.cancelled);
        Check::when(cancelled >= wanted, "enough requests were cancelled", format!("{cancelled} of {wanted}"))
    }));
    checks.extend(phase("mixed").map(|p| memory_is_flat(&soak.memory, p.windows[0].round.t_s)));
    checks
}

fn count<'a>(windows: impl IntoIterator<Item = &'a Window>, figure: fn(&Window) -> usize) -> usize {
    windows.into_iter().map(figure).sum()
}

/// What holds in every window of every phase.
fn everywhere(phases: &[Phase]) -> Vec<Check> {
    let whole = || phases.iter().flat_map(|p| &p.windows);
    let of = |figure| count(whole(), figure);
    let named = |bad: fn(&Window) -> bool| -> Vec<&str> {
        phases.iter().flat_map(|p| p.windows.iter().filter(|w| bad(w)).map(|_| p.name)).collect()
    };
    let failed = of(|w| w.round.counts.failed);
    let inside: u64 = whole().filter_map(|w| w.server).map(|s| s.failed).sum();
    let sent = of(|w| w.round.counts.submitted);
    let detail = format!("{failed} of {sent} as the client saw them, {inside} as the server did");
    let mut checks = vec![Check::when(failed == 0 && inside == 0 && sent > 0, "no request fails", detail)];
    let silent = named(|w| w.server.is_none());
    let detail = format!("{} windows, without counters: {silent:?}", whole().count());
    checks.push(Check::when(silent.is_empty(), "the server tells its counters after every window", detail));
    let lost = named(|w| {
        let c = &w.round.counts;
        let all = c.submitted == c.completed + c.cancelled + c.refused + c.failed;
        !all || w.server.is_some_and(|s| !s.balances())
    });
    let detail = format!("{} windows, without balance: {lost:?}", whole().count());
    checks.push(Check::when(
        lost.is_empty(),
        "submitted = completed + disconnected + refused + failed, everywhere",
        detail,
    ));
    let missing = whole().filter(|w| !w.pages.as_ref().is_some_and(PageCheck::passed)).count();
    let detail = format!("{missing} windows with pages out or unknown");
    checks.push(Check::when(missing == 0, "every page is back after every window", detail));
    let compared = of(|w| w.verification.compared);
    let ids = of(|w| w.verification.token_ids_compared);
    let wrong = of(|w| w.verification.different + w.verification.unknown);
    let detail = format!("{compared} outputs and {ids} token ids compared, {wrong} different or unknown");
    checks.push(Check::when(wrong == 0 && compared > 0, "every output equals the oracle", detail));
    checks
}

fn stable(phase: &Phase) -> Check {
    let of = |figure| count(&phase.windows, figure);
    let completed = of(|w| w.round.counts.completed);
    let (refused, failed) = (of(|w| w.round.counts.refused), of(|w| w.round.counts.failed));
    let detail = format!("{completed} completed, {refused} refused, {failed} failed");
    let served = refused == 0 && failed == 0 && completed > 0;
    Check::when(served, "half the capacity is served without refusals", detail)
}

fn refusals(overload: &Phase) -> [Check; 2] {
    let refused = count(&overload.windows, |w| w.round.counts.refused);
    let silent = count(&overload.windows, |w| w.round.counts.refused_without_retry_after);
    let detail = format!("{refused} refused, {silent} of them without Retry-After");
    let told = Check::when(refused > 0 && silent == 0, "overload is refused, and told when to retry", detail);
    let packed: u64 = overload.windows.iter().filter_map(|w| w.server?.packed_batches).sum();
    [told, Check::when(packed > 0, "prefill is packed under overload", format!("{packed} packed batches"))]
}

/// The queue's peak of the overload itself: the server's own where it was reached then, the greatest seen then otherwise, and the bound
/// where a request was refused, because a queue is full at one length only. A peak from before does not count.
fn queue(overload: &Phase, observed: &Observed, lifetime: Option<u64>, bound: u64) -> Check {
    let of = |w: &Window| w.queue_peak.max(observed.peak(w.round.t_s, w.ended_s, |s| s.queued));
    let peak = overload.windows.iter().filter_map(of).max();
    let shown = |value: Option<u64>| value.map_or("unknown".into(), |v| v.to_string());
    let detail = format!("{} waiting at most, {} in the server's life, bound {bound}", shown(peak), shown(lifetime));
    let refused: u64 = overload.windows.iter().filter_map(|w| w.server).map(|s| s.refused).sum();
    let held =
        lifetime.is_some_and(|all| all <= bound) && (peak == Some(bound) || refused > 0 && lifetime == Some(bound));
    Check::when(held, "the queue reaches its bound and no more", detail)
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::load::dialect::Dialect;
    use crate::load::figures::{Counts, Round};
    use crate::load::growth::ServerGrowth;
    use crate::load::open::Mix;
    use crate::load::oracle::Verification;
    use crate::load::prompts::TokenRange;
    use crate::load::render::Seeding;
    use crate::load::report::{ClientFacts, TargetFacts};
    use crate::load::soak::{MemorySample, SoakPlan};
    use crate::load::variant::Variant;
    use crate::load::watch::ServerSample;

    fn window(counts: Counts, server: ServerGrowth) -> Window {
        Window {
            round: Round { counts, ..Round::default() },
            ended_s: 1.0,
            verification: Verification { compared: 5, token_ids_compared: 50, ..Verification::default() },
            pages: Some(PageCheck { free_before: 8, free_after: 8, used_after: 0, live_after: 0 }),
            server: Some(server),
            queue_peak: None,
        }
    }

    fn phases() -> Vec<Phase> {
        let done = |n: usize| Counts { submitted: n, completed: n, ..Counts::default() };
        let inside = |n: u64| ServerGrowth { accepted: n, completed: n, ..ServerGrowth::default() };
        let refused = Counts { submitted: 9, completed: 5, refused: 4, ..Counts::default() };
        let packed = ServerGrowth { refused: 4, packed_batches: Some(2), ..inside(5) };
        let gone = Counts { submitted: 7, cancelled: 7, ..Counts::default() };
        let left = ServerGrowth { accepted: 7, cancelled: 7, ..ServerGrowth::default() };
        let phase = |name, counts, server| Phase::of(name, None, vec![window(counts, server)]);
        let mut all = vec![
            phase("stable", done(5), inside(5)),
            phase("overload", refused, packed),
            phase("cancelled", gone, left),
            phase("mixed", done(9), inside(9)),
        ];
        all[1].windows[0].queue_peak = Some(4);
        all
    }

    /// The plan of a small soak.
    pub(in crate::load::soak) fn plan() -> SoakPlan {
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

    /// A soak in which everything holds.
    fn soak() -> Soak {
        let mix = Mix {
            dialects: vec![Dialect::Native],
            policies: Vec::new(),
            prompts: vec![1],
            output: 1,
            variants: 1,
            cancel_every: 0,
            cancel_at: Vec::new(),
        };
        let server = Variant {
            name: "soak".into(),
            command: Vec::new(),
            url: String::new(),
            dialect: Dialect::Native,
            ready: String::new(),
            sha256: None,
            config: None,
        };
        Soak {
            format: "",
            started_unix_ms: 0,
            client: ClientFacts::here(1),
            server,
            target: TargetFacts { url: String::new(), model: String::new(), health: None, dialects: BTreeMap::new() },
            seeding: Seeding { seed: 1, token_range: TokenRange::default() },
            plan: plan(),
            mix,
            capacity_per_s: 1.0,
            phases: phases(),
            memory: (0..8).map(|i| MemorySample { t_s: f64::from(i), resident_bytes: 1_000 }).collect(),
            stats_before: None,
            stats_after: Some(json!({"queue_peak": 4})),
            observed: Observed::default(),
            checks: Vec::new(),
            passed: false,
        }
    }

    fn failures(change: impl FnOnce(&mut Soak)) -> String {
        let mut soak = soak();
        change(&mut soak);
        let failed: Vec<String> = judge(&soak).into_iter().filter(|c| !c.passed).map(|c| c.name).collect();
        failed.join("; ")
    }

    fn window_of(soak: &mut Soak, phase: usize) -> &mut Window {
        &mut soak.phases[phase].windows[0]
    }

    fn growth_of(soak: &mut Soak, phase: usize) -> &mut ServerGrowth {
        window_of(soak, phase).server.as_mut().expect("counters")
    }

    #[test]
    fn each_broken_promise_fails_its_own_check_and_no_other() {
        assert_eq!(failures(|_| ()), "");
        let balance = "submitted = completed + disconnected + refused + failed, everywhere";
        assert_eq!(failures(|s| growth_of(s, 3).completed -= 1), balance);
        assert_eq!(failures(|s| window_of(s, 3).verification.different = 1), "every output equals the oracle");
        assert_eq!(failures(|s| window_of(s, 0).verification.unknown = 1), "every output equals the oracle");
        assert_eq!(failures(|s| window_of(s, 2).pages = None), "every page is back after every window");
        assert_eq!(failures(|s| growth_of(s, 1).packed_batches = Some(0)), "prefill is packed under overload");
        assert_eq!(
            failures(|s| window_of(s, 1).round.counts.refused_without_retry_after = 1),
            "overload is refused, and told when to retry"
        );
        let few = |s: &mut Soak| {
            let counts = &mut window_of(s, 2).round.counts;
            (counts.submitted, counts.cancelled) = (6, 6);
        };
        assert_eq!(failures(few), "enough requests were cancelled");
        let failed = |s: &mut Soak| {
            let counts = &mut window_of(s, 3).round.counts;
            (counts.completed, counts.failed) = (counts.completed - 1, 1);
        };
        assert_eq!(failures(failed), "no request fails");
    }

    #[test]
    fn counters_that_are_told_no_more_are_no_balance_of_zeros() {
        assert_eq!(failures(|s| window_of(s, 3).server = None), "the server tells its counters after every window");
    }

    #[test]
    fn half_the_capacity_is_not_served_when_requests_failed() {
        let failed = |s: &mut Soak| {
            let counts = &mut window_of(s, 0).round.counts;
            (counts.completed, counts.failed) = (1, 4);
        };
        assert_eq!(failures(failed), "no request fails; half the capacity is served without refusals");
    }

    #[test]
    fn the_queue_is_judged_by_the_overload_and_not_by_what_was_before() {
        let name = "the queue reaches its bound and no more";
        let before = |s: &mut Soak| {
            window_of(s, 1).queue_peak = None;
            growth_of(s, 1).refused = 0;
        };
        assert_eq!(failures(before), name, "the peak is from before");
        assert_eq!(failures(|s| window_of(s, 1).queue_peak = None), "", "a refusal says that it was full");
        let seen = |t_s, queued| ServerSample { t_s, queued: Some(queued), ..ServerSample::default() };
        let sampled = |at: f64| {
            failures(move |s| {
                before(s);
                s.observed.server = vec![seen(0.5, 3), seen(at, 4)];
            })
        };
        assert_eq!((sampled(0.7).as_str(), sampled(1.7).as_str()), ("", name));
        assert_eq!(failures(|s| s.stats_after = Some(json!({"queue_peak": 5}))), name, "it went beyond the bound");
        let lower = |s: &mut Soak| {
            window_of(s, 1).queue_peak = Some(3);
            s.stats_after = Some(json!({"queue_peak": 3}));
        };
        assert_eq!(failures(lower), name);
    }

    #[test]
    fn a_phase_that_did_not_run_is_not_judged_and_one_that_was_left_out_has_failed() {
        assert_eq!(failures(|s| s.phases.truncate(1)), "");
        let left_out = |s: &mut Soak| {
            (s.phases[3].windows, s.phases[3].left_out) = (Vec::new(), Some("too much".into()));
        };
        assert_eq!(failures(left_out), "every phase is run");
    }
}
