//! What the live panel measures: the pace of one stream as this client sees it, and the server's rate between two looks at its
//! counters. Pure: every time is handed in.

use std::collections::VecDeque;
use std::time::Duration;

/// Samples of the server's rate that are kept for the sparkline.
const RATES_KEPT: usize = 64;

/// The pace of one stream, on the client's clock.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StreamMeter {
    asked_at: Duration,
    first_at: Option<Duration>,
    last_at: Duration,
    tokens: usize,
    gaps: Vec<Duration>,
}

impl StreamMeter {
    /// A stream asked for at this time.
    pub fn new(asked_at: Duration) -> Self {
        Self { asked_at, ..Self::default() }
    }

    /// A token event arrived.
    pub fn token(&mut self, at: Duration) {
        match self.first_at {
            None => self.first_at = Some(at),
            Some(_) => self.gaps.push(at.saturating_sub(self.last_at)),
        }
        self.last_at = at;
        self.tokens += 1;
    }

    /// Token events so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Time to the first token.
    pub fn ttft(&self) -> Option<Duration> {
        Some(self.first_at?.saturating_sub(self.asked_at))
    }

    /// Tokens a second after the first one.
    pub fn rate(&self) -> Option<f64> {
        let seconds = self.last_at.saturating_sub(self.first_at?).as_secs_f64();
        (self.tokens > 1 && seconds > 0.0).then(|| (self.tokens - 1) as f64 / seconds)
    }

    /// Median and worst time between two tokens.
    pub fn gaps(&self) -> Option<(Duration, Duration)> {
        let mut sorted = self.gaps.clone();
        sorted.sort_unstable();
        Some((*sorted.get(sorted.len() / 2)?, *sorted.last()?))
    }
}

/// The server's output rate: differences of a counter over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RateMeter {
    last: Option<(Duration, f64)>,
    rates: VecDeque<f64>,
}

impl RateMeter {
    /// Takes the counter's value. A smaller one than before is a restarted server: the count begins anew.
    pub fn sample(&mut self, at: Duration, count: f64) {
        if let Some((before, earlier)) = self.last {
            let seconds = at.saturating_sub(before).as_secs_f64();
            if count >= earlier && seconds > 0.0 {
                if self.rates.len() == RATES_KEPT {
                    self.rates.pop_front();
                }
                self.rates.push_back((count - earlier) / seconds);
            }
        }
        self.last = Some((at, count));
    }

    /// The latest rate, a second.
    pub fn rate(&self) -> Option<f64> {
        self.rates.back().copied()
    }

    /// The rates kept, oldest first.
    pub fn rates(&self) -> impl DoubleEndedIterator<Item = f64> + '_ {
        self.rates.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(value: u64) -> Duration {
        Duration::from_millis(value)
    }

    #[test]
    fn a_stream_reports_first_token_rate_and_gaps() {
        let mut meter = StreamMeter::new(ms(100));
        assert_eq!((meter.ttft(), meter.rate(), meter.gaps()), (None, None, None));
        for at in [150, 160, 170, 200] {
            meter.token(ms(at));
        }
        assert_eq!(meter.tokens(), 4);
        assert_eq!(meter.ttft(), Some(ms(50)));
        assert_eq!(meter.rate(), Some(60.0), "3 tokens in 50 ms");
        assert_eq!(meter.gaps(), Some((ms(10), ms(30))));
    }

    #[test]
    fn one_token_has_no_rate() {
        let mut meter = StreamMeter::new(ms(0));
        meter.token(ms(5));
        assert_eq!((meter.rate(), meter.gaps()), (None, None));
    }

    #[test]
    fn the_rate_starts_anew_when_the_server_restarted() {
        let mut meter = RateMeter::default();
        meter.sample(ms(0), 100.0);
        assert_eq!(meter.rate(), None);
        meter.sample(ms(500), 150.0);
        assert_eq!(meter.rate(), Some(100.0));
        meter.sample(ms(1000), 0.0);
        assert_eq!(meter.rate(), Some(100.0), "no negative rate");
        meter.sample(ms(1500), 10.0);
        assert_eq!(meter.rate(), Some(20.0));
    }

    #[test]
    fn old_rates_are_dropped() {
        let mut meter = RateMeter::default();
        for second in 0..200 {
            meter.sample(Duration::from_secs(second), (second * second) as f64);
        }
        assert_eq!(meter.rates().count(), RATES_KEPT);
        assert_eq!(meter.rates().last(), Some(397.0));
    }
}
