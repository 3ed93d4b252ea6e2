//! What is settled before anything is measured: the target and how it is asked, which workloads it can be asked for, and whether an oracle
//! can judge the run. What is left out or given up is said on the terminal, and why.

use serde::Serialize;

use super::Failure;
use super::args::{DeviceArgs, JudgeArgs, TargetArgs};
use crate::load::devices::is_here;
use crate::load::dialect::Dialect;
use crate::load::drive::{SHARED_BATCH, SHARED_BATCH_COUNTER};
use crate::load::oracle::Oracle;
use crate::load::render::Renderer;
use crate::load::target::{Target, TargetError, given_up};
use crate::load::watch::counter;
use crate::load::workload::Workload;
use crate::output::note;

/// A workload of a pattern that the target cannot be asked for.
#[derive(Debug, Serialize)]
pub struct Skipped {
    /// Its name.
    pub workload: String,
    /// Why.
    pub why: String,
}

/// The devices of another machine are not looked at, so that flags of them would do nothing.
///
/// # Errors
/// One was given, and the target's address is not this machine's, or none.
pub fn refuse_idle_devices(devices: &DeviceArgs, args: &TargetArgs) -> Result<(), Failure> {
    let Some(flag) = devices.given() else { return Ok(()) };
    if is_here(Target::new(args.url(), None)?.address.ip()) {
        return Ok(());
    }
    Err(format!("{flag} belongs to a server of this machine, and {} is another one's; leave it out", args.url()).into())
}

/// Connects to a target that must speak every one of `dialects`; the first is the one of requests that name none.
///
/// # Errors
/// The target does not answer or does not speak one of them.
pub fn connect(args: &TargetArgs, dialects: &[Dialect]) -> Result<Renderer, Failure> {
    let target = Target::new(args.url(), args.api_key.clone())?.within(args.client.timeout());
    let renderer = Renderer::connect(target, args.model.clone(), dialects, args.client.seeding())?;
    note_given_up(&renderer);
    Ok(renderer)
}

/// Says what the target does not take of the dialects that were probed.
pub fn note_given_up(renderer: &Renderer) {
    renderer.takes().keys().for_each(|&dialect| say_given_up(renderer, dialect));
}

fn say_given_up(renderer: &Renderer, dialect: Dialect) {
    for lost in renderer.takes().get(&dialect).map(|&takes| given_up(dialect, takes)).unwrap_or_default() {
        note(format_args!("note: {}: {lost}", dialect.name()));
    }
}

/// The workloads of `list` that the target can be asked for, and the others of its patterns. Probes the dialects that single requests name.
///
/// # Errors
/// A workload that the list names itself cannot be run, none is left, or the target no longer answers.
pub fn runnable(
    renderer: &mut Renderer,
    workloads: Vec<Workload>,
    list: &str,
) -> Result<(Vec<Workload>, Vec<Skipped>), Failure> {
    let (mut kept, mut skipped) = (Vec::new(), Vec::new());
    for workload in workloads {
        let Some(why) = obstacle(renderer, &workload)? else {
            kept.push(workload);
            continue;
        };
        if is_named(&workload, list) {
            return Err(format!("{} cannot be run: {why}; leave it out of --workload", workload.name).into());
        }
        note(format_args!("skipped {}: {why}", workload.name));
        skipped.push(Skipped { workload: workload.name, why });
    }
    if kept.is_empty() {
        return Err(format!("no workload of {list} can be run on this target").into());
    }
    Ok((kept, skipped))
}

/// Whether `runnable` may leave a workload of `list` out, whatever the target turns out to be.
pub fn may_be_skipped(workload: &Workload, list: &str) -> bool {
    let special = workload.name == SHARED_BATCH.0 || workload.shots.iter().any(|shot| shot.dialect.is_some());
    special && !is_named(workload, list)
}

fn is_named(workload: &Workload, list: &str) -> bool {
    list.split(',').any(|item| item.trim() == workload.name)
}

/// Why the target cannot be asked for a workload, or could not keep its promise.
fn obstacle(renderer: &mut Renderer, workload: &Workload) -> Result<Option<String>, TargetError> {
    for dialect in workload.shots.iter().filter_map(|shot| shot.dialect) {
        if renderer.takes().contains_key(&dialect) {
            continue;
        }
        match renderer.add(dialect) {
            Ok(()) => say_given_up(renderer, dialect),
            Err(refusal @ TargetError::Unusable { .. }) => return Ok(Some(refusal.to_string())),
            Err(other) => return Err(other),
        }
    }
    let judged = || renderer.target().json("/stats").is_some_and(|s| counter(&s, SHARED_BATCH_COUNTER).is_some());
    if workload.name == SHARED_BATCH.0 && !judged() {
        return Ok(Some(format!("the target's /stats does not tell {SHARED_BATCH_COUNTER}, by which it is judged")));
    }
    Ok(None)
}

/// The oracle of `--verify`.
///
/// # Errors
/// It cannot be read.
pub fn oracle_of(judge: &JudgeArgs) -> Result<Option<Oracle>, Failure> {
    Ok(judge.verify.as_deref().map(Oracle::read).transpose()?)
}
