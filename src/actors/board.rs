//! Where Admission publishes: one snapshot, and the samples of the requests that it counts as finished, under one lock, so that
//! counters and histograms agree at any scrape (I10).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::topology::Published;
use crate::admission::{Account, FinishedSample, Snapshot};

#[derive(Debug, Default)]
struct State {
    snapshot: Arc<Snapshot>,
    samples: Vec<FinishedSample>,
}

/// Written by one actor, read by any thread.
#[derive(Debug, Default)]
pub(super) struct Board(Mutex<State>);

impl Board {
    /// Replaces the snapshot and adds the samples that it counts. None is ever dropped: a server takes them whenever so many
    /// sequences have arrived (`telemetry::metrics`), which bounds them by those and the ones that were inside.
    pub fn publish(&self, account: &Account, samples: Vec<FinishedSample>) {
        let mut state = self.state();
        let version = state.snapshot.version + 1;
        state.snapshot = Arc::new(Snapshot { account: account.clone(), version });
        state.samples.extend(samples);
    }

    /// The latest snapshot.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.state().snapshot)
    }

    /// The latest snapshot with every sample since the last call.
    pub fn take(&self) -> Published {
        let mut state = self.state();
        let samples = std::mem::take(&mut state.samples);
        Published { snapshot: Arc::clone(&state.snapshot), samples }
    }

    /// A poisoned lock still holds a whole snapshot: it is replaced in one assignment.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::Dialect;

    #[test]
    fn every_sample_waits_for_the_reader_however_late_it_comes() {
        // Seen: over 65,536 the older half was dropped, and the histograms missed finished requests (I10).
        let (board, samples) = (Board::default(), 70_000);
        for _ in 0..samples / 1_000 {
            let sample = FinishedSample {
                dialect: Dialect::OpenaiCompletions,
                prompt_tokens: 1,
                generated_tokens: 1,
                queue_us: 1.0,
                ttft_us: 1.0,
                e2e_us: 1.0,
                gaps_us: Vec::new(),
            };
            board.publish(&Account::default(), vec![sample; 1_000]);
        }
        assert_eq!(board.take().samples.len(), samples);
        assert!(board.take().samples.is_empty());
    }
}
