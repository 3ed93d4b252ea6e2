//! `crucible bench profile`: where a pass spends its time: events around every stage, the same pass without them, and its graph replayed.
//! Events between kernels cost time themselves: stages, wall and replay are three measurements and never added up.

use std::collections::BTreeMap;

use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::driver::Event;
use crate::backend::cuda::kernels::LaunchError;
use crate::backend::cuda::pass::Stage;
use crate::backend::{Backend, DeviceCounts};

/// A benchmark that cannot go on.
pub type Failure = Box<dyn std::error::Error>;

/// Times of one shape, µs.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Sum over layers, a stage; median of the rounds.
    pub stages: BTreeMap<Stage, f64>,
    /// The pass launched kernel by kernel; median.
    pub wall_us: f64,
    /// Its graph; median.
    pub replay_us: f64,
    /// The backend's counters afterwards.
    pub counts: DeviceCounts,
}

const ROUNDS: usize = 20;

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Runs the last submitted step's pass again and again.
///
/// # Errors
/// No step was submitted, or the device's.
pub fn profile(backend: &CudaBackend) -> Result<Profile, Failure> {
    let (pass, device) = (backend.pass(), backend.device());
    let shape = backend.last_shape().ok_or("no step was submitted before the profile")?;
    let events: Vec<Event> = (0..2 + 9 * pass.geometry.layers).map(|_| Event::new()).collect::<Result<_, _>>()?;
    let mut rounds: BTreeMap<Stage, Vec<f64>> = BTreeMap::new();
    let (mut wall, mut replay) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let mut marks: Vec<Stage> = Vec::new();
        let mut failed = Ok(());
        pass.run(&shape, |stage| {
            if let Some(event) = events.get(marks.len()) {
                failed = std::mem::replace(&mut failed, Ok(())).and_then(|()| event.record(device));
            }
            marks.push(stage);
        })?;
        failed?;
        events[marks.len()].record(device)?;
        device.synchronise()?;
        let mut sums: BTreeMap<Stage, f64> = BTreeMap::new();
        for (i, stage) in marks.iter().enumerate() {
            *sums.entry(*stage).or_default() += events[i + 1].since_us(&events[i])?;
        }
        sums.into_iter().for_each(|(stage, us)| rounds.entry(stage).or_default().push(us));

        events[0].record(device)?;
        pass.run(&shape, |_| {})?;
        events[1].record(device)?;
        device.synchronise()?;
        wall.push(events[1].since_us(&events[0])?);
    }
    let graph = device.capture(|| -> Result<(), LaunchError> { pass.run(&shape, |_| {}) })?;
    for _ in 0..ROUNDS {
        events[0].record(device)?;
        graph.replay()?;
        events[1].record(device)?;
        device.synchronise()?;
        replay.push(events[1].since_us(&events[0])?);
    }
    let stages = rounds.into_iter().map(|(stage, values)| (stage, median(values))).collect();
    Ok(Profile { stages, wall_us: median(wall), replay_us: median(replay), counts: backend.counts() })
}
