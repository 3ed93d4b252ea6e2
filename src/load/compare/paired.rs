//! Every figure of a variant against the control's of the same pair, and whether they can be compared. Pure.

use std::collections::BTreeSet;

use super::{Change, PairedRound, VariantRun};
use crate::load::devices::LoadedPair;
use crate::load::figures::Summary;
use crate::load::report::Check;
use crate::load::stats::{AcrossRounds, percent_change};
use crate::load::target::given_up;
use crate::load::variant::Variant;

type FigureOf = fn(&Summary) -> Option<AcrossRounds>;

/// The figures that are compared.
const FIGURES: [(&str, FigureOf); 6] = [
    ("ttft_p50_ms", |s| s.ttft_p50_ms),
    ("ttft_p95_ms", |s| s.ttft_p95_ms),
    ("gap_p50_ms", |s| s.gap_p50_ms),
    ("gap_p95_ms", |s| s.gap_p95_ms),
    ("gap_worst_ms", |s| s.gap_worst_ms),
    ("output_tok_per_s", |s| s.output_tok_per_s),
];

/// The loaded medians of every variant against the control's of its own pair.
pub(super) fn loaded_pairs(variants: &[Variant], runs: &[&VariantRun]) -> Vec<LoadedPair> {
    let Some((control, others)) = variants.split_first() else { return Vec::new() };
    let others = |run: &&&VariantRun| others.iter().any(|v| v.name == run.variant);
    let mut pairs: Vec<LoadedPair> = runs
        .iter()
        .filter(others)
        .filter_map(|run| {
            let own = runs.iter().find(|r| r.variant == control.name && r.pair == run.pair)?;
            Some(own.observed.loaded.pair(run.pair, &run.variant, &run.observed.loaded))
        })
        .collect();
    pairs.sort_by(|a, b| (a.pair, &a.variant).cmp(&(b.pair, &b.variant)));
    pairs
}

/// Every figure of every workload and variant against the control of its own pair; a workload that one of the two was not asked for has none.
pub(super) fn changes(variants: &[Variant], runs: &[&VariantRun]) -> Vec<Change> {
    let mut changes = Vec::new();
    let Some((control, others)) = variants.split_first() else { return changes };
    let find = |name: &str, pair: usize| runs.iter().find(|r| r.variant == name && r.pair == pair);
    let pairs = runs.iter().map(|r| r.pair + 1).max().unwrap_or(0);
    for workload in workload_names(runs.iter().copied()) {
        let summary =
            |run: &VariantRun| run.workloads.iter().find(|w| w.workload.name == workload).map(|w| w.summary.clone());
        for (figure, of) in FIGURES {
            for other in others {
                let paired = (0..pairs).filter_map(|pair| {
                    let (a, b) = (find(&control.name, pair)?, find(&other.name, pair)?);
                    let (control, variant) = (of(&summary(a)?)?.median, of(&summary(b)?)?.median);
                    let percent = percent_change(control, variant);
                    Some(PairedRound {
                        pair,
                        control,
                        variant,
                        percent,
                        clocks_differ: a.observed.loaded.clocks_differ(&b.observed.loaded),
                    })
                });
                let rounds: Vec<PairedRound> = paired.collect();
                let percent = AcrossRounds::of(rounds.iter().map(|r| r.percent));
                let (workload, variant) = (workload.clone(), other.name.clone());
                changes.push(Change { workload, figure, variant, rounds, percent });
            }
        }
    }
    changes
}

/// Figures are comparable only where every variant was asked for the same workloads in the same form of its dialect.
pub(super) fn asked_the_same(runs: &[VariantRun]) -> Option<Check> {
    let asked = |run: &VariantRun| -> BTreeSet<String> {
        let lost = run.target.dialects.iter().flat_map(|(&dialect, &takes)| given_up(dialect, takes));
        lost.map(str::to_owned).chain(run.skipped.iter().map(|name| format!("{name} is skipped"))).collect()
    };
    let told = |(name, asked): &(&str, BTreeSet<String>)| {
        let what =
            if asked.is_empty() { "everything".into() } else { asked.iter().cloned().collect::<Vec<_>>().join("; ") };
        format!("{name}: {what}")
    };
    let mut seen: Vec<(&str, BTreeSet<String>)> = Vec::new();
    for run in runs {
        let this = (run.variant.as_str(), asked(run));
        if !seen.contains(&this) {
            seen.push(this);
        }
    }
    let same = seen.windows(2).all(|two| two[0].1 == two[1].1);
    let detail = seen.iter().map(told).collect::<Vec<_>>().join(", ");
    (!seen.is_empty()).then(|| Check::when(same, "every server is asked the same", detail))
}

/// The workloads of all starts, in order.
pub(super) fn workload_names<'a>(runs: impl Iterator<Item = &'a VariantRun>) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for workload in runs.flat_map(|r| &r.workloads) {
        if !names.contains(&workload.workload.name) {
            names.push(workload.workload.name.clone());
        }
    }
    names
}
