//! The engine's monotonic clock. The shells read it and pass times into the cores as values.

use std::time::{Duration, Instant};

/// Counts from the engine's start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock(Instant);

impl Clock {
    /// A clock that shows zero now.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Time since the start.
    pub fn now(self) -> Duration {
        self.0.elapsed()
    }
}
