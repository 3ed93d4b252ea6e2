//! When open-loop requests are due: constant, Poisson, bursts, or a recorded trace. Pure; times are seconds from the start.
//!
//! An open loop sends at these times whatever the server does, and every latency counts from the due time, so that a stalled server
//! cannot hide its stall by slowing the client down (coordinated omission).

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::rng::SplitMix64;
use super::{file, limits};

/// The law of the arrivals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Law {
    /// One every 1/rate seconds.
    Constant,
    /// Independent exponential gaps of mean 1/rate.
    Poisson,
    /// `burst` at once, every burst/rate seconds.
    Burst,
}

/// Arrivals at a mean rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Arrivals {
    /// The law.
    pub law: Law,
    /// Mean requests a second; above 0.
    pub rate: f64,
    /// Requests of one burst (`Law::Burst`); at least 1.
    pub burst: u32,
}

impl Arrivals {
    /// Whether the mean number of requests in `duration_s` is one that a run can have.
    ///
    /// # Errors
    /// They are too many, and what to do.
    pub fn check(&self, duration_s: f64) -> Result<(), String> {
        let (mean, most) = (self.rate * duration_s, limits::RUN_REQUESTS.max);
        if mean <= most as f64 {
            return Ok(());
        }
        Err(format!(
            "{:.0} requests/s for {duration_s} s are more than {most} requests; lower the rate or the duration",
            self.rate
        ))
    }

    /// Due times in [0, `duration_s`), ascending; the same for the same seed.
    pub fn schedule(&self, duration_s: f64, seed: u64) -> Vec<f64> {
        let mut rng = SplitMix64::keyed(seed, "arrivals", &[]);
        let mut due = Vec::new();
        let (mut at, mut index) = (0.0, 0u64);
        loop {
            at = match self.law {
                Law::Constant => index as f64 / self.rate,
                Law::Burst => (index / u64::from(self.burst.max(1))) as f64 * f64::from(self.burst) / self.rate,
                Law::Poisson => at + rng.exponential() / self.rate,
            };
            if at >= duration_s {
                return due;
            }
            due.push(at);
            index += 1;
        }
    }
}

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceEntry {
    /// Seconds from any origin; the least of the file becomes 0.
    pub timestamp: f64,
    /// Prompt tokens.
    pub prompt_length: u32,
    /// Generated tokens.
    pub output_length: u32,
}

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read the trace {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A line is not as documented.
    #[error("{path}, line {line}: {message}")]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// Nothing in it.
    #[error("the trace {0} has no requests")]
    Empty(PathBuf),
    /// It lasts longer than any run.
    #[error("the trace {path} lasts {seconds} s, a run at most {most} s; timestamps are seconds")]
    TooLong {
        /// The file.
        path: PathBuf,
        /// From its first request to its last.
        seconds: f64,
        /// A run's bound.
        most: f64,
    },
}

/// Reads a trace: one JSON object a line with `timestamp`, `prompt_length` and `output_length`; sorted by time and moved to start at 0.
///
/// # Errors
/// The file cannot be read, a line is wrong, or there is none.
pub fn read_trace(path: &Path) -> Result<Vec<TraceEntry>, TraceError> {
    let text = file::read(path).map_err(|source| TraceError::Read { path: path.to_owned(), source })?;
    let mut entries = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let wrong = |message: String| TraceError::Line { path: path.to_owned(), line: index + 1, message };
        let entry: TraceEntry = serde_json::from_str(line).map_err(|e| wrong(e.to_string()))?;
        limits::PROMPT_TOKENS.check(entry.prompt_length.into()).map_err(|e| wrong(format!("prompt_length {e}")))?;
        limits::OUTPUT_TOKENS.check(entry.output_length.into()).map_err(|e| wrong(format!("output_length {e}")))?;
        if !entry.timestamp.is_finite() {
            return Err(wrong("the timestamp must be finite".into()));
        }
        entries.push(entry);
        limits::RUN_REQUESTS.check(entries.len() as u64).map_err(|e| wrong(format!("the number of requests {e}")))?;
    }
    entries.sort_by(|a, b| a.timestamp.total_cmp(&b.timestamp));
    let origin = entries.first().ok_or_else(|| TraceError::Empty(path.to_owned()))?.timestamp;
    for entry in &mut entries {
        entry.timestamp -= origin;
    }
    let last = entries.last().map_or(0.0, |e| e.timestamp);
    if last > limits::DURATION_S.max {
        return Err(TraceError::TooLong { path: path.to_owned(), seconds: last, most: limits::DURATION_S.max });
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrivals(law: Law) -> Arrivals {
        Arrivals { law, rate: 50.0, burst: 5 }
    }

    #[test]
    fn constant_arrivals_are_evenly_spaced_and_do_not_drift() {
        let due = arrivals(Law::Constant).schedule(100.0, 1);
        assert_eq!(due.len(), 5_000);
        assert!(due.iter().enumerate().all(|(i, &t)| t == i as f64 / 50.0));
    }

    #[test]
    fn more_arrivals_than_a_run_can_have_are_refused() {
        assert!(arrivals(Law::Constant).check(20_000.0).is_ok() && arrivals(Law::Constant).check(20_001.0).is_err());
    }

    #[test]
    fn bursts_come_together_at_the_same_mean_rate() {
        let due = arrivals(Law::Burst).schedule(10.0, 1);
        assert_eq!(due.len(), 500);
        assert!(due.chunks(5).all(|b| b.iter().all(|&t| t == b[0])));
        assert_eq!(due[5] - due[0], 0.1);
    }

    #[test]
    fn poisson_arrivals_repeat_with_the_seed_and_have_exponential_gaps() {
        let poisson = arrivals(Law::Poisson);
        let due = poisson.schedule(1_000.0, 7);
        assert_eq!(due, poisson.schedule(1_000.0, 7));
        assert_ne!(due, poisson.schedule(1_000.0, 8));
        assert!(due.windows(2).all(|w| w[0] <= w[1]) && due.last().is_some_and(|&t| t < 1_000.0));
        let mut gaps: Vec<f64> = due.windows(2).map(|w| w[1] - w[0]).collect();
        let n = gaps.len() as f64;
        let mean = gaps.iter().sum::<f64>() / n;
        assert!((mean * 50.0 - 1.0).abs() < 0.02, "mean gap {mean}");
        // Kolmogorov–Smirnov distance to the exponential law; 1.63/sqrt(n) is its 1 % point.
        gaps.sort_by(f64::total_cmp);
        let distance = gaps.iter().enumerate().fold(0.0f64, |worst, (i, &g)| {
            let law = 1.0 - libm::exp(-50.0 * g);
            worst.max((law - i as f64 / n).abs()).max((law - (i + 1) as f64 / n).abs())
        });
        assert!(distance < 1.63 / n.sqrt(), "distance {distance}");
    }

    #[test]
    fn a_trace_is_sorted_moved_to_zero_and_checked_line_by_line() {
        let path = std::env::temp_dir().join(format!("crucible-trace-{}.jsonl", std::process::id()));
        let good = "{\"timestamp\": 12.5, \"prompt_length\": 3, \"output_length\": 4}\n\n\
            {\"timestamp\": 10, \"prompt_length\": 1, \"output_length\": 2}\n";
        std::fs::write(&path, good).expect("a temporary file");
        let entries = read_trace(&path).expect("a good trace");
        assert_eq!(entries.iter().map(|e| (e.timestamp, e.prompt_length)).collect::<Vec<_>>(), [(0.0, 1), (2.5, 3)]);
        std::fs::write(&path, "{\"timestamp\": 1, \"prompt_length\": 0, \"output_length\": 1}").expect("written");
        assert!(matches!(read_trace(&path), Err(TraceError::Line { line: 1, .. })));
        let far = "{\"timestamp\": -1e300, \"prompt_length\": 1, \"output_length\": 1}\n\
            {\"timestamp\": 1e300, \"prompt_length\": 1, \"output_length\": 1}";
        std::fs::write(&path, far).expect("written");
        assert!(matches!(read_trace(&path), Err(TraceError::TooLong { .. })));
        std::fs::write(&path, "{\"timestamp\": 1, \"prompt_length\": 1, \"output_length\": 4294967295}")
            .expect("written");
        assert!(matches!(read_trace(&path), Err(TraceError::Line { line: 1, .. })));
        std::fs::write(&path, "\n").expect("written");
        assert!(matches!(read_trace(&path), Err(TraceError::Empty(_))));
        std::fs::remove_file(&path).expect("removed");
    }
}
