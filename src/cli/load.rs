//! `crucible load`: from arguments to a measurement, and from its report to files, a table and an exit code.
//!
//! Exit code 0 when everything that had to hold did; 1 when a bit differs from the oracle, a page is missing, an objective is missed,
//! a promise of the workload is broken, or the measurement was ended early. The files are checked before anything is measured, and the
//! table is printed before they are written.

mod args;
mod checks;
mod commands;
mod compared;
mod one;
mod ready;
mod soak;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use args::{ClientArgs, JudgeArgs, MixArgs, OutputArgs, ServerArgs};
pub use commands::LoadArgs as Args;
use commands::{LoadCommand, OracleArgs, SelftestArgs, StubArgs};
use ready::{connect, runnable};

use super::Outcome;
use crate::load::dialect::{Dialect, Policy};
use crate::load::drive::{Setup, record_oracle, wires_of};
use crate::load::file;
use crate::load::interrupt;
use crate::load::launch::Running;
use crate::load::limits;
use crate::load::open::{Mix, SUSTAINED_PROMPTS};
use crate::load::oracle::Oracle;
use crate::load::render::Renderer;
use crate::load::report::{Check, ClientFacts, table};
use crate::load::selftest::{Capacity, SelfTest, measure};
use crate::load::stub::{Pace, Prompts, Stub, StubOptions};
use crate::load::target::Target;
use crate::load::variant::Variant;
use crate::load::workload::{STANDARD, Workload, from_file, select};

/// A server gets this long to become idle before its pages are counted.
const IDLE_WAIT: Duration = Duration::from_secs(15);
/// Distinct prompts of each kind of a mix.
const PROMPT_VARIANTS: u64 = 4;
/// Every so many-th request of a mix is cancelled.
const CANCEL_EVERY: usize = 17;
/// Between two looks of whoever watches the bar.
const TICK: Duration = Duration::from_millis(200);

type Failure = Box<dyn std::error::Error>;

/// Runs the command.
///
/// # Errors
/// Arguments, files or the target that cannot be used; each says what to do.
pub fn run(args: &Args) -> Outcome {
    match &args.command {
        LoadCommand::Run(args) => measured(&args.output, &[], || match &args.ab {
            Some(files) => compared::ab(args, files),
            None => one::closed(args),
        }),
        LoadCommand::Sustained(args) => measured(&args.output, &[], || one::open_loop(args, "sustained", 0.5)),
        LoadCommand::Overload(args) => measured(&args.output, &[], || one::open_loop(args, "overload", 2.0)),
        LoadCommand::Pressure(args) => measured(&args.output, &[], || one::pressure(args)),
        LoadCommand::Sweep(args) => measured(&args.output, &[], || compared::sweep(args)),
        LoadCommand::Soak(args) => measured(&args.output, args.oracle_out.as_slice(), || soak::run(args)),
        LoadCommand::RecordOracle(args) => {
            file::check([args.out.as_path()])?;
            oracle(args)
        }
        LoadCommand::Stub(args) => stub(args),
        LoadCommand::Selftest(args) => {
            file::check(args.out.as_deref())?;
            selftest(args)
        }
        LoadCommand::List => {
            let names: Vec<String> = STANDARD.iter().map(|name| format!("{name}\n")).collect();
            super::print(&names.concat())?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// A measurement whose files can be written and which ends at a signal with what it has.
fn measured(output: &OutputArgs, others: &[PathBuf], measure: impl FnOnce() -> Outcome) -> Outcome {
    file::check(output.paths().chain(others.iter().map(PathBuf::as_path)))?;
    interrupt::catch()?;
    measure().map_err(|e| match interrupt::cause() {
        Some(cause) => format!("{cause}: {e}").into(),
        None => e,
    })
}

fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{elapsed_precise} {bar:32} {pos}/{len} {msg}");
    let bar = ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(TICK);
    bar
}

fn workloads_of(list: &str, file: Option<&PathBuf>) -> Result<Vec<Workload>, Failure> {
    let own = file.map_or(Ok(Vec::new()), |path| from_file(path))?;
    let chosen = select(list, &own)?;
    if file.is_some() && !chosen.iter().any(|c| own.iter().any(|w| w.name == c.name)) {
        return Err("--workloads belongs to names of its own, and --workload has none; add one, or leave it out".into());
    }
    Ok(chosen)
}

fn setup<'a>(
    renderer: &'a Renderer,
    client: &ClientArgs,
    judge: &'a JudgeArgs,
    oracle: Option<&'a Oracle>,
) -> Setup<'a> {
    Setup { renderer, threads: client.threads(), timeout: client.timeout(), objectives: &judge.slo, oracle }
}

/// For requests that are sent one after the other.
fn setup_alone(renderer: &Renderer, timeout: Duration) -> Setup<'_> {
    Setup { renderer, threads: 1, timeout, objectives: &[], oracle: None }
}

/// The client's facts, with its capacity where that is asked for.
fn client_facts(threads: usize, with_capacity: bool) -> Result<ClientFacts, Failure> {
    let mut client = ClientFacts::here(threads);
    if with_capacity {
        let test = SelfTest { threads, concurrency: 16, tokens: 64, duration_s: 1.0 };
        client.capacity = Some(measure(Dialect::Native, StubOptions::default(), test)?);
    }
    Ok(client)
}

/// Prints the figures, then writes both files, and fails when one of the three cannot be written.
fn publish(
    figures: &str,
    report: &impl Serialize,
    page: impl FnOnce() -> String,
    output: &OutputArgs,
) -> Result<(), Failure> {
    let printed = super::print(figures);
    let json = output.out.as_deref().map(|path| file::write_json(path, report));
    let html = output.html.as_deref().map(|path| file::write(path, page().as_bytes()));
    let unwritten = [json, html].into_iter().flatten().filter_map(Result::err).map(|e| e.to_string());
    let failed: Vec<String> = printed.err().map(|e| e.to_string()).into_iter().chain(unwritten).collect();
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ").into()) }
}

fn exit(passed: bool) -> ExitCode {
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The program of the n-th of `servers`.
fn binary(args: &ServerArgs, index: usize, servers: usize) -> Result<PathBuf, Failure> {
    if args.binary.len() > servers {
        return Err(format!("--binary is given {} times for {servers} programs", args.binary.len()).into());
    }
    match args.binary.get(index).or(args.binary.last()) {
        Some(path) => Ok(path.clone()),
        None => Ok(std::env::current_exe()?),
    }
}

/// A server of this project that was started for the measurement and is ready.
struct Started {
    variant: Variant,
    target: Target,
    running: Running,
}

/// Starts one; its output goes to a file of its name, and its small answers must come within `timeout`.
fn start(
    name: &str,
    args: &ServerArgs,
    config: &Path,
    settings: &[String],
    api_key: Option<&String>,
    timeout: Duration,
) -> Result<Started, Failure> {
    let mut variant = Variant::serve(name, &binary(args, 0, 1)?, config, settings)?;
    variant.hash()?;
    file::make_folder(args.logs())?;
    let target = Target::new(&variant.url, api_key.cloned())?.within(timeout);
    let mut running = Running::start(&variant, &target, &args.logs().join(format!("{name}.log")))?;
    running.wait_ready(&target, &variant.ready, args.ready_wait())?;
    Ok(Started { variant: variant.told(api_key.map(String::as_str)), target, running })
}

/// The mix with answers of its own length.
fn mix(args: &MixArgs) -> Result<Mix, Failure> {
    mix_up_to(args, args.output())
}

/// The mix with answers of at most so many tokens, as a trace has them.
fn mix_up_to(args: &MixArgs, longest: u32) -> Result<Mix, Failure> {
    let or_all = |given: &[Dialect]| if given.is_empty() { Dialect::ALL.to_vec() } else { given.to_vec() };
    let mix = Mix {
        dialects: or_all(&args.dialects),
        policies: if args.policies.is_empty() { Policy::ALL.to_vec() } else { args.policies.clone() },
        prompts: if args.prompt_tokens.is_empty() { SUSTAINED_PROMPTS.to_vec() } else { args.prompt_tokens.clone() },
        output: args.output(),
        variants: args.prompt_variants.unwrap_or(PROMPT_VARIANTS),
        cancel_every: args.cancel_every.unwrap_or(CANCEL_EVERY),
        cancel_at: args.cancel_points(longest)?,
    };
    let told = |policy: &&Policy| !mix.dialects.iter().any(|d| Policy::on(*d).contains(policy));
    if let Some(policy) = args.policies.iter().find(told) {
        let name = serde_json::to_value(policy)?;
        return Err(format!("--policies {name} belongs to none of these dialects; leave it out, or add native").into());
    }
    let kinds = mix.dialects.len() * mix.policies.len() * mix.prompts.len();
    limits::RUN_REQUESTS
        .check((kinds as u64).saturating_mul(mix.variants))
        .map_err(|e| format!("dialects × policies × prompt lengths × variants: {e}"))?;
    Ok(mix)
}

fn oracle(args: &OracleArgs) -> Outcome {
    if let Some(flag) = args.mix.cancels_given() {
        return Err(
            format!("{flag} belongs to requests under load, and an oracle has whole answers; leave it out").into()
        );
    }
    if args.ask.target.client.threads.is_some() {
        return Err("--threads belongs to requests under load, and these are sent one by one; leave it out".into());
    }
    let mix = mix(&args.mix)?;
    let names: Vec<&str> = args.work.workload.split(',').map(str::trim).filter(|n| *n != "sustained").collect();
    let with_mix = args.work.workload.split(',').any(|n| n.trim() == "sustained");
    if let Some(flag) = args.mix.given().filter(|_| !with_mix) {
        return Err(format!("{flag} belongs to the mix; add sustained to --workload, or leave it out").into());
    }
    let closed = args.work.given().or_else(|| args.ask.dialect.map(|_| "--dialect"));
    if let Some(flag) = closed.filter(|_| names.is_empty()) {
        return Err(format!("{flag} belongs to closed-loop workloads and the mix has none; leave it out").into());
    }
    let workloads = if names.is_empty() && with_mix {
        Vec::new()
    } else {
        workloads_of(&names.join(","), args.work.workloads.as_ref())?
    };
    let mut dialects: Vec<Dialect> = if names.is_empty() { Vec::new() } else { vec![args.ask.dialect()] };
    if with_mix {
        dialects.extend(mix.dialects.iter().filter(|d| names.is_empty() || **d != args.ask.dialect()));
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
    super::print(&format!("{} answers with {ids} token ids in {}\n", oracle.entries.len(), args.out.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn stub(args: &StubArgs) -> Outcome {
    if args.text_prompts && args.only.is_some_and(|dialect| !dialect.takes_token_ids()) {
        return Err("--text-prompts belongs to dialects with prompts of token ids; leave it or --only out".into());
    }
    let pace = match (args.gap_us, args.each_event) {
        (Some(us), _) => Pace::Every(Duration::from_micros(us)),
        (None, true) => Pace::EachEvent,
        (None, false) => Pace::Together,
    };
    let (refuse_every, break_every, threads) = (args.refuse_every, args.break_every, args.threads);
    let (only, prompts) = (args.only, if args.text_prompts { Prompts::Text } else { Prompts::Any });
    let options = StubOptions { pace, refuse_every, break_every, threads, only, prompts };
    let stub = Stub::start(args.listen, options)?;
    super::print(&format!("the stub listens on http://{}\n", stub.address))?;
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
    let printed = super::print(&table::aligned(&rows));
    if let Some(path) = &args.out {
        file::write_json(path, &figures)?;
    }
    let checks = selftest_checks(&figures, args.expect_events_per_s);
    printed.and_then(|()| super::print(&table::checks(&checks)))?;
    Ok(exit(checks.iter().all(|c| c.passed)))
}

/// Every stream must complete, and the native dialect be read as fast as it is expected to.
fn selftest_checks(figures: &[Capacity], expected: Option<f64>) -> Vec<Check> {
    let failed: usize = figures.iter().map(|c| c.failed).sum();
    let mut checks = vec![Check::when(failed == 0, "every stream completes", format!("{failed} failed"))];
    let native = figures.iter().find(|c| c.dialect == Dialect::Native);
    checks.extend(native.zip(expected).map(|(c, expected)| {
        let detail = format!("native: {:.0} events/s, {expected:.0} expected", c.events_per_s);
        Check::when(c.events_per_s >= expected, "the client is fast enough", detail)
    }));
    checks
}
