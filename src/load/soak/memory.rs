//! The server's resident memory over a soak, and whether it is flat.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::load::process::resident_bytes;
use crate::load::report::Check;
use crate::load::stats::quantile;

/// Between two looks at the server's memory.
const MEMORY_PERIOD: Duration = Duration::from_millis(500);
/// Memory counts as flat when it grows by no more than this share over the mix ...
const GROWTH_SHARE_MAX: f64 = 0.02;
/// ... or by no more than this, bytes: what an allocator keeps moves by a few arenas.
const GROWTH_BYTES_MAX: f64 = 16e6;

/// Resident memory of the server at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MemorySample {
    /// Seconds since its start.
    pub t_s: f64,
    /// Bytes.
    pub resident_bytes: u64,
}

/// A thread that reads a process's resident memory until it is stopped.
#[derive(Debug)]
pub struct MemoryWatch {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Vec<MemorySample>>>,
    thread: Option<std::thread::JoinHandle<()>>,
    start: Instant,
}

impl MemoryWatch {
    /// Begins to watch a process of this machine; `gone` is called once if it ends while it is watched.
    pub fn begin(process: u32, start: Instant, gone: impl FnOnce() + Send + 'static) -> Self {
        let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (stopped, sink) = (Arc::clone(&stop), Arc::clone(&seen));
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Acquire) {
                let Some(resident_bytes) = resident_bytes(process) else { return gone() };
                let sample = MemorySample { t_s: start.elapsed().as_secs_f64(), resident_bytes };
                sink.lock().unwrap_or_else(PoisonError::into_inner).push(sample);
                std::thread::park_timeout(MEMORY_PERIOD);
            }
        });
        Self { stop, seen, thread: Some(thread), start }
    }

    /// Seconds since the beginning.
    pub(super) fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// What was seen so far.
    pub(super) fn samples(&self) -> Vec<MemorySample> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for MemoryWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// Compares the second quarter of the mix with its last: what is filled once is filled by then.
pub(super) fn memory_is_flat(memory: &[MemorySample], from_s: f64) -> Check {
    let mixed: Vec<f64> = memory.iter().filter(|m| m.t_s >= from_s).map(|m| m.resident_bytes as f64).collect();
    let median = |part: &[f64]| {
        let mut part = part.to_vec();
        part.sort_by(f64::total_cmp);
        quantile(&part, 0.5)
    };
    let quarter = mixed.len() / 4;
    let name = "resident memory is flat over the mix";
    let (Some(early), Some(late)) = (median(&mixed[quarter..2 * quarter]), median(&mixed[mixed.len() - quarter..]))
    else {
        return Check::failed(name, format!("{} samples are too few", mixed.len()));
    };
    let grown = late - early;
    let detail = format!("{:.1} MB in the second quarter, {:.1} MB in the last", early / 1e6, late / 1e6);
    Check::when(grown <= (early * GROWTH_SHARE_MAX).max(GROWTH_BYTES_MAX), name, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_grows_over_the_mix_is_not_flat_and_what_was_filled_before_it_is() {
        let samples = |of: fn(usize) -> u64| -> Vec<MemorySample> {
            (0..100).map(|i| MemorySample { t_s: i as f64, resident_bytes: of(i) }).collect()
        };
        assert!(memory_is_flat(&samples(|i| if i < 30 { 100_000_000 } else { 400_000_000 }), 20.0).passed);
        assert!(!memory_is_flat(&samples(|i| 100_000_000 + 1_000_000 * i as u64), 20.0).passed);
        assert!(!memory_is_flat(&[], 0.0).passed, "nothing was seen");
    }

    #[test]
    fn a_process_that_ends_while_it_is_watched_is_told_of() {
        let (tell, told) = std::sync::mpsc::channel();
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("a process");
        let watch = MemoryWatch::begin(child.id(), Instant::now(), move || tell.send(()).unwrap_or_default());
        while watch.samples().is_empty() {
            std::thread::yield_now();
        }
        assert!(told.try_recv().is_err(), "it lives");
        drop(child.stdin.take());
        told.recv().expect("told, although nobody has waited for the process");
        child.wait().expect("its end");
    }
}
