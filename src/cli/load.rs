//! `crucible load`: from arguments to a measurement, and from its report to files, a table and an exit code.
//!
//! Exit code 0 when everything that had to hold did; 1 when a bit differs from the oracle, a page is missing, an objective is missed
//! or a promise of the workload is broken.

mod args;
mod checks;
mod ready;
mod soak;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

pub use args::LoadArgs as Args;
use args::{
    ClientArgs, DeviceArgs, JudgeArgs, LoadCommand, MixArgs, OpenArgs, OracleArgs, OutputArgs, PairArgs, PressureArgs,
    RunArgs, SelftestArgs, StubArgs, SweepArgs,
};
use ready::{connect, oracle_of, runnable};

use super::Outcome;
use crate::load::arrivals::{Arrivals, Law, read_trace};
use crate::load::burst::{PromptReuse, Rounds};
use crate::load::compare::{CompareOptions, compare};
use crate::load::dialect::{Dialect, Policy};
use crate::load::drive::{Setup, capacity_per_s, closed_loop, record_oracle, wires_of};
use crate::load::launch::Variant;
use crate::load::limits;
use crate::load::open::{self, Mix, OpenRun};
use crate::load::oracle::Oracle;
use crate::load::render::Renderer;
use crate::load::report::{Report, comparison, html, table, write, write_json};
use crate::load::selftest::{Capacity, SelfTest, measure};
use crate::load::stub::{Pace, Stub, StubOptions};
use crate::load::watch::{PageCheck, STATS_PERIOD, Watch};
use crate::load::workload::{STANDARD, Shot, Workload, from_file, select};

/// A server gets this long to become idle before its pages are counted.
const IDLE_WAIT: Duration = Duration::from_secs(15);

/// Requests of one burst of `--arrivals burst`.
const BURST_DEFAULT: u32 = 8;

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

fn workloads_of(list: &str, file: Option<&PathBuf>) -> Result<Vec<Workload>, Failure> {
    let own = file.map_or(Ok(Vec::new()), |path| from_file(path))?;
    Ok(select(list, &own)?)
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
    if report.stats_before.is_none() {
        eprintln!("note: the target has no /stats, so its pages and its account are not checked");
    }
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
    checks::of_target(&mut report);
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
    let mut renderer = connect(&args.ask.target, &[args.ask.dialect])?;
    let (workloads, skipped) = runnable(&mut renderer, workloads, &args.work.workload)?;
    let oracle = oracle_of(&args.judge, &renderer)?;
    let rounds = args.work.rounds();
    oracle.as_ref().map_or(Ok(()), |o| o.covers(wires_of(&renderer, &workloads, rounds)))?;
    let options = json!({"dialect": args.ask.dialect, "rounds": rounds, "slo": args.judge.slo, "skipped": skipped});
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
    checks::of_requests(&mut report, workloads.len());
    finish(report, &args.output)
}

fn mix(args: &MixArgs) -> Result<Mix, Failure> {
    if args.prompt_tokens.is_empty() {
        return Err("--prompt-tokens must name a length".into());
    }
    let or_all = |given: &[Dialect]| if given.is_empty() { Dialect::ALL.to_vec() } else { given.to_vec() };
    let mix = Mix {
        dialects: or_all(&args.dialects),
        policies: if args.policies.is_empty() { Policy::ALL.to_vec() } else { args.policies.clone() },
        prompts: args.prompt_tokens.clone(),
        output: args.output_tokens,
        variants: args.prompt_variants,
        cancel_every: args.cancel_every,
        cancel_at: args.cancel_at.clone(),
    };
    let kinds = mix.dialects.len() * mix.policies.len() * mix.prompts.len();
    limits::RUN_REQUESTS
        .check((kinds as u64).saturating_mul(mix.variants))
        .map_err(|e| format!("dialects × policies × prompt lengths × variants: {e}"))?;
    Ok(mix)
}

fn open_loop(args: &OpenArgs, kind: &'static str, factor: f64) -> Outcome {
    refuse_idle_flags(args, kind)?;
    let mix = mix(&args.mix)?;
    let trace = args.trace.as_deref().map(read_trace).transpose()?;
    let tokens = trace.iter().flatten().map(|e| u64::from(e.prompt_length)).sum::<u64>().max(1);
    limits::RUN_TOKENS.check(tokens).map_err(|e| format!("the trace's prompt tokens in all: {e}"))?;
    let renderer = connect(&args.target, &mix.dialects)?;
    let oracle = oracle_of(&args.judge, &renderer)?;
    let setup = setup(&renderer, &args.target.client, &args.judge, oracle.as_ref());
    let (plan, arrivals, capacity) = match trace {
        Some(trace) => (mix.plan_trace(&renderer, &trace), None, None),
        None => {
            let (arrivals, capacity) = arrivals(args, &setup, &mix, factor)?;
            arrivals.check(args.duration_s)?;
            let due = arrivals.schedule(args.duration_s, args.target.client.seed);
            mix.check(due.len())?;
            (mix.plan(&renderer, &due), Some(arrivals), capacity)
        }
    };
    oracle.as_ref().map_or(Ok(()), |o| o.covers(plan.iter().map(|p| &p.wire)))?;
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

/// A flag that would do nothing is a misunderstanding.
fn refuse_idle_flags(args: &OpenArgs, kind: &str) -> Result<(), Failure> {
    if args.burst.is_some() && args.arrivals != Law::Burst {
        return Err("--burst belongs to --arrivals burst".into());
    }
    if args.expect_queue.is_some() && kind != "overload" {
        return Err("--expect-queue belongs to `load overload`: a steady rate need not fill the queue".into());
    }
    Ok(())
}

fn arrivals(args: &OpenArgs, setup: &Setup<'_>, mix: &Mix, factor: f64) -> Result<(Arrivals, Option<f64>), Failure> {
    let (law, burst) = (args.arrivals, args.burst.unwrap_or(BURST_DEFAULT));
    if let Some(rate) = args.rate {
        return Ok((Arrivals { law, rate, burst }, None));
    }
    let (seconds, factor) = (args.calibrate_s, args.factor.unwrap_or(factor));
    eprintln!("measuring the capacity for {seconds} s");
    let unverified = Setup { oracle: None, ..setup.clone() };
    let capacity = capacity_per_s(&unverified, args.calibrate_concurrency, seconds, |n| mix.wire(setup.renderer, n));
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
    let tokens = u64::from(args.burst) * u64::from(args.prompt_tokens);
    limits::BURST_TOKENS.check(tokens).map_err(|e| format!("the burst's prompt tokens in all: {e}"))?;
    let renderer = connect(&args.ask.target, &[args.ask.dialect])?;
    let oracle = oracle_of(&args.judge, &renderer)?;
    let shots = vec![Shot::new(args.prompt_tokens, args.output_tokens); args.burst as usize];
    let workloads = [Workload { name: "pressure".into(), established: None, shots }];
    let rounds = Rounds { warmups: 0, trials: 1, prompts: PromptReuse::Fresh };
    oracle.as_ref().map_or(Ok(()), |o| o.covers(wires_of(&renderer, &workloads, rounds)))?;
    let options = json!({"expect_pages": args.expect_pages, "expect_queue": args.expect_queue, "burst": args.burst});
    let mut report = begin("pressure", &renderer, &args.ask.target.client, &args.judge, options)?;
    let watch = Watch::begin(renderer.target().clone(), &args.devices.options(), STATS_PERIOD)?;
    let progress = bar();
    let setup = setup(&renderer, &args.ask.target.client, &args.judge, oracle.as_ref());
    let measured = closed_loop(&setup, &workloads, rounds, &progress);
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
        pairs: pairs.pairs,
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
    Oracle::can_be_written(&args.out)?;
    let mix = mix(&args.mix)?;
    let names: Vec<&str> = args.work.workload.split(',').map(str::trim).filter(|n| *n != "sustained").collect();
    let with_mix = args.work.workload.split(',').any(|n| n.trim() == "sustained");
    let workloads = if names.is_empty() && with_mix {
        Vec::new()
    } else {
        workloads_of(&names.join(","), args.work.workloads.as_ref())?
    };
    let mut dialects = vec![args.ask.dialect];
    if with_mix {
        dialects.extend(mix.dialects.iter().filter(|d| **d != args.ask.dialect));
    }
    let mut renderer = connect(&args.ask.target, &dialects)?;
    let workloads =
        if workloads.is_empty() { workloads } else { runnable(&mut renderer, workloads, &args.work.workload)?.0 };
    let mut wires: Vec<_> = wires_of(&renderer, &workloads, args.work.rounds()).collect();
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
    if args.expect_events_per_s.is_some() && args.dialect.is_some_and(|d| d != Dialect::Native) {
        return Err("--expect-events-per-s judges the native dialect; leave --dialect out or choose native".into());
    }
    let (threads, concurrency, tokens, duration_s) = (args.threads, args.concurrency, args.tokens, args.duration_s);
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
