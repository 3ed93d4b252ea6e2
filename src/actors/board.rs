//! Where Admission publishes: one snapshot, and the samples of the requests that it counts as finished, under one lock, so that
//! counters and histograms agree at any scrape (I10).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::topology::Published;
use crate::admission::{Account, FinishedSample, Snapshot};

/// Samples kept for a reader that does not come; past it the older half is dropped and counted.
const SAMPLES_MAX: usize = 1 << 16;

#[derive(Debug, Default)]
struct State {
    snapshot: Arc<Snapshot>,
    samples: Vec<FinishedSample>,
    dropped: u64,
}

/// Written by one actor, read by any thread.
#[derive(Debug, Default)]
pub(super) struct Board(Mutex<State>);

impl Board {
    /// Replaces the snapshot and adds the samples that it counts.
    pub fn publish(&self, account: &Account, samples: Vec<FinishedSample>) {
        let mut state = self.state();
        let version = state.snapshot.version + 1;
        state.snapshot = Arc::new(Snapshot { account: account.clone(), version });
        state.samples.extend(samples);
        if state.samples.len() > SAMPLES_MAX {
            state.samples.drain(..SAMPLES_MAX / 2);
            state.dropped += SAMPLES_MAX as u64 / 2;
        }
    }

    /// The latest snapshot.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.state().snapshot)
    }

    /// The latest snapshot with every sample since the last call.
    pub fn take(&self) -> Published {
        let mut state = self.state();
        let samples = std::mem::take(&mut state.samples);
        let samples_dropped = std::mem::take(&mut state.dropped);
        Published { snapshot: Arc::clone(&state.snapshot), samples, samples_dropped }
    }

    /// A poisoned lock still holds a whole snapshot: it is replaced in one assignment.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
