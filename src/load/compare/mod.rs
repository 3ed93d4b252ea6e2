//! Paired comparison of servers: every round starts each variant anew, measures it and stops it; the order is reversed on every
//! other round, and each variant is compared with the control of the same round. All rounds are kept, also when a later start fails.

mod foreseen;
mod paired;

use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::Value;

use crate::load::burst::Rounds;
use crate::load::devices::{DeviceOptions, DevicesError, LoadedPair};
use crate::load::drive::{Setup, closed_loop, wires_of};
use crate::load::figures::Counts;
use crate::load::interrupt;
use crate::load::launch::{LaunchError, Running};
use crate::load::oracle::{Oracle, Verification};
use crate::load::render::{Renderer, Seeding};
use crate::load::report::{Check, ClientFacts, TargetFacts, WorkloadReport, check, unix_ms};
use crate::load::slo::Objective;
use crate::load::stats::AcrossRounds;
use crate::load::target::Target;
use crate::load::variant::{Variant, found};
use crate::load::watch::{Observed, PageCheck, Watch, say};
use crate::load::workload::Workload;

use self::foreseen::foreseen;
use self::paired::{asked_the_same, changes, loaded_pairs, workload_names};

/// Names the form of the JSON.
const FORMAT: &str = "crucible-load-comparison/3";
/// A server gets this long to become idle before its pages are counted.
const IDLE_WAIT: Duration = Duration::from_secs(15);
/// Starts in which a check did not hold that its detail names.
const BROKEN_SHOWN: usize = 3;

/// How servers are compared.
#[derive(Clone, Debug)]
pub struct CompareOptions {
    /// Times that every variant is started.
    pub pairs: usize,
    /// Rounds within one start.
    pub rounds: Rounds,
    /// What is asked.
    pub workloads: Vec<Workload>,
    /// Those that a server need not be able to be asked for, by name.
    pub may_be_skipped: Vec<String>,
    /// Of all prompts.
    pub seeding: Seeding,
    /// The client; its capacity, when that was measured.
    pub client: ClientFacts,
    /// Of one request.
    pub timeout: Duration,
    /// A server must be ready within this.
    pub ready_wait: Duration,
    /// How clocks and power are read.
    pub devices: DeviceOptions,
    /// Sent to every server.
    pub api_key: Option<String>,
    /// The model to name; each server's first otherwise.
    pub model: Option<String>,
    /// Bounds that every round of every server must keep.
    pub objectives: Vec<Objective>,
    /// Answers that every server must give.
    pub oracle: Option<Oracle>,
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
    /// It ended early, by a signal or with its server, and its figures are compared with none.
    pub cut_short: bool,
    /// Workloads that it cannot be asked for.
    pub skipped: Vec<String>,
    /// Address, model, /health and dialects.
    pub target: TargetFacts,
    /// Its /stats before the first warm-up.
    pub stats_before: Option<Value>,
    /// Its /stats after the last round.
    pub stats_after: Option<Value>,
    /// The pool at the end.
    pub pages: Option<PageCheck>,
    /// Server and devices while it ran, with the medians under load.
    pub observed: Observed,
    /// The requests of warm-ups, which are in no round.
    pub warmups: Counts,
    /// What was measured.
    pub workloads: Vec<WorkloadReport>,
    /// The comparison with the oracle.
    pub verification: Option<Verification>,
    /// What had to hold of this start.
    pub checks: Vec<Check>,
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

/// A comparison; the first variant is the control.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// `FORMAT`.
    pub format: &'static str,
    /// When it began, milliseconds since 1970.
    pub started_unix_ms: u64,
    /// The client and its machine.
    pub client: ClientFacts,
    /// Of all prompts.
    #[serde(flatten)]
    pub seeding: Seeding,
    /// Rounds within one start.
    pub rounds: Rounds,
    /// Times that every variant was to be started.
    pub pairs: usize,
    /// A request that takes longer has failed, seconds.
    pub timeout_s: u64,
    /// What was compared.
    pub variants: Vec<Variant>,
    /// Every start.
    pub runs: Vec<VariantRun>,
    /// Clocks and power under load, every pair.
    pub loaded: Vec<LoadedPair>,
    /// Every paired change.
    pub changes: Vec<Change>,
    /// What had to hold, each over all starts.
    pub checks: Vec<Check>,
    /// All of `checks` hold.
    pub passed: bool,
}

/// Settles what a server can be asked for, given all workloads, and says what is left out or given up and why; an error is the reason why
/// it cannot be measured.
pub type Settle<'a> = dyn Fn(&mut Renderer, &[Workload]) -> Result<Vec<Workload>, String> + 'a;

/// What every start is measured with.
struct Bench<'a> {
    options: &'a CompareOptions,
    settle: &'a Settle<'a>,
    logs: &'a Path,
    progress: &'a ProgressBar,
}

/// Starts, measures and stops every variant `pairs` times. Server output goes to files in `logs`. A server that cannot be started or asked,
/// or that ends while it is measured, ends the comparison, which keeps what was measured and says so in its checks.
///
/// # Errors
/// Before anything is started: a program cannot be read, an address is none, the oracle cannot judge one of the servers, or the devices
/// cannot be watched.
pub fn compare(
    mut variants: Vec<Variant>,
    options: &CompareOptions,
    settle: &Settle<'_>,
    logs: &Path,
    progress: &ProgressBar,
) -> Result<Comparison, LaunchError> {
    let targets = targets(&mut variants, options)?;
    let bench = Bench { options, settle, logs, progress };
    let started_unix_ms = unix_ms();
    let (mut runs, mut failure) = (Vec::new(), None);
    for (pair, order, index) in schedule(variants.len(), options.pairs) {
        let (variant, target) = (&variants[index], &targets[index]);
        say(progress, &format!("pair {} of {}: {}", pair + 1, options.pairs, variant.name));
        match bench.measure(variant, target, pair, order) {
            Ok(run) => runs.push(run),
            Err(e) => failure = Some(format!("pair {}: {e}", pair + 1)),
        }
        // A signal is the cause of what it made fail.
        failure = interrupt::cause().or(failure);
        if failure.is_some() {
            break;
        }
    }
    let complete: Vec<&VariantRun> = runs.iter().filter(|r| !r.cut_short).collect();
    let (loaded, changes) = (loaded_pairs(&variants, &complete), changes(&variants, &complete));
    let mut client = options.client.clone();
    client.set_against(runs.iter().flat_map(|r| &r.workloads).flat_map(|w| &w.rounds));
    let mut checks = checks_over(&runs, options.pairs * variants.len(), failure.as_deref());
    checks.extend(asked_the_same(&runs));
    Ok(Comparison {
        format: FORMAT,
        started_unix_ms,
        client,
        seeding: options.seeding,
        rounds: options.rounds,
        pairs: options.pairs,
        timeout_s: options.timeout.as_secs(),
        variants: variants.into_iter().map(|v| v.told(options.api_key.as_deref())).collect(),
        runs,
        loaded,
        changes,
        passed: checks.iter().all(|c| c.passed),
        checks,
    })
}

/// What can be wrong before anything is started: the programs, whose hashes it takes, the addresses, the oracle as far as it is known what
/// a server will be asked, the program that tells of devices.
fn targets(variants: &mut [Variant], options: &CompareOptions) -> Result<Vec<Target>, LaunchError> {
    let mut targets = Vec::new();
    for variant in variants {
        let unfit = |message: String| LaunchError::Unfit { name: variant.name.clone(), message };
        let target = Target::new(&variant.url, options.api_key.clone()).map_err(|e| unfit(e.to_string()))?;
        if let Some(oracle) = &options.oracle {
            foreseen(oracle, variant, &target, options).map_err(|e| unfit(e.to_string()))?;
        }
        targets.push(target.within(options.timeout));
        variant.hash()?;
    }
    if let Some(path) = options.devices.nvidia_smi.clone().filter(|path| !found(path).is_file()) {
        return Err(DevicesError::Start { path, source: std::io::ErrorKind::NotFound.into() }.into());
    }
    Ok(targets)
}

/// Every start of `count` variants as (pair, place in its order, which of them).
fn schedule(count: usize, pairs: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..pairs * count).map(move |start| {
        let (pair, order) = (start / count, start % count);
        (pair, order, if pair % 2 == 1 { count - 1 - order } else { order })
    })
}

impl Bench<'_> {
    fn measure(
        &self,
        variant: &Variant,
        target: &Target,
        pair: usize,
        order: usize,
    ) -> Result<VariantRun, LaunchError> {
        let (options, progress) = (self.options, self.progress);
        progress.set_position(0);
        progress.set_message(format!("{} starts", variant.name));
        let log = self.logs.join(format!("{}-{pair}.log", variant.name.replace(['/', ' '], "-")));
        let mut running = Running::start(variant, target, &log)?;
        running.wait_ready(target, &variant.ready, options.ready_wait)?;
        let (renderer, workloads) = self.ready(variant, target)?;
        let (threads, timeout) = (options.client.threads, options.timeout);
        let (objectives, oracle) = (options.objectives.as_slice(), options.oracle.as_ref());
        let setup = Setup { renderer: &renderer, threads, timeout, objectives, oracle };
        let (facts, stats_before, begun) = (TargetFacts::of(&renderer), target.json("/stats"), Instant::now());
        let watch = Watch::begin(target.clone(), &options.devices)?;
        let measured = running.during(
            || closed_loop(&setup, &workloads, options.rounds, progress),
            |name, status| interrupt::raise(&format!("{name} ended while it was measured ({status})")),
        );
        let observed = watch.end();
        let cut_short = interrupt::raised();
        let pages = PageCheck::after(target, stats_before.as_ref(), IDLE_WAIT);
        let (elapsed, stats_after) = (begun.elapsed(), target.json("/stats"));
        let mut checks = Vec::from(check::of_requests(&measured.workloads));
        checks.extend(check::of_pages(stats_before.as_ref(), pages.as_ref()));
        checks.extend(check::of_account(stats_before.as_ref(), stats_after.as_ref(), elapsed));
        checks.extend(measured.verification.as_ref().map(check::of_verification));
        checks.extend(measured.checks);
        let skipped = options.workloads.iter().map(|w| &w.name).filter(|&n| workloads.iter().all(|w| w.name != *n));
        Ok(VariantRun {
            variant: variant.name.clone(),
            pair,
            order,
            cut_short,
            skipped: skipped.cloned().collect(),
            target: facts,
            stats_before,
            stats_after,
            pages,
            observed,
            warmups: measured.warmups,
            workloads: measured.workloads,
            verification: measured.verification,
            checks,
        })
    }

    /// Asks a server that is ready how it can be asked; the oracle must be able to judge every answer.
    fn ready(&self, variant: &Variant, target: &Target) -> Result<(Renderer, Vec<Workload>), LaunchError> {
        let options = self.options;
        let unfit = |message: String| LaunchError::Unfit { name: variant.name.clone(), message };
        let (model, dialects) = (options.model.clone(), [variant.dialect]);
        let mut renderer = Renderer::connect(target.clone(), model, &dialects, options.seeding)?;
        let settled = self.progress.suspend(|| (self.settle)(&mut renderer, &options.workloads));
        let workloads = settled.map_err(unfit)?;
        if let Some(oracle) = &options.oracle {
            oracle.fits(&renderer).map_err(|e| unfit(e.to_string()))?;
            let wires = wires_of(&renderer, &workloads, options.rounds);
            oracle.covers(wires).map_err(|e| unfit(e.to_string()))?;
        }
        Ok((renderer, workloads))
    }
}

/// Each check of the starts, over all of them, after the one that all were made.
fn checks_over(runs: &[VariantRun], expected: usize, failure: Option<&str>) -> Vec<Check> {
    let complete = runs.iter().filter(|r| !r.cut_short).count();
    let detail = format!("{complete} of {expected}");
    let detail = failure.map_or(detail.clone(), |why| format!("{detail}, then {why}"));
    let all = failure.is_none() && complete == expected;
    let mut over = vec![Check::when(all, "every server is started and measured", detail)];
    let mut names: Vec<&str> = Vec::new();
    for check in runs.iter().flat_map(|r| &r.checks) {
        if !names.contains(&check.name.as_str()) {
            names.push(&check.name);
        }
    }
    for name in names {
        let of = runs.iter().flat_map(|r| r.checks.iter().filter(|c| c.name == name).map(move |c| (r, c)));
        let (held, broken): (Vec<_>, Vec<_>) = of.partition(|(_, c)| c.passed);
        let told =
            |(run, check): &(&VariantRun, &Check)| format!("{}, pair {}: {}", run.variant, run.pair + 1, check.detail);
        let mut detail = vec![format!("{} of {} starts", held.len(), held.len() + broken.len())];
        detail.extend(broken.iter().take(BROKEN_SHOWN).map(told));
        over.push(Check::when(broken.is_empty(), name, detail.join("; ")));
    }
    over
}

impl Comparison {
    /// The complete starts of a variant.
    pub fn runs_of<'a>(&'a self, variant: &'a str) -> impl Iterator<Item = &'a VariantRun> {
        self.runs.iter().filter(move |r| !r.cut_short && r.variant == variant)
    }

    /// The compared workloads, in order.
    pub fn workload_names(&self) -> Vec<String> {
        workload_names(self.runs.iter())
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
    use crate::load::figures::Summary;

    fn run(variant: &str, pair: usize, tok_per_s: f64, mhz: Option<f64>) -> VariantRun {
        let across = Some(AcrossRounds { median: tok_per_s, min: tok_per_s, max: tok_per_s });
        let workload = Workload::named("isolated-8").expect("a workload");
        let summary = Summary { output_tok_per_s: across, ..Summary::default() };
        let report = WorkloadReport { workload, rounds: Vec::new(), summary, goodput_per_s: Vec::new() };
        let loaded = Loaded { cpu_mhz: mhz, ..Loaded::default() };
        let observed = Observed { loaded, ..Observed::default() };
        let target = TargetFacts {
            url: String::new(),
            model: "m".into(),
            health: None,
            dialects: std::collections::BTreeMap::new(),
        };
        VariantRun {
            variant: variant.into(),
            pair,
            order: 0,
            cut_short: false,
            skipped: Vec::new(),
            target,
            stats_before: None,
            stats_after: None,
            pages: None,
            observed,
            warmups: Counts::default(),
            workloads: vec![report],
            verification: None,
            checks: vec![Check::when(tok_per_s > 55.0, "fast", format!("{tok_per_s} tok/s"))],
        }
    }

    fn variant(name: &str) -> Variant {
        let (dialect, ready) = (Dialect::Native, "/health".into());
        let (command, url) = (vec!["x".into()], String::new());
        Variant { name: name.into(), command, url, dialect, ready, sha256: None, config: None }
    }

    #[test]
    fn the_order_of_the_starts_is_reversed_in_every_other_pair() {
        let starts: Vec<_> = schedule(2, 3).collect();
        assert_eq!(starts, [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0), (2, 0, 0), (2, 1, 1)]);
    }

    #[test]
    fn a_check_holds_over_all_starts_or_names_those_in_which_it_did_not() {
        let runs = [run("a", 0, 60.0, None), run("b", 0, 50.0, None)];
        let told = |runs: &[VariantRun], expected, failure| -> Vec<(bool, String)> {
            checks_over(runs, expected, failure).into_iter().map(|c| (c.passed, c.detail)).collect()
        };
        let broken = (false, "1 of 2 starts; b, pair 1: 50 tok/s".to_owned());
        assert_eq!(told(&runs, 2, None), [(true, "2 of 2".into()), broken.clone()]);
        assert_eq!(told(&runs, 4, Some("pair 2: x")), [(false, "2 of 4, then pair 2: x".into()), broken]);
        assert_eq!(told(&[], 4, Some("pair 1: x")).len(), 1);
        let cut = VariantRun { cut_short: true, ..run("a", 0, 60.0, None) };
        assert!(!told(&[cut], 1, None)[0].0, "a start that was cut short is not a measured one");
    }

    #[test]
    fn a_form_or_a_workload_that_only_one_variant_gave_up_fails_the_comparison() {
        use crate::load::dialect::Capabilities;
        let words = Capabilities { token_prompts: false, ..Capabilities::best_of(Dialect::OpenaiCompletions) };
        let plain = |variant: &str| run(variant, 0, 60.0, None);
        let mut other = plain("b");
        other.target.dialects.insert(Dialect::OpenaiCompletions, words);
        let of = |runs: &[VariantRun]| asked_the_same(runs).map(|c| (c.passed, c.detail));
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[plain("a"), plain("b")]), Some((true, "a: everything, b: everything".into())));
        let lost = of(&[plain("a"), other.clone()]).expect("a check");
        assert!(!lost.0 && lost.1.starts_with("a: everything, b: token ids are not taken"), "{lost:?}");
        assert!(of(&[VariantRun { variant: "a".into(), ..other.clone() }, other]).is_some_and(|c| c.0));
        let mut skips = VariantRun { skipped: vec!["w".into()], ..plain("b") };
        skips.workloads[0].workload.name = "another".into();
        assert!(of(&[plain("a"), skips.clone()]).is_some_and(|c| !c.0 && c.1.ends_with("b: w is skipped")));
        let runs = [&plain("a"), &skips];
        let changes = changes(&[variant("a"), variant("b")], &runs);
        assert!(!changes.is_empty() && changes.iter().all(|c| c.rounds.is_empty()), "nothing to compare it with");
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
        let runs: Vec<&VariantRun> = runs.iter().collect();
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
