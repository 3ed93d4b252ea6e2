//! `crucible load`: from arguments to a measurement, and from its report to files, a table and an exit code.
//!
//! Exit code 0 when everything that had to hold did; 1 when a bit differs from the oracle, a page is missing, an objective is missed
//! or a promise of the workload is broken.

mod args;
mod checks;
mod soak;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

pub use args::LoadArgs as Args;
use args::{
    ClientArgs, DeviceArgs, JudgeArgs, LoadCommand, MixArgs, OpenArgs, OracleArgs, OutputArgs, PairArgs, PressureArgs,
    RunArgs, SelftestArgs, StubArgs, SweepArgs, TargetArgs,
};

use super::Outcome;
use crate::load::arrivals::{Arrivals, read_trace};
use crate::load::burst::{PromptReuse, Rounds};
use crate::load::compare::{CompareOptions, compare};
use crate::load::dialect::{Dialect, Policy};
use crate::load::drive::{Setup, capacity_per_s, closed_loop, record_oracle, wires_of};
use crate::load::launch::Variant;
use crate::load::open::{self, Mix, OpenRun};
use crate::load::oracle::Oracle;
use crate::load::render::Renderer;
use crate::load::report::{Report, comparison, html, table, write, write_json};
use crate::load::selftest::{Capacity, SelfTest, measure};
use crate::load::stub::{Pace, Stub, StubOptions};
use crate::load::target::Target;
use crate::load::watch::{PageCheck, STATS_PERIOD, Watch};
use crate::load::workload::{STANDARD, Shot, Workload, from_file, select};

/// A server gets this long to become idle before its pages are counted.
const IDLE_WAIT: Duration = Duration::from_secs(15);

type Failure = Box<dyn std::error::Error>;

/// Runs the command.
///
/// # Errors
/// Arguments, files or the target that cannot be used; each says what to do.
pub fn run(args: &Args) -> Outcome {
    match &args.command {
        LoadCommand::Run(args) => match &args.ab {
            Some(files) => ab(args, files),
            None => closed(args),
        },
        LoadCommand::Sustained(args) => open_loop(args, "sustained", 0.5),
        LoadCommand::Overload(args) => open_loop(args, "overload", 2.0),
        LoadCommand::Pressure(args) => pressure(args),
        LoadCommand::Sweep(args) => sweep(args),
        LoadCommand::Soak(args) => soak::run(args),
        LoadCommand::RecordOracle(args) => oracle(args),
        LoadCommand::Stub(args) => stub(args),
        LoadCommand::Selftest(args) => selftest(args),
        LoadCommand::List => {
            STANDARD.iter().for_each(|name| println!("{name}"));
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{elapsed_precise} {bar:32} {pos}/{len} {msg}");
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn connect(args: &TargetArgs, dialects: &[Dialect]) -> Result<Renderer, Failure> {
    let target = Target::new(&args.target, args.api_key.clone())?;
    Ok(Renderer::connect(target, args.model.clone(), dialects, args.client.seeding())?)
}

/// The run's own dialect first, then those that single requests name.
fn dialects_of(own: Dialect, workloads: &[Workload]) -> Vec<Dialect> {
    let mut dialects = vec![own];
    for dialect in workloads.iter().flat_map(|w| w.shots.iter().filter_map(|s| s.dialect)) {
        if !dialects.contains(&dialect) {
            dialects.push(dialect);
        }
    }
    dialects
}

fn workloads_of(list: &str, file: Option<&PathBuf>) -> Result<Vec<Workload>, Failure> {
    let own = file.map_or(Ok(Vec::new()), |path| from_file(path))?;
    Ok(select(list, &own)?)
}

fn read_oracle(judge: &JudgeArgs) -> Result<Option<Oracle>, Failure> {
    Ok(judge.verify.as_deref().map(Oracle::read).transpose()?)
}

fn setup<'a>(
    renderer: &'a Renderer,
    client: &ClientArgs,
    judge: &'a JudgeArgs,
    oracle: Option<&'a Oracle>,
) -> Setup<'a> {
    Setup { renderer, threads: client.threads, timeout: client.timeout(), objectives: &judge.slo, oracle }
}

/// For requests that are sent one after the other.
fn setup_alone(renderer: &Renderer, timeout: Duration) -> Setup<'_> {
    Setup { renderer, threads: 1, timeout, objectives: &[], oracle: None }
}

fn begin(
    kind: &'static str,
    renderer: &Renderer,
    client: &ClientArgs,
    judge: &JudgeArgs,
    options: serde_json::Value,
) -> Result<Report, Failure> {
    let mut report = Report::begin(kind, renderer, client.threads, options);
    if judge.capacity {
        let test = SelfTest { threads: client.threads, concurrency: 16, tokens: 64, duration_s: 1.0 };
        report.client.capacity = Some(measure(Dialect::Native, StubOptions::default(), test)?);
    }
    Ok(report)
}

/// Waits until the server is idle and looks at it for the last time.
fn last_look(report: &mut Report, renderer: &Renderer) {
    let target = renderer.target();
    report.pages = PageCheck::after(target, report.stats_before.as_ref(), IDLE_WAIT);
    report.stats_after = target.json("/stats");
}

/// The verdict, the files and the table.
fn finish(mut report: Report, output: &OutputArgs) -> Outcome {
    checks::of_account(&mut report);
    report.settle();
    if let Some(path) = &output.out {
        write_json(path, &report)?;
    }
    if let Some(path) = &output.html {
        write(path, html::run(&report).as_bytes())?;
    }
    let (figures, devices) = (table::workloads(&report.workloads), report.observed.line());
    print!("{figures}{devices}\n{}", table::checks(&report.checks));
    Ok(exit(report.passed))
}

fn exit(passed: bool) -> ExitCode {
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn closed(args: &RunArgs) -> Outcome {
    let workloads = workloads_of(&args.work.workload, args.work.workloads.as_ref())?;
    let renderer = connect(&args.ask.target, &dialects_of(args.ask.dialect, &workloads))?;
    let oracle = read_oracle(&args.judge)?;
    let rounds = args.work.rounds();
    let options = json!({"dialect": args.ask.dialect, "rounds": rounds, "slo": args.judge.slo});
    let mut report = begin("run", &renderer, &args.ask.target.client, &args.judge, options)?;
    let watch = Watch::begin(renderer.target().clone(), &args.devices.options(), STATS_PERIOD)?;
    let progress = bar();
    let setup = setup(&renderer, &args.ask.target.client, &args.judge, oracle.as_ref());
    let measured = closed_loop(&setup, &workloads, rounds, &progress);
    progress.finish_and_clear();
    report.observed = watch.end();
    (report.workloads, report.verification, report.checks) =
        (measured.workloads, measured.verification, measured.checks);
    last_look(&mut report, &renderer);
    checks::no_failures(&mut report);
    finish(report, &args.output)
}

fn mix(args: &MixArgs) -> Result<Mix, Failure> {
    let lengths = args.prompt_tokens.iter().copied().chain([args.output_tokens]);
    if args.prompt_tokens.is_empty() || lengths.min() == Some(0) || args.prompt_variants == 0 {
        return Err("prompt lengths, output length and prompt variants must be at least 1".into());
    }
    let or_all = |given: &[Dialect]| if given.is_empty() { Dialect::ALL.to_vec() } else { given.to_vec() };
    Ok(Mix {
        dialects: or_all(&args.dialects),
        policies: if args.policies.is_empty() { Policy::ALL.to_vec() } else { args.policies.clone() },
        prompts: args.prompt_tokens.clone(),
        output: args.output_tokens,
        variants: args.prompt_variants,
        cancel_every: args.cancel_every,
        cancel_at: args.cancel_at.clone(),
    })
}

fn open_loop(args: &OpenArgs, kind: &'static str, factor: f64) -> Outcome {
    let mix = mix(&args.mix)?;
    let renderer = connect(&args.target, &mix.dialects)?;
    let oracle = read_oracle(&args.judge)?;
    let setup = setup(&renderer, &args.target.client, &args.judge, oracle.as_ref());
    let (plan, arrivals, capacity) = match &args.trace {
        Some(path) => (mix.plan_trace(&renderer, &read_trace(path)?), None, None),
        None => {
            let (arrivals, capacity) = arrivals(args, &setup, &mix, factor)?;
            let due = arrivals.schedule(args.duration_s, args.target.client.seed);
            (mix.plan(&renderer, &due), Some(arrivals), capacity)
        }
    };
    let options = json!({
        "mix": mix, "arrivals": arrivals, "capacity_requests_per_s": capacity, "duration_s": args.duration_s,
        "trace": args.trace, "slo": args.judge.slo,
    });
    let mut report = begin(kind, &renderer, &args.target.client, &args.judge, options)?;
    let watch = Watch::begin(renderer.target().clone(), &args.devices.options(), STATS_PERIOD)?;
    let progress = bar();
    let OpenRun { measured, timeline, counts } = open::run(&setup, kind, plan, &progress);
    progress.finish_and_clear();
    report.observed = watch.end();
    report.timeline = timeline;
    (report.workloads, report.verification, report.checks) =
        (measured.workloads, measured.verification, measured.checks);
    last_look(&mut report, &renderer);
    checks::of_open_loop(&mut report, &counts, args.expect_queue);
    finish(report, &args.output)
}

fn arrivals(args: &OpenArgs, setup: &Setup<'_>, mix: &Mix, factor: f64) -> Result<(Arrivals, Option<f64>), Failure> {
    let positive = |name: &str, value: f64| -> Result<f64, Failure> {
        if value > 0.0 && value.is_finite() { Ok(value) } else { Err(format!("{name} must be above 0").into()) }
    };
    positive("--duration-s", args.duration_s)?;
    let (law, burst) = (args.arrivals, args.burst.max(1));
    if let Some(rate) = args.rate {
        return Ok((Arrivals { law, rate: positive("--rate", rate)?, burst }, None));
    }
    let seconds = positive("--calibrate-s", args.calibrate_s)?;
    let factor = positive("--factor", args.factor.unwrap_or(factor))?;
    eprintln!("measuring the capacity for {seconds} s");
    let unverified = Setup { oracle: None, ..setup.clone() };
    let capacity =
        capacity_per_s(&unverified, args.calibrate_concurrency.max(1), seconds, |n| mix.wire(setup.renderer, n));
    if capacity == 0.0 {
        return Err(
            "no request completed while the capacity was measured; give --rate or a longer --calibrate-s".into()
        );
    }
    let rate = capacity * factor;
    eprintln!("capacity {capacity:.2} requests/s, rate {rate:.2} requests/s");
    Ok((Arrivals { law, rate, burst }, Some(capacity)))
}

fn pressure(args: &PressureArgs) -> Outcome {
    let renderer = connect(&args.ask.target, &[args.ask.dialect])?;
    let oracle = read_oracle(&args.judge)?;
    let shots = vec![Shot::new(args.prompt_tokens.max(1), args.output_tokens.max(1)); args.burst.max(1) as usize];
    let workload = Workload { name: "pressure".into(), established: None, shots };
    let rounds = Rounds { warmups: 0, trials: 1, prompts: PromptReuse::Fresh };
    let options = json!({"expect_pages": args.expect_pages, "expect_queue": args.expect_queue, "burst": args.burst});
    let mut report = begin("pressure", &renderer, &args.ask.target.client, &args.judge, options)?;
    let watch = Watch::begin(renderer.target().clone(), &args.devices.options(), STATS_PERIOD)?;
    let progress = bar();
    let setup = setup(&renderer, &args.ask.target.client, &args.judge, oracle.as_ref());
    let measured = closed_loop(&setup, &[workload], rounds, &progress);
    progress.finish_and_clear();
    report.observed = watch.end();
    (report.workloads, report.verification, report.checks) =
        (measured.workloads, measured.verification, measured.checks);
    last_look(&mut report, &renderer);
    checks::of_pressure(&mut report, args.expect_pages, args.expect_queue);
    finish(report, &args.output)
}

fn binary(pairs: &PairArgs, index: usize) -> Result<PathBuf, Failure> {
    match pairs.binary.get(index).or(pairs.binary.last()) {
        Some(path) => Ok(path.clone()),
        None => Ok(std::env::current_exe()?),
    }
}

fn compare_options(
    work: &args::WorkloadArgs,
    client: &ClientArgs,
    pairs: &PairArgs,
    devices: &DeviceArgs,
) -> Result<CompareOptions, Failure> {
    Ok(CompareOptions {
        pairs: pairs.pairs.max(1),
        rounds: work.rounds(),
        workloads: workloads_of(&work.workload, work.workloads.as_ref())?,
        seeding: client.seeding(),
        threads: client.threads,
        timeout: client.timeout(),
        ready_wait: Duration::from_secs(pairs.ready_s),
        devices: devices.options(),
    })
}

fn compared(variants: Vec<Variant>, options: &CompareOptions, logs: &Path, output: &OutputArgs) -> Outcome {
    std::fs::create_dir_all(logs)?;
    let progress = bar();
    let found = compare(variants, options, logs, &progress)?;
    progress.finish_and_clear();
    if let Some(path) = &output.out {
        write_json(path, &found)?;
    }
    if let Some(path) = &output.html {
        write(path, comparison::page(&found).as_bytes())?;
    }
    print!("{}", comparison::text(&found));
    Ok(exit(found.failed() == 0))
}

fn ab(args: &RunArgs, files: &[PathBuf]) -> Outcome {
    if args.judge.verify.is_some() || !args.judge.slo.is_empty() {
        return Err("--verify and --slo judge one server; run them without --ab".into());
    }
    let mut variants = Vec::new();
    for (index, file) in files.iter().enumerate() {
        let mut variant = Variant::from_file(file, &binary(&args.pairs, index)?)?;
        if variants.iter().any(|v: &Variant| v.name == variant.name) {
            variant.name.push_str(" (B)");
        }
        variants.push(variant);
    }
    let options = compare_options(&args.work, &args.ask.target.client, &args.pairs, &args.devices)?;
    compared(variants, &options, &args.pairs.logs, &args.output)
}

fn sweep(args: &SweepArgs) -> Outcome {
    let binary = binary(&args.pairs, 0)?;
    let mut variants = Vec::new();
    for budget in &args.budgets {
        for cap in &args.caps {
            let quoted = if cap.parse::<u32>().is_ok() { cap.clone() } else { format!("\"{cap}\"") };
            let own = [format!("prefill.token_budget={budget}"), format!("prefill.chunk_cap={quoted}")];
            let settings = [args.settings.as_slice(), &own].concat();
            variants.push(Variant::serve(&format!("{budget}/{cap}"), &binary, &args.config, &settings)?);
        }
    }
    if variants.len() < 2 {
        return Err("a sweep needs at least two combinations of --budgets and --caps".into());
    }
    let options = compare_options(&args.work, &args.client, &args.pairs, &args.devices)?;
    compared(variants, &options, &args.pairs.logs, &args.output)
}

fn oracle(args: &OracleArgs) -> Outcome {
    let mix = mix(&args.mix)?;
    let names: Vec<&str> = args.work.workload.split(',').map(str::trim).filter(|n| *n != "sustained").collect();
    let with_mix = args.work.workload.split(',').any(|n| n.trim() == "sustained");
    let workloads = if names.is_empty() && with_mix {
        Vec::new()
    } else {
        workloads_of(&names.join(","), args.work.workloads.as_ref())?
    };
    let mut dialects = dialects_of(args.ask.dialect, &workloads);
    if with_mix {
        dialects.extend(mix.dialects.iter().filter(|d| !dialects.contains(d)).copied().collect::<Vec<_>>());
    }
    let renderer = connect(&args.ask.target, &dialects)?;
    let mut wires = wires_of(&renderer, &workloads, args.work.rounds());
    if with_mix {
        wires.extend(mix.wires(&renderer));
    }
    let progress = bar();
    let oracle = record_oracle(&setup_alone(&renderer, args.ask.target.client.timeout()), wires, &progress)?;
    progress.finish_and_clear();
    oracle.write(&args.out)?;
    let ids: usize = oracle.entries.values().map(|e| e.token_ids.len()).sum();
    println!("{} answers with {ids} token ids in {}", oracle.entries.len(), args.out.display());
    Ok(ExitCode::SUCCESS)
}

fn stub(args: &StubArgs) -> Outcome {
    let pace = match (args.gap_us, args.each_event) {
        (Some(us), _) => Pace::Every(Duration::from_micros(us)),
        (None, true) => Pace::EachEvent,
        (None, false) => Pace::Together,
    };
    let (refuse_every, break_every, threads) = (args.refuse_every, args.break_every, args.threads);
    let stub = Stub::start(args.listen, StubOptions { pace, refuse_every, break_every, threads })?;
    println!("the stub listens on http://{}", stub.address);
    stub.join();
    Ok(ExitCode::SUCCESS)
}

fn selftest(args: &SelftestArgs) -> Outcome {
    let pace = if args.each_event { Pace::EachEvent } else { Pace::Together };
    let threads = args.threads.max(1);
    let (concurrency, tokens, duration_s) = (args.concurrency.max(1), args.tokens.max(1), args.duration_s);
    let test = SelfTest { threads, concurrency, tokens, duration_s };
    let mut figures: Vec<Capacity> = Vec::new();
    for dialect in Dialect::ALL.into_iter().filter(|d| args.dialect.is_none_or(|only| only == *d)) {
        figures.push(measure(dialect, StubOptions { pace, threads, ..StubOptions::default() }, test)?);
    }
    let mut rows = vec![["dialect", "events/s", "requests/s", "MB/s", "failed"].map(str::to_owned).to_vec()];
    for c in &figures {
        rows.push(vec![
            c.dialect.name().to_owned(),
            format!("{:.0}", c.events_per_s),
            format!("{:.0}", c.requests_per_s),
            format!("{:.1}", c.bytes_per_s / 1e6),
            c.failed.to_string(),
        ]);
    }
    print!("{}", table::aligned(&rows));
    if let Some(path) = &args.out {
        write_json(path, &figures)?;
    }
    let native = figures.iter().find(|c| c.dialect == Dialect::Native);
    let fast = native.zip(args.expect_events_per_s).is_none_or(|(c, expected)| c.events_per_s >= expected);
    Ok(exit(fast && figures.iter().all(|c| c.failed == 0)))
}
