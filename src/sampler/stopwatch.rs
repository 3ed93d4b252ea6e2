//! The times of one request, on the engine's monotonic clock.

use std::time::Duration;

use crate::admission::Timing;

/// Notes when each token came.
#[derive(Debug)]
pub(super) struct Stopwatch {
    submitted: Duration,
    resident: Duration,
    tokens_at: Vec<Duration>,
}

impl Stopwatch {
    pub fn new(submitted: Duration, resident: Duration) -> Self {
        Self { submitted, resident, tokens_at: Vec::new() }
    }

    pub fn token(&mut self, at: Duration) {
        self.tokens_at.push(at);
    }

    /// The timing of the first `generated` tokens; later ones were an overrun.
    pub fn read(&self, generated: u32) -> Timing {
        let counted = &self.tokens_at[..self.tokens_at.len().min(generated as usize)];
        let since_submit = |at: &Duration| at.saturating_sub(self.submitted);
        let gap = |pair: &[Duration]| (pair[1].saturating_sub(pair[0]).as_secs_f64() * 1e6) as f32;
        Timing {
            queue: since_submit(&self.resident),
            ttft: counted.first().map(since_submit),
            e2e: counted.last().map(since_submit).unwrap_or_default(),
            gaps_us: counted.windows(2).map(gap).collect(),
        }
    }
}
