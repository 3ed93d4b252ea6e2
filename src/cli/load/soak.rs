//! `crucible load soak`: starts a server, records the solo answers of every request of the mix (or reads them), and runs the phases.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;

use super::commands::SoakArgs;
use super::ready::note_given_up;
use super::{Failure, Outcome, Started, bar, client_facts, exit, mix, publish, setup_alone, start};
use crate::config::Config;
use crate::load::drive::{Setup, record_oracle};
use crate::load::interrupt;
use crate::load::open::Mix;
use crate::load::oracle::{Oracle, OracleError};
use crate::load::render::Renderer;
use crate::load::report::soak::page;
use crate::load::soak::{MemoryWatch, SoakPlan, SoakRun, WINDOWS_MAX};
use crate::load::watch::{Watch, say};

/// Runs the command.
///
/// # Errors
/// Arguments, the configuration, a server that does not start, files that cannot be written.
pub fn run(args: &SoakArgs) -> Outcome {
    let mix = mix(&args.mix)?;
    if mix.cancel_every == 0 && args.cancelled == 0 && !args.mix.cancel_at.is_empty() {
        return Err("--cancel-at belongs to cancelled requests, and none is cancelled; leave it out".into());
    }
    let config = Config::load(Some(&args.served.config), &args.served.settings)?;
    let plan = plan(args, config.limits.max_queue as u64)?;
    let recorded = args.verify.as_deref().map(Oracle::read).transpose()?;
    let client = client_facts(args.client.threads(), args.capacity)?;
    let Started { variant, target, mut running } = start(
        "soak",
        &args.servers,
        &args.served.config,
        &args.served.settings,
        args.served.api_key.as_ref(),
        args.client.timeout(),
    )?;
    let begin = Instant::now();
    let memory = MemoryWatch::begin(running.id(), begin, || interrupt::raise("the server ended"));
    let renderer = Renderer::connect(target, None, &mix.dialects, args.client.seeding())?;
    note_given_up(&renderer);
    let progress = bar();
    let oracle = match recorded {
        Some(oracle) => {
            oracle.fits(&renderer)?;
            oracle.covers(mix.wires(&renderer))?;
            oracle
        }
        None => solo_answers(&renderer, &mix, args.client.timeout(), &progress)?,
    };
    if let Some(path) = args.oracle_out.as_ref().filter(|_| !interrupt::raised()) {
        oracle.write(path)?;
    }
    let (threads, timeout) = (args.client.threads(), args.client.timeout());
    let setup = Setup { renderer: &renderer, threads, timeout, objectives: &[], oracle: Some(&oracle) };
    let watch = Watch::since(begin, renderer.target().clone(), &args.devices.options())?;
    let mut soak = SoakRun { setup, mix: &mix, plan, memory: &memory }.run(client, &variant, watch, &progress);
    progress.finish_and_clear();
    drop(memory);
    soak.close(running.stop());
    publish(&soak.table(), &soak, || page(&soak), &args.output)?;
    Ok(exit(soak.passed))
}

/// The answers of every request of the mix alone; none of them when the measurement ends meanwhile, so that no phase follows.
fn solo_answers(
    renderer: &Renderer,
    mix: &Mix,
    timeout: Duration,
    progress: &ProgressBar,
) -> Result<Oracle, OracleError> {
    say(progress, "recording the solo answers");
    progress.set_message("recording the solo answers");
    let recorded = record_oracle(&setup_alone(renderer, timeout), mix.wires(renderer), progress);
    recorded.or_else(|e| {
        // The hang-up at the end looks like a failure of the request.
        if interrupt::raised() { Ok(Oracle::new(renderer.model(), renderer.seeding().seed)) } else { Err(e) }
    })
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
    if plan.mixed_s / plan.window_s > WINDOWS_MAX {
        return Err(format!("--mixed-s comes in more than {WINDOWS_MAX} windows; give a longer --window-s").into());
    }
    Ok(plan)
}
