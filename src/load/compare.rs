//! Paired comparison of servers: every round starts each variant anew, measures it and stops it; the order is reversed on every
//! other round, and each variant is compared with the control of the same round. All rounds are kept.

use std::path::Path;
use std::time::Duration;

use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::Value;

use super::burst::Rounds;
use super::devices::{DeviceOptions, LoadedPair};
use super::drive::{Setup, closed_loop};
use super::figures::Summary;
use super::launch::{LaunchError, Running, Variant};
use super::render::{Renderer, Seeding};
use super::report::WorkloadReport;
use super::stats::{AcrossRounds, percent_change};
use super::target::Target;
use super::watch::{Host, Observed, STATS_PERIOD, Watch, commit};
use super::workload::Workload;

/// Names the form of the JSON.
const FORMAT: &str = "crucible-load-comparison/2";

/// How servers are compared.
#[derive(Clone, Debug)]
pub struct CompareOptions {
    /// Times that every variant is started.
    pub pairs: usize,
    /// Rounds within one start.
    pub rounds: Rounds,
    /// What is asked.
    pub workloads: Vec<Workload>,
    /// Of all prompts.
    pub seeding: Seeding,
    /// Client threads.
    pub threads: usize,
    /// Of one request.
    pub timeout: Duration,
    /// A server must be ready within this.
    pub ready_wait: Duration,
    /// How clocks and power are read.
    pub devices: DeviceOptions,
}

/// One start of one variant.
#[derive(Clone, Debug, Serialize)]
pub struct VariantRun {
    /// Which variant.
    pub variant: String,
    /// Which pair.
    pub pair: usize,
    /// Place in the pair's order.
    pub order: usize,
    /// Its /health.
    pub health: Option<Value>,
    /// Server and devices while it ran, with the medians under load.
    pub observed: Observed,
    /// What was measured.
    pub workloads: Vec<WorkloadReport>,
}

/// One figure of one pair.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PairedRound {
    /// Which pair.
    pub pair: usize,
    /// The control's figure.
    pub control: f64,
    /// The variant's.
    pub variant: f64,
    /// The change in percent.
    pub percent: Option<f64>,
    /// The loaded clocks differ by more than 1 %; absent when they are not known.
    pub clocks_differ: Option<bool>,
}

/// One figure of one workload and variant over all pairs.
#[derive(Clone, Debug, Serialize)]
pub struct Change {
    /// The workload.
    pub workload: String,
    /// A name of `Summary`.
    pub figure: &'static str,
    /// The variant.
    pub variant: String,
    /// Every pair.
    pub rounds: Vec<PairedRound>,
    /// The changes across pairs, in percent.
    pub percent: Option<AcrossRounds>,
}

/// A finished comparison; the first variant is the control.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// `FORMAT`.
    pub format: &'static str,
    /// Commit of the working directory.
    pub commit: Option<String>,
    /// The machine.
    pub host: Host,
    /// Of all prompts.
    #[serde(flatten)]
    pub seeding: Seeding,
    /// Rounds within one start.
    pub rounds: Rounds,
    /// What was compared.
    pub variants: Vec<Variant>,
    /// Every start.
    pub runs: Vec<VariantRun>,
    /// Clocks and power under load, every pair.
    pub loaded: Vec<LoadedPair>,
    /// Every paired change.
    pub changes: Vec<Change>,
}

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

/// Starts, measures and stops every variant `pairs` times. Server output goes to files in `logs`.
///
/// # Errors
/// A server cannot be started, does not become ready or refuses its dialect.
pub fn compare(
    mut variants: Vec<Variant>,
    options: &CompareOptions,
    logs: &Path,
    progress: &ProgressBar,
) -> Result<Comparison, LaunchError> {
    for variant in &mut variants {
        variant.hash()?;
    }
    let mut runs = Vec::new();
    for pair in 0..options.pairs {
        for order in 0..variants.len() {
            let index = if pair % 2 == 1 { variants.len() - 1 - order } else { order };
            let variant = &variants[index];
            progress.println(format!("pair {} of {}: {}", pair + 1, options.pairs, variant.name));
            runs.push(measure(variant, pair, order, options, logs, progress)?);
        }
    }
    let (loaded, changes) = (loaded_pairs(&variants, &runs), changes(&variants, &runs));
    Ok(Comparison {
        format: FORMAT,
        commit: commit(),
        host: Host::here(),
        seeding: options.seeding,
        rounds: options.rounds,
        variants,
        runs,
        loaded,
        changes,
    })
}

fn measure(
    variant: &Variant,
    pair: usize,
    order: usize,
    options: &CompareOptions,
    logs: &Path,
    progress: &ProgressBar,
) -> Result<VariantRun, LaunchError> {
    let log = logs.join(format!("{}-{pair}.log", variant.name.replace(['/', ' '], "-")));
    let target = Target::new(&variant.url, None)?;
    let mut running = Running::start(variant, &log)?;
    if !running.wait_ready(&target, &variant.ready, options.ready_wait) {
        let seconds = options.ready_wait.as_secs();
        return Err(LaunchError::NotReady { name: variant.name.clone(), seconds, log });
    }
    let mut dialects = vec![variant.dialect];
    dialects.extend(options.workloads.iter().flat_map(|w| w.shots.iter().filter_map(|s| s.dialect)));
    dialects.sort_unstable();
    dialects.dedup();
    dialects.sort_by_key(|&d| d != variant.dialect);
    let renderer = Renderer::connect(target.clone(), None, &dialects, options.seeding)?;
    let (threads, timeout) = (options.threads, options.timeout);
    let setup = Setup { renderer: &renderer, threads, timeout, objectives: &[], oracle: None };
    let health = target.json("/health");
    let watch = Watch::begin(target, &options.devices, STATS_PERIOD)?;
    progress.set_position(0);
    let measured = closed_loop(&setup, &options.workloads, options.rounds, progress);
    let observed = watch.end();
    Ok(VariantRun { variant: variant.name.clone(), pair, order, health, observed, workloads: measured.workloads })
}

/// The loaded medians of every variant against the control's of its own pair.
fn loaded_pairs(variants: &[Variant], runs: &[VariantRun]) -> Vec<LoadedPair> {
    let Some((control, others)) = variants.split_first() else { return Vec::new() };
    let others = |run: &&VariantRun| others.iter().any(|v| v.name == run.variant);
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

fn changes(variants: &[Variant], runs: &[VariantRun]) -> Vec<Change> {
    let mut changes = Vec::new();
    let Some((control, others)) = variants.split_first() else { return changes };
    let find = |name: &str, pair: usize| runs.iter().find(|r| r.variant == name && r.pair == pair);
    let pairs = runs.iter().map(|r| r.pair + 1).max().unwrap_or(0);
    let workloads = runs.first().map(|r| r.workloads.as_slice()).unwrap_or_default();
    for (at, workload) in workloads.iter().enumerate() {
        for (figure, of) in FIGURES {
            for other in others {
                let paired = (0..pairs).filter_map(|pair| {
                    let (a, b) = (find(&control.name, pair)?, find(&other.name, pair)?);
                    let (control, variant) =
                        (of(&a.workloads[at].summary)?.median, of(&b.workloads[at].summary)?.median);
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
                let (workload, variant) = (workload.workload.name.clone(), other.name.clone());
                changes.push(Change { workload, figure, variant, rounds, percent });
            }
        }
    }
    changes
}

impl Comparison {
    /// Requests that failed in any start of any variant.
    pub fn failed(&self) -> usize {
        self.runs.iter().flat_map(|r| &r.workloads).map(|w| w.summary.counts.failed).sum()
    }

    /// The compared workloads, in order.
    pub fn workload_names(&self) -> Vec<String> {
        let first = self.runs.first().map(|r| r.workloads.as_slice()).unwrap_or_default();
        first.iter().map(|w| w.workload.name.clone()).collect()
    }

    /// The change of one figure across pairs, in percent.
    pub fn change(&self, variant: &str, workload: &str, figure: &str) -> Option<AcrossRounds> {
        let row = self.changes.iter().find(|c| c.variant == variant && c.workload == workload && c.figure == figure);
        row.and_then(|c| c.percent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::devices::Loaded;
    use crate::load::dialect::Dialect;

    fn run(variant: &str, pair: usize, tok_per_s: f64, mhz: Option<f64>) -> VariantRun {
        let across = Some(AcrossRounds { median: tok_per_s, min: tok_per_s, max: tok_per_s });
        let workload = Workload::named("isolated-8").expect("a workload");
        let summary = Summary { output_tok_per_s: across, ..Summary::default() };
        let report = WorkloadReport { workload, rounds: Vec::new(), summary, goodput_per_s: Vec::new() };
        let loaded = Loaded { cpu_mhz: mhz, ..Loaded::default() };
        let observed = Observed { loaded, ..Observed::default() };
        VariantRun { variant: variant.into(), pair, order: 0, health: None, observed, workloads: vec![report] }
    }

    fn variant(name: &str) -> Variant {
        let (dialect, ready) = (Dialect::Native, "/health".into());
        Variant { name: name.into(), command: vec!["x".into()], url: String::new(), dialect, ready, sha256: None }
    }

    #[test]
    fn every_variant_is_compared_with_the_control_of_its_own_round() {
        let (fast, slow) = (Some(3_000.0), Some(2_900.0));
        let runs = [
            run("a", 0, 100.0, fast),
            run("b", 0, 110.0, fast),
            run("b", 1, 60.0, fast),
            run("a", 1, 50.0, slow),
            run("a", 2, 50.0, fast),
            run("b", 2, 60.0, None),
        ];
        let variants = [variant("a"), variant("b")];
        let changes = changes(&variants, &runs);
        let row = changes.iter().find(|c| c.figure == "output_tok_per_s").expect("the figure");
        let percents: Vec<_> = row.rounds.iter().map(|r| r.percent).collect();
        assert_eq!(percents, [Some(10.0), Some(20.0), Some(20.0)]);
        let marks = [Some(false), Some(true), None];
        assert_eq!(row.rounds.iter().map(|r| r.clocks_differ).collect::<Vec<_>>(), marks);
        assert_eq!(row.percent, Some(AcrossRounds { median: 20.0, min: 10.0, max: 20.0 }));
        let loaded = loaded_pairs(&variants, &runs);
        assert_eq!(loaded.iter().map(|p| p.clocks_differ).collect::<Vec<_>>(), marks);
        let cpu = &loaded[1].figures[0];
        assert_eq!((cpu.figure, cpu.control, cpu.variant, cpu.differs), ("cpu_mhz", slow, fast, Some(true)));
    }
}
