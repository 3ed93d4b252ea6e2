//! `crucible load soak`: starts a server, records the solo answers of every request of the mix (or reads them), and runs the phases.

use std::process::ExitCode;

use serde_json::json;

use super::args::SoakArgs;
use super::{Failure, Outcome, bar, binary, exit, mix, setup_alone};
use crate::config::Config;
use crate::load::drive::{Setup, record_oracle};
use crate::load::launch::{LaunchError, Running, Variant};
use crate::load::oracle::Oracle;
use crate::load::render::Renderer;
use crate::load::report::{Check, Report, table, write_json};
use crate::load::soak::{MemoryWatch, Soak, SoakPlan, SoakRun};
use crate::load::target::Target;
use crate::load::watch::{DEVICE_PERIOD, Watch};

/// Runs the command.
///
/// # Errors
/// Arguments, the configuration, a server that does not start, files that cannot be written.
pub fn run(args: &SoakArgs) -> Outcome {
    let mix = mix(&args.mix)?;
    let config = Config::load(Some(&args.config), &args.settings)?;
    let plan = plan(args, config.limits.max_queue as u64)?;
    let mut variant = Variant::serve("soak", &binary(&args.pairs, 0)?, &args.config, &args.settings)?;
    variant.hash()?;
    std::fs::create_dir_all(&args.pairs.logs)?;
    let log = args.pairs.logs.join("soak.log");
    let target = Target::new(&variant.url, args.api_key.clone())?;
    let mut running = Running::start(&variant, &log)?;
    let seconds = args.pairs.ready_s;
    if !running.wait_ready(&target, &variant.ready, std::time::Duration::from_secs(seconds)) {
        return Err(LaunchError::NotReady { name: variant.name, seconds, log }.into());
    }
    let memory = MemoryWatch::begin(running.id());
    let renderer = Renderer::connect(target, None, &mix.dialects, args.client.seeding())?;
    let progress = bar();
    let oracle = match &args.verify {
        Some(path) => {
            let oracle = Oracle::read(path)?;
            oracle.fits(&renderer)?;
            oracle.covers(mix.wires(&renderer))?;
            oracle
        }
        None => record_oracle(&setup_alone(&renderer, args.client.timeout()), mix.wires(&renderer), &progress)?,
    };
    if let Some(path) = &args.oracle_out {
        oracle.write(path)?;
    }
    let setup = Setup {
        renderer: &renderer,
        threads: args.client.threads,
        timeout: args.client.timeout(),
        objectives: &[],
        oracle: Some(&oracle),
    };
    let client = Report::begin("soak", &renderer, args.client.threads, json!({})).client;
    let server = serde_json::to_value(&variant)?;
    let watch = Watch::begin(renderer.target().clone(), &args.devices.options(), DEVICE_PERIOD)?;
    let mut soak = SoakRun { setup, mix: &mix, plan, memory: &memory }.run(client, server, &progress);
    soak.observed = watch.end();
    progress.finish_and_clear();
    drop(memory);
    drained(&mut soak, running.stop());
    finish(&soak, args)
}

fn plan(args: &SoakArgs, queue: u64) -> Result<SoakPlan, Failure> {
    let plan = SoakPlan {
        calibrate_s: args.calibrate_s,
        concurrency: args.concurrency.max(1),
        stable_s: args.stable_s,
        overload_s: args.overload_s,
        overload_factor: args.overload_factor,
        cancelled: args.cancelled,
        mixed_s: args.mixed_s,
        mixed_share: args.mixed_share,
        window_s: args.window_s,
        queue,
    };
    let spans = [
        plan.calibrate_s,
        plan.stable_s,
        plan.overload_s,
        plan.overload_factor,
        plan.mixed_s,
        plan.mixed_share,
        plan.window_s,
    ];
    if spans.iter().any(|s| !(s.is_finite() && *s > 0.0)) {
        return Err("times and shares of a soak must be above 0".into());
    }
    if args.mix.cancel_at.is_empty() {
        return Err("--cancel-at must name a cancel point".into());
    }
    Ok(plan)
}

/// The end of the server belongs to the soak.
fn drained(soak: &mut Soak, ended: Option<std::process::ExitStatus>) {
    let code = ended.and_then(|status| status.code());
    soak.checks.push(Check::new(
        "the server drains and exits with 0",
        code == Some(0),
        code.map_or("it did not end by itself".into(), |c| format!("exit code {c}")),
    ));
    soak.passed = soak.checks.iter().all(|c| c.passed);
}

fn finish(soak: &Soak, args: &SoakArgs) -> Result<ExitCode, Failure> {
    if let Some(path) = &args.output.out {
        write_json(path, soak)?;
    }
    if let Some(path) = &args.output.html {
        crate::load::report::write(path, crate::load::report::html::soak(soak).as_bytes())?;
    }
    print!("{}", soak.table());
    let failed = soak.checks.iter().filter(|c| !c.passed).count();
    if failed > 0 {
        print!("{}", table::checks(&[Check::new("the soak", false, format!("{failed} checks failed"))]));
    }
    Ok(exit(soak.passed))
}
