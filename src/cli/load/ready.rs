//! What is settled before anything is measured: the target and how it is asked, which workloads it can be asked for, and whether an oracle
//! can judge the run. What is left out or given up is said on the terminal, and why.

use serde::Serialize;

use super::Failure;
use super::args::{JudgeArgs, TargetArgs};
use crate::load::dialect::Dialect;
use crate::load::drive::{SHARED_BATCH, SHARED_BATCH_COUNTER};
use crate::load::oracle::Oracle;
use crate::load::render::Renderer;
use crate::load::target::{Target, TargetError, given_up};
use crate::load::watch::counter;
use crate::load::workload::Workload;

/// A workload of a pattern that the target cannot be asked for.
#[derive(Debug, Serialize)]
pub struct Skipped {
    /// Its name.
    pub workload: String,
    /// Why.
    pub why: String,
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
        eprintln!("note: {}: {lost}", dialect.name());
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
        if list.split(',').any(|item| item.trim() == workload.name) {
            return Err(format!("{} cannot be run: {why}; leave it out of --workload", workload.name).into());
        }
        eprintln!("skipped {}: {why}", workload.name);
        skipped.push(Skipped { workload: workload.name, why });
    }
    if kept.is_empty() {
        return Err(format!("no workload of {list} can be run on this target").into());
    }
    Ok((kept, skipped))
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

/// The oracle of `--verify`, which must be of the run's model and seed.
///
/// # Errors
/// It cannot be read or is of another model or seed.
pub fn oracle_of(judge: &JudgeArgs, renderer: &Renderer) -> Result<Option<Oracle>, Failure> {
    let Some(path) = &judge.verify else { return Ok(None) };
    let oracle = Oracle::read(path)?;
    oracle.fits(renderer)?;
    Ok(Some(oracle))
}
