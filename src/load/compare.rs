//! Paired comparison of servers: every round starts each variant anew, measures it and stops it; the order is reversed on every
//! other round, and each variant is compared with the control of the same round. All rounds are kept.

use std::path::Path;
use std::time::Duration;

use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::Value;

use super::burst::Rounds;
use super::drive::{Setup, closed_loop};
use super::figures::Summary;
use super::launch::{LaunchError, Running, Variant};
use super::render::{Renderer, Seeding};
use super::report::WorkloadReport;
use super::stats::{AcrossRounds, percent_change};
use super::target::Target;
use super::watch::{Host, Loaded, Watch, commit};
use super::workload::Workload;

/// Names the form of the JSON.
const FORMAT: &str = "crucible-load-comparison/1";
/// Clocks that differ by more make a pair doubtful.
const CLOCK_DIFFERENCE_MAX: f64 = 0.01;

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
    /// Clocks and power under load.
    pub loaded: Loaded,
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
    /// The loaded clocks differ by more than 1 %.
    pub clocks_differ: bool,
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
    let changes = changes(&variants, &runs);
    Ok(Comparison {
        format: FORMAT,
        commit: commit(),
        host: Host::here(),
        seeding: options.seeding,
        rounds: options.rounds,
        variants,
        runs,
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
    let watch = Watch::begin(target);
    progress.set_position(0);
    let measured = closed_loop(&setup, &options.workloads, options.rounds, progress);
    let loaded = watch.end().loaded;
    Ok(VariantRun { variant: variant.name.clone(), pair, order, health, loaded, workloads: measured.workloads })
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
                        clocks_differ: clocks_differ(&a.loaded, &b.loaded),
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

fn clocks_differ(a: &Loaded, b: &Loaded) -> bool {
    match (a.clock_mhz(), b.clock_mhz()) {
        (Some(a), Some(b)) => (a - b).abs() > CLOCK_DIFFERENCE_MAX * a.max(b),
        _ => false,
    }
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

    /// The table for the terminal.
    pub fn table(&self) -> String {
        use super::report::table::{aligned, figure};
        let mut rows = vec![
            ["workload", "variant", "figure", "control", "variant", "change %", "min", "max", "clocks"]
                .map(str::to_owned)
                .to_vec(),
        ];
        for c in &self.changes {
            let side = |of: fn(&PairedRound) -> f64| {
                figure(AcrossRounds::of(c.rounds.iter().map(|r| Some(of(r)))).map(|a| a.median))
            };
            let percent = |of: fn(&AcrossRounds) -> f64| figure(c.percent.as_ref().map(of));
            let doubtful = c.rounds.iter().filter(|r| r.clocks_differ).count();
            rows.push(vec![
                c.workload.clone(),
                c.variant.clone(),
                c.figure.to_owned(),
                side(|r| r.control),
                side(|r| r.variant),
                percent(|a| a.median),
                percent(|a| a.min),
                percent(|a| a.max),
                if doubtful == 0 { "same".into() } else { format!("{doubtful} differ") },
            ]);
        }
        aligned(&rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::dialect::Dialect;

    fn run(variant: &str, pair: usize, tok_per_s: f64, mhz: f64) -> VariantRun {
        let across = Some(AcrossRounds { median: tok_per_s, min: tok_per_s, max: tok_per_s });
        let workload = Workload::named("isolated-8").expect("a workload");
        let summary = Summary { output_tok_per_s: across, ..Summary::default() };
        let report = WorkloadReport { workload, rounds: Vec::new(), summary, goodput_per_s: Vec::new() };
        let loaded = Loaded { cpu_mhz: Some(mhz), ..Loaded::default() };
        VariantRun { variant: variant.into(), pair, order: 0, health: None, loaded, workloads: vec![report] }
    }

    fn variant(name: &str) -> Variant {
        let (dialect, ready) = (Dialect::Native, "/health".into());
        Variant { name: name.into(), command: vec!["x".into()], url: String::new(), dialect, ready, sha256: None }
    }

    #[test]
    fn every_variant_is_compared_with_the_control_of_its_own_round() {
        let runs = [
            run("a", 0, 100.0, 3_000.0),
            run("b", 0, 110.0, 3_000.0),
            run("b", 1, 60.0, 3_000.0),
            run("a", 1, 50.0, 2_900.0),
        ];
        let changes = changes(&[variant("a"), variant("b")], &runs);
        let row = changes.iter().find(|c| c.figure == "output_tok_per_s").expect("the figure");
        let percents: Vec<_> = row.rounds.iter().map(|r| r.percent).collect();
        assert_eq!(percents, [Some(10.0), Some(20.0)]);
        assert_eq!(row.rounds.iter().map(|r| r.clocks_differ).collect::<Vec<_>>(), [false, true]);
        assert_eq!(row.percent, Some(AcrossRounds { median: 15.0, min: 10.0, max: 20.0 }));
    }
}
