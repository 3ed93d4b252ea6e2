//! Measurements of one server: the closed loop, the open loop and the pressure burst.

use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::args::{ClientArgs, DeviceArgs, JudgeArgs, OutputArgs};
use super::commands::{OpenArgs, PressureArgs, RunArgs};
use super::ready::{connect, note_given_up, oracle_of, refuse_idle_devices, runnable};
use super::{
    Failure, IDLE_WAIT, Outcome, Started, bar, checks, client_facts, exit, mix_up_to, publish, setup, start,
    workloads_of,
};
use crate::load::arrivals::{Arrivals, Law, read_trace};
use crate::load::burst::{PromptReuse, Rounds};
use crate::load::calibrate::{Calibration, capacity};
use crate::load::drive::{Measured, Setup, closed_loop, wires_of};
use crate::load::interrupt;
use crate::load::limits;
use crate::load::open::{self, Mix, OpenRun, Planned};
use crate::load::render::Renderer;
use crate::load::report::{Report, html, table};
use crate::load::target::Target;
use crate::load::watch::{PageCheck, Watch, counter};
use crate::load::workload::{Shot, Workload};
use crate::output::note;

/// Requests of one burst of `--arrivals burst`.
const BURST_DEFAULT: u32 = 8;

/// What every measurement of one server is given.
struct Measurement<'a> {
    kind: &'static str,
    setup: Setup<'a>,
    client: &'a ClientArgs,
    judge: &'a JudgeArgs,
    devices: &'a DeviceArgs,
    output: &'a OutputArgs,
    options: Value,
}

impl Measurement<'_> {
    /// Asks while it watches, waits until the server is idle, judges, and publishes the report.
    fn run(
        mut self,
        ask: impl FnOnce(&Setup<'_>, &ProgressBar) -> OpenRun,
        judge: impl FnOnce(&mut Report),
    ) -> Outcome {
        let renderer = self.setup.renderer;
        let target = renderer.target();
        self.options["slo"] = json!(self.judge.slo);
        self.options["timeout_s"] = json!(self.client.timeout().as_secs());
        let client = client_facts(self.client.threads(), self.judge.capacity)?;
        let mut report = Report::begin(self.kind, renderer, client, self.options);
        if report.stats_before.is_none() {
            note(format_args!("note: the target has no /stats, so its pages and its account are not checked"));
        }
        let watch = Watch::begin(target.clone(), &self.devices.options())?;
        let progress = bar();
        let OpenRun { measured, timeline, .. } = ask(&self.setup, &progress);
        progress.finish_and_clear();
        let Measured { workloads, warmups, verification, checks } = measured;
        (report.observed, report.timeline, report.warmups) = (watch.end(), timeline, warmups);
        (report.workloads, report.verification, report.checks) = (workloads, verification, checks);
        report.pages = PageCheck::after(target, report.stats_before.as_ref(), IDLE_WAIT);
        report.look_again(target);
        judge(&mut report);
        checks::of_target(&mut report);
        report.settle(interrupt::cause().as_deref());
        let capacity =
            report.client.capacity.as_ref().map_or(String::new(), |_| format!("client: {}\n", report.client.load()));
        let figures = format!(
            "{}{}\n{capacity}{}",
            table::workloads(&report.workloads),
            report.observed.line(),
            table::checks(&report.checks)
        );
        publish(&figures, &report, || html::run(&report), self.output)?;
        Ok(exit(report.passed))
    }
}

fn in_closed_loop(workloads: &[Workload], rounds: Rounds) -> impl FnOnce(&Setup<'_>, &ProgressBar) -> OpenRun {
    move |setup, progress| OpenRun { measured: closed_loop(setup, workloads, rounds, progress), ..OpenRun::default() }
}

pub fn closed(args: &RunArgs) -> Outcome {
    let pairs = args.pairs.pairs.map(|_| "--pairs");
    if let Some(flag) = pairs.or_else(|| args.pairs.servers.given()) {
        return Err(format!("{flag} belongs to servers that are started to compare; give --ab, or leave it out").into());
    }
    let workloads = workloads_of(&args.work.workload, args.work.workloads.as_ref())?;
    refuse_idle_devices(&args.devices, &args.ask.target)?;
    let oracle = oracle_of(&args.judge)?;
    let mut renderer = connect(&args.ask.target, &[args.ask.dialect()])?;
    oracle.as_ref().map_or(Ok(()), |o| o.fits(&renderer))?;
    let (workloads, skipped) = runnable(&mut renderer, workloads, &args.work.workload)?;
    let (rounds, client) = (args.work.rounds(), &args.ask.target.client);
    oracle.as_ref().map_or(Ok(()), |o| o.covers(wires_of(&renderer, &workloads, rounds)))?;
    let measurement = Measurement {
        kind: "run",
        setup: setup(&renderer, client, &args.judge, oracle.as_ref()),
        client,
        judge: &args.judge,
        devices: &args.devices,
        output: &args.output,
        options: json!({"dialect": args.ask.dialect(), "rounds": rounds, "skipped": skipped}),
    };
    measurement.run(in_closed_loop(&workloads, rounds), |report| checks::of_requests(report, workloads.len()))
}

pub fn open_loop(args: &OpenArgs, kind: &'static str, factor: f64) -> Outcome {
    refuse_idle_flags(args, kind)?;
    let trace = args.trace.as_deref().map(read_trace).transpose()?;
    let longest = trace.as_ref().and_then(|t| t.iter().map(|e| e.output_length).max());
    let mix = mix_up_to(&args.mix, longest.unwrap_or_else(|| args.mix.output()))?;
    let tokens = trace.iter().flatten().map(|e| u64::from(e.prompt_length)).sum::<u64>().max(1);
    limits::RUN_TOKENS.check(tokens).map_err(|e| format!("the trace's prompt tokens in all: {e}"))?;
    refuse_idle_devices(&args.devices, &args.target)?;
    let oracle = oracle_of(&args.judge)?;
    let renderer = connect(&args.target, &mix.dialects)?;
    oracle.as_ref().map_or(Ok(()), |o| o.fits(&renderer))?;
    let client = &args.target.client;
    let setup = setup(&renderer, client, &args.judge, oracle.as_ref());
    let Traffic { plan, arrivals, calibration } = match trace {
        Some(trace) => Traffic { plan: mix.plan_trace(&renderer, &trace), ..Traffic::default() },
        None => traffic(args, &setup, &mix, factor)?,
    };
    oracle.as_ref().map_or(Ok(()), |o| o.covers(plan.iter().map(|p| &p.wire)))?;
    let options = options_of(args, &mix, arrivals.as_ref(), calibration.as_ref());
    let (judge, devices, output) = (&args.judge, &args.devices, &args.output);
    let measurement = Measurement { kind, setup, client, judge, devices, output, options };
    let ask = |setup: &Setup<'_>, progress: &ProgressBar| {
        let mut run = open::run(setup, kind, plan, progress);
        if let Some(calibration) = calibration {
            run.measured.checks.push(calibration.check());
            run.measured.warmups += calibration.counts;
        }
        run
    };
    measurement.run(ask, |report| {
        let counts = report.workloads.first().map(|w| w.summary.counts.clone()).unwrap_or_default();
        checks::of_open_loop(report, &counts, args.expect_queue);
    })
}

/// A flag that would do nothing is a misunderstanding.
fn refuse_idle_flags(args: &OpenArgs, kind: &str) -> Result<(), Failure> {
    if args.burst.is_some() && args.arrivals != Law::Burst {
        return Err("--burst belongs to --arrivals burst".into());
    }
    if args.expect_queue.is_some() && kind != "overload" {
        return Err("--expect-queue belongs to `load overload`: a steady rate need not fill the queue".into());
    }
    if args.mix.cancel_every == Some(0) && !args.mix.cancel_at.is_empty() {
        return Err("--cancel-at belongs to cancelled requests, and --cancel-every 0 has none; leave it out".into());
    }
    Ok(())
}

/// What is sent in open loop, and what that follows from.
#[derive(Default)]
struct Traffic {
    plan: Vec<Planned>,
    arrivals: Option<Arrivals>,
    calibration: Option<Calibration>,
}

/// The options as they were understood: what does not apply is null.
fn options_of(args: &OpenArgs, mix: &Mix, arrivals: Option<&Arrivals>, calibration: Option<&Calibration>) -> Value {
    // Without arrivals its measurement was ended early, and says nothing.
    let capacity = arrivals.and(calibration).map(|c| c.per_s);
    let (mut mix, mut arrivals) = (json!(mix), json!(arrivals));
    if args.trace.is_some() {
        for own in ["prompts", "output", "variants"] {
            mix[own] = Value::Null;
        }
    }
    if arrivals.is_object() && args.arrivals != Law::Burst {
        arrivals["burst"] = Value::Null;
    }
    json!({
        "mix": mix, "arrivals": arrivals, "capacity_requests_per_s": capacity,
        "duration_s": args.trace.is_none().then_some(args.duration_s), "trace": args.trace,
    })
}

/// The requests at the rate that was given or follows from the capacity; none when the measurement was ended before.
fn traffic(args: &OpenArgs, setup: &Setup<'_>, mix: &Mix, factor: f64) -> Result<Traffic, Failure> {
    let calibration = if args.rate.is_none() { Some(calibrated(args, setup, mix)?) } else { None };
    if interrupt::raised() {
        return Ok(Traffic { calibration, ..Traffic::default() });
    }
    let found = calibration.as_ref().map(|c| c.per_s * args.factor.unwrap_or(factor));
    let Some(rate) = args.rate.or(found) else { return Ok(Traffic::default()) };
    if let Some(calibration) = &calibration {
        note(format_args!("capacity {:.2} requests/s, rate {rate:.2} requests/s", calibration.per_s));
    }
    let arrivals = Arrivals { law: args.arrivals, rate, burst: args.burst.unwrap_or(BURST_DEFAULT) };
    arrivals.check(args.duration_s)?;
    let due = arrivals.schedule(args.duration_s, setup.renderer.seeding().seed);
    mix.check(due.len())?;
    Ok(Traffic { plan: mix.plan(setup.renderer, &due), arrivals: Some(arrivals), calibration })
}

fn calibrated(args: &OpenArgs, setup: &Setup<'_>, mix: &Mix) -> Result<Calibration, Failure> {
    let seconds = args.calibrate_s;
    note(format_args!("measuring the capacity for {seconds} s"));
    let unverified = Setup { oracle: None, ..setup.clone() };
    let found = capacity(&unverified, args.calibrate_concurrency, seconds, |n| mix.wire(setup.renderer, n));
    if found.per_s > 0.0 || interrupt::raised() {
        return Ok(found);
    }
    let counts = &found.counts;
    let failure = found.failure.as_ref().map_or(String::new(), |why| format!(", first: {why}"));
    Err(format!(
        "no request completed while the capacity was measured ({} refused, {} failed{failure}); give --rate or a longer --calibrate-s",
        counts.refused, counts.failed
    )
    .into())
}

pub fn pressure(args: &PressureArgs) -> Outcome {
    let tokens = u64::from(args.burst) * u64::from(args.prompt_tokens);
    limits::BURST_TOKENS.check(tokens).map_err(|e| format!("the burst's prompt tokens in all: {e}"))?;
    let (ask, (pages, queue)) = (&args.ask, (args.expect_pages, args.expect_queue));
    let oracle = oracle_of(&args.judge)?;
    let mut started = match &args.config {
        Some(config) => {
            let overridden = |(key, flag): &(&str, &str)| {
                let set = |s: &String| s.split_once('=').is_some_and(|(set, _)| set.trim() == *key);
                args.settings.iter().any(set).then(|| format!("--set {key} is what {flag} sets; give that instead"))
            };
            let mut keys = [("kv.pages", "--expect-pages"), ("limits.max_queue", "--expect-queue")].iter();
            keys.find_map(overridden).map_or(Ok(()), Err)?;
            let own = [format!("kv.pages={pages}"), format!("limits.max_queue={queue}")];
            let settings = [args.settings.as_slice(), &own].concat();
            let (key, timeout) = (ask.target.api_key.as_ref(), ask.target.client.timeout());
            Some(start("pressure", &args.servers, config, &settings, key, timeout)?)
        }
        None => match args.servers.given() {
            Some(flag) => return Err(format!("{flag} belongs to a server that is started; give --config too").into()),
            None => {
                refuse_idle_devices(&args.devices, &ask.target)?;
                None
            }
        },
    };
    let (client, dialects) = (&ask.target.client, [ask.dialect()]);
    let renderer = match &started {
        Some(own) => Renderer::connect(own.target.clone(), ask.target.model.clone(), &dialects, client.seeding())?,
        None => connect(&ask.target, &dialects)?,
    };
    if started.is_some() {
        note_given_up(&renderer);
    }
    has_pages(renderer.target(), pages)?;
    oracle.as_ref().map_or(Ok(()), |o| o.fits(&renderer))?;
    let shots = vec![Shot::new(args.prompt_tokens, args.output_tokens); args.burst as usize];
    let workloads = [Workload { name: "pressure".into(), established: None, shots }];
    let rounds = Rounds { warmups: 0, trials: 1, prompts: PromptReuse::Fresh };
    oracle.as_ref().map_or(Ok(()), |o| o.covers(wires_of(&renderer, &workloads, rounds)))?;
    let server = started.as_ref().map(|own: &Started| &own.variant);
    let options = json!({
        "expect_pages": pages, "expect_queue": queue, "burst": args.burst, "dialect": ask.dialect(), "rounds": rounds,
        "server": server,
    });
    let measurement = Measurement {
        kind: "pressure",
        setup: setup(&renderer, client, &args.judge, oracle.as_ref()),
        client,
        judge: &args.judge,
        devices: &args.devices,
        output: &args.output,
        options,
    };
    let measured =
        || measurement.run(in_closed_loop(&workloads, rounds), |report| checks::of_pressure(report, pages, queue));
    let gone = |name: &str, status| interrupt::raise(&format!("{name} ended while it was measured ({status})"));
    match &mut started {
        Some(own) => own.running.during(measured, gone),
        None => measured(),
    }
}

/// A burst puts pressure only on the pool that it was made for.
fn has_pages(target: &Target, expected: u64) -> Result<(), Failure> {
    let stats = target.json("/stats").unwrap_or_default();
    let told = target.json("/health").as_ref().and_then(|h| counter(h, "kv_pages"));
    let counted = || Some(counter(&stats, "kv_pages_used")? + counter(&stats, "kv_pages_free")?);
    let has = told.or_else(counted);
    if has == Some(expected) {
        return Ok(());
    }
    let has = has.map_or("an unknown number of".into(), |pages| pages.to_string());
    Err(format!(
        "the server has {has} pages and the burst is made for {expected}; give --config to have one started with kv.pages and \
         limits.max_queue as they must be, or name its own with --expect-pages and --expect-queue"
    )
    .into())
}
