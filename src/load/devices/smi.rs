//! GPUs through `nvidia-smi`, running beside the measurement and printing a line a GPU twice a second.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{DevicesError, GpuSample, Sampler};

/// What is asked, in the order of `parse`.
const QUERY: &str = "--query-gpu=index,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu";
/// Between two of its lines; half of the period at which they are read.
const PERIOD_MS: &str = "500";
/// It has this long for its first line.
const FIRST_WAIT: Duration = Duration::from_secs(20);
/// An older line is no reading.
const AGE_MAX: Duration = Duration::from_secs(3);

/// The newest line of each GPU.
#[derive(Default)]
struct Readings {
    gpus: BTreeMap<u32, (Instant, GpuSample)>,
    ended: bool,
}

#[derive(Default)]
struct Shared {
    readings: Mutex<Readings>,
    changed: Condvar,
}

/// The running program; dropping it ends it.
pub(super) struct NvidiaSmi {
    child: Child,
    shared: Arc<Shared>,
}

impl NvidiaSmi {
    /// Starts the program and waits for its first reading, so that its own start is no part of the measurement.
    pub fn start(path: &Path) -> Result<Self, DevicesError> {
        let start = |source| DevicesError::Start { path: path.to_owned(), source };
        let mut child = Command::new(path)
            .args([QUERY, "--format=csv,noheader,nounits", "--loop-ms", PERIOD_MS])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(start)?;
        let shared = Arc::new(Shared::default());
        if let Some(lines) = child.stdout.take() {
            let sink = Arc::clone(&shared);
            // It ends with the program's output and is not joined: a program of the program may hold that open.
            std::thread::spawn(move || read(BufReader::new(lines), &sink));
        }
        let started = Self { child, shared };
        if started.has_reading_within(FIRST_WAIT) { Ok(started) } else { Err(DevicesError::Silent(path.to_owned())) }
    }

    fn has_reading_within(&self, wait: Duration) -> bool {
        let readings = self.shared.readings.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = |r: &mut Readings| r.gpus.is_empty() && !r.ended;
        let waited = self.shared.changed.wait_timeout_while(readings, wait, waiting);
        !waited.unwrap_or_else(PoisonError::into_inner).0.gpus.is_empty()
    }
}

fn read(lines: impl BufRead, shared: &Shared) {
    for line in lines.lines().map_while(Result::ok) {
        if let Some(sample) = parse(&line) {
            let mut readings = shared.readings.lock().unwrap_or_else(PoisonError::into_inner);
            readings.gpus.insert(sample.index, (Instant::now(), sample));
            shared.changed.notify_all();
        }
    }
    shared.readings.lock().unwrap_or_else(PoisonError::into_inner).ended = true;
    shared.changed.notify_all();
}

/// One line: values by comma, in the order of the query; `[N/A]` and the like are absent figures.
fn parse(line: &str) -> Option<GpuSample> {
    let values: Vec<&str> = line.split(',').map(str::trim).collect();
    let [index, sm, memory, power, celsius, utilisation] = values[..] else { return None };
    Some(GpuSample {
        index: index.parse().ok()?,
        sm_mhz: sm.parse().ok(),
        memory_mhz: memory.parse().ok(),
        power_w: power.parse().ok().filter(|w: &f64| w.is_finite() && *w >= 0.0),
        celsius: celsius.parse().ok(),
        utilisation_percent: utilisation.parse().ok(),
    })
}

impl Sampler for NvidiaSmi {
    fn name(&self) -> &'static str {
        "nvidia-smi"
    }

    fn gpus(&mut self) -> Vec<GpuSample> {
        let readings = self.shared.readings.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = readings.gpus.values().filter(|(at, _)| at.elapsed() <= AGE_MAX);
        fresh.map(|(_, sample)| sample.clone()).collect()
    }
}

impl Drop for NvidiaSmi {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_sample_and_what_the_gpu_does_not_tell_is_absent() {
        let sample = parse("1, 1980, 3201, 246.13, 45, 97").expect("a sample");
        let expected = GpuSample {
            index: 1,
            sm_mhz: Some(1_980),
            memory_mhz: Some(3_201),
            power_w: Some(246.13),
            celsius: Some(45),
            utilisation_percent: Some(97),
        };
        assert_eq!(sample, expected);
        let silent = parse("0, [N/A], [Not Supported], [Unknown Error], N/A, ").expect("a sample");
        assert_eq!(silent, GpuSample::default());
    }

    #[test]
    fn what_is_no_line_of_the_query_is_no_sample() {
        for line in ["", "No devices were found", "index, clocks.sm", "x, 1, 2, 3, 4, 5", "0, 1, 2, 3, 4, 5, 6"] {
            assert_eq!(parse(line), None, "{line}");
        }
    }

    #[test]
    fn the_newest_line_of_each_gpu_counts() {
        let shared = Shared::default();
        read(
            &b"0, 1200, 3201, 90.0, 40, 0\nnoise\n1, 1300, 3201, 91.0, 41, 1\n0, 1980, 3201, 246.0, 45, 97\n"[..],
            &shared,
        );
        let readings = shared.readings.into_inner().expect("whole");
        let clocks: Vec<_> = readings.gpus.values().map(|(_, s)| (s.index, s.sm_mhz)).collect();
        assert_eq!(clocks, [(0, Some(1_980)), (1, Some(1_300))]);
        assert!(readings.ended);
    }
}
