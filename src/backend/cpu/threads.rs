//! The compute threads: a barrier for phases, claimed work, and a team that sleeps when nothing is queued.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Spins before a waiting thread sleeps: some 20 µs, about what waking a thread costs. On a busy machine a sleeping thread is
/// scheduled sooner than one that has used up its slice by spinning.
const SPINS: u32 = 1_000;

/// Locks, whatever a panicking thread left: the data behind these locks is valid at every instant.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Raised in the threads that wait for one that has panicked.
#[derive(Debug)]
pub struct Abandoned;

/// A count that threads wait on: they spin a little, then sleep.
#[derive(Debug, Default)]
struct Epoch {
    count: AtomicUsize,
    sleepers: Mutex<usize>,
    wake: Condvar,
}

impl Epoch {
    fn now(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Counts one on and wakes whoever sleeps.
    fn advance(&self) {
        self.count.fetch_add(1, Ordering::AcqRel);
        if *lock(&self.sleepers) > 0 {
            self.wake.notify_all();
        }
    }

    /// Waits until the count is not `seen`; returns it.
    fn wait_past(&self, seen: usize) -> usize {
        for _ in 0..SPINS {
            let now = self.now();
            if now != seen {
                return now;
            }
            std::hint::spin_loop();
        }
        let mut sleepers = lock(&self.sleepers);
        *sleepers += 1;
        while self.now() == seen {
            sleepers = self.wake.wait(sleepers).unwrap_or_else(PoisonError::into_inner);
        }
        *sleepers -= 1;
        self.now()
    }
}

/// A barrier between phases; a broken one releases everybody.
#[derive(Debug, Default)]
pub struct Barrier {
    threads: usize,
    arrived: AtomicUsize,
    generation: Epoch,
    broken: AtomicBool,
}

impl Barrier {
    /// For `threads` threads.
    pub fn new(threads: usize) -> Self {
        Self { threads, ..Self::default() }
    }

    /// Waits until all have arrived.
    ///
    /// # Errors
    /// A thread has panicked and will never come.
    pub fn wait(&self) -> Result<(), Abandoned> {
        if self.threads > 1 {
            let generation = self.generation.now();
            if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
                self.arrived.store(0, Ordering::Relaxed);
                self.generation.advance();
            } else if !self.broken.load(Ordering::Acquire) {
                self.generation.wait_past(generation);
            }
        }
        if self.broken.load(Ordering::Acquire) { Err(Abandoned) } else { Ok(()) }
    }

    /// Releases every waiting thread with an error, for good.
    pub fn break_up(&self) {
        self.broken.store(true, Ordering::Release);
        self.generation.advance();
    }
}

/// Units of one phase, claimed in runs by whoever is free.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Claims(AtomicUsize);

impl Claims {
    /// Makes all units claimable again; call while no thread claims.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// The next run of at most `grain` of `units`.
    pub fn next(&self, units: usize, grain: usize) -> Option<std::ops::Range<usize>> {
        if self.0.load(Ordering::Relaxed) >= units {
            return None;
        }
        let start = self.0.fetch_add(grain, Ordering::Relaxed);
        (start < units).then(|| start..(start + grain).min(units))
    }
}

/// Tells helpers that a new pass has begun.
#[derive(Debug, Default)]
pub struct Gate(Epoch);

impl Gate {
    /// Opens the gate to the next epoch.
    pub fn open(&self) {
        self.0.advance();
    }

    /// Waits until the epoch is past `seen` and returns it.
    pub fn wait_past(&self, seen: usize) -> usize {
        self.0.wait_past(seen)
    }
}

/// Asserts that this thread rounds to nearest and keeps subnormals (no FTZ, no DAZ).
pub fn assert_rounding() {
    #[cfg(target_arch = "x86_64")]
    {
        let mut mxcsr = 0u32;
        // SAFETY: stores the 32-bit control register to a local variable; SSE is part of the architecture.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mxcsr, options(nostack, preserves_flags)) };
        assert_eq!(mxcsr & 0xe040, 0, "a compute thread must round to nearest and keep subnormals");
    }
    #[cfg(target_arch = "aarch64")]
    {
        let fpcr: u64;
        // SAFETY: reads the floating-point control register.
        unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) fpcr, options(nomem, nostack, preserves_flags)) };
        assert_eq!(fpcr & 0x01c0_0000, 0, "a compute thread must round to nearest and keep subnormals");
    }
}
