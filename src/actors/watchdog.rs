//! The deadline of a step, kept on a thread of its own: the arbiter that runs the steps could not notice that it is itself stuck in a
//! call of the backend. The executor says when a step could begin to run and when none is left; past `executor.step_timeout_ms` the
//! watchdog raises the fatal flag (rule 6), whoever is blocked where.
//!
//! While nothing is in flight the thread is parked; while steps come and go it wakes once a deadline, not once a step.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::fatal::FatalFlag;

/// Longest second look at a step past its deadline: a process that was stopped and goes on finds its step done.
const SECOND_LOOK_MAX: Duration = Duration::from_millis(50);

/// What the executor and the watching thread share.
#[derive(Debug)]
struct Shared {
    epoch: Instant,
    /// 1 + µs from `epoch` to the instant since when the oldest step could have been running; 0 while none is in flight.
    since: AtomicU64,
    parked: AtomicBool,
    closing: AtomicBool,
}

/// The watching thread; dropping it ends and joins it.
pub(super) struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The executor's end: two stores a step.
#[derive(Clone, Debug)]
pub(super) struct StepTimer {
    shared: Arc<Shared>,
    thread: Thread,
}

impl Watchdog {
    /// Watches; a step that runs longer than `limit` raises `fatal`.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(limit: Duration, fatal: FatalFlag) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            epoch: Instant::now(),
            since: AtomicU64::new(0),
            parked: AtomicBool::new(false),
            closing: AtomicBool::new(false),
        });
        let watched = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name("crucible-watchdog".into()).spawn(move || watched.watch(limit, &fatal))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// For the executor.
    pub fn timer(&self) -> Option<StepTimer> {
        let thread = self.thread.as_ref()?.thread().clone();
        Some(StepTimer { shared: Arc::clone(&self.shared), thread })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread does nothing that could panic.
            let _ = thread.join();
        }
    }
}

impl StepTimer {
    /// The oldest step could be running from now on.
    pub fn arm(&self) {
        let now = u64::try_from(self.shared.epoch.elapsed().as_micros()).unwrap_or(u64::MAX - 1);
        self.shared.since.store(now + 1, Ordering::SeqCst);
        if self.shared.parked.load(Ordering::SeqCst) {
            self.thread.unpark();
        }
    }

    /// Nothing is in flight.
    pub fn disarm(&self) {
        self.shared.since.store(0, Ordering::SeqCst);
    }
}

impl Shared {
    /// Time that the oldest step has had, if one is in flight.
    fn spent(&self) -> Option<Duration> {
        let since = self.since.load(Ordering::SeqCst).checked_sub(1)?;
        Some(self.epoch.elapsed().saturating_sub(Duration::from_micros(since)))
    }

    fn watch(&self, limit: Duration, fatal: &FatalFlag) {
        while !self.closing.load(Ordering::SeqCst) {
            match self.spent() {
                None => self.park(),
                Some(spent) if spent < limit => std::thread::park_timeout(limit - spent),
                Some(_) => {
                    let late = self.since.load(Ordering::SeqCst);
                    std::thread::sleep((limit / 10).min(SECOND_LOOK_MAX));
                    if late != 0 && self.since.load(Ordering::SeqCst) == late {
                        let limit = limit.as_millis();
                        return fatal.raise(&format!("a step ran longer than executor.step_timeout_ms = {limit}"));
                    }
                }
            }
        }
    }

    /// Sleeps until `arm` or the end. The mark is set before the last look, so that no `arm` is missed.
    fn park(&self) {
        self.parked.store(true, Ordering::SeqCst);
        if self.since.load(Ordering::SeqCst) == 0 && !self.closing.load(Ordering::SeqCst) {
            std::thread::park();
        }
        self.parked.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(limit: Duration) -> (FatalFlag, Watchdog, StepTimer) {
        let fatal = FatalFlag::new();
        let watchdog = Watchdog::start(limit, fatal.clone()).unwrap();
        let timer = watchdog.timer().unwrap();
        (fatal, watchdog, timer)
    }

    #[test]
    fn a_step_that_never_ends_raises_the_flag_though_nobody_calls_again() {
        let limit = Duration::from_millis(60);
        let (fatal, _watchdog, timer) = watched(limit);
        std::thread::sleep(2 * limit);
        assert_eq!(fatal.reason(), None, "nothing is in flight");
        timer.arm();
        let mut flag = fatal.watch();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let raised = async { flag.wait_for(Option::is_some).await.is_ok() };
        assert!(runtime.block_on(async { tokio::time::timeout(Duration::from_secs(20), raised).await }).unwrap());
        assert!(fatal.reason().unwrap().contains("executor.step_timeout_ms = 60"));
    }

    #[test]
    fn steps_that_end_in_time_raise_nothing_however_many_come() {
        // A busy machine may stretch a sleep by much: each step has a limit of seconds, together they outlast it.
        let limit = Duration::from_secs(2);
        let (fatal, watchdog, timer) = watched(limit);
        for _ in 0..40 {
            timer.arm();
            std::thread::sleep(limit / 32);
        }
        timer.disarm();
        std::thread::sleep(limit + 4 * SECOND_LOOK_MAX);
        drop(watchdog);
        assert_eq!(fatal.reason(), None);
    }
}
