//! The validation suites: each compares a backend's bits with the canonical arithmetic, prints its seed and its counts, and ends with a
//! line of passes and failures.

/// Prints a line of a report. One that standard output does not take is no panic: whoever runs the suites asks `output::complete`.
macro_rules! say {
    ($($part:tt)*) => { $crate::output::line(format_args!($($part)*)) };
}

pub mod compile;
pub mod failure;
pub mod kernels;
pub mod models;
pub mod play;
pub mod reference;
pub mod score;
pub mod seen;
pub mod suites;

/// Seeded numbers for shapes and values: SplitMix64.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// A stream for a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed ^ 0x5bd1_e995_9e37_79b9)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (((u128::from(self.bits())) * n as u128) >> 64) as usize
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// One of `values`.
    pub fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    /// A coin.
    pub fn coin(&mut self) -> bool {
        self.bits() >> 63 == 1
    }

    /// Uniform in [−1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    /// `n` values with a spread that differs from call to call, some of them zero of either sign.
    pub fn values(&mut self, n: usize) -> Vec<f32> {
        let scale = [1.0, 0.01, 30.0, 1e-4][self.below(4)];
        (0..n)
            .map(|_| match self.below(64) {
                0 => 0.0,
                1 => -0.0,
                2 => self.unit() * scale * 100.0,
                _ => self.unit() * scale,
            })
            .collect()
    }

    /// Puts `items` into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

/// Passes and failures of one suite or part of one.
#[derive(Debug)]
pub struct Tally {
    name: String,
    seed: u64,
    passed: u64,
    failed: u64,
    values: u64,
}

/// Failures that are printed in full, a tally.
const SHOWN: u64 = 5;

impl Tally {
    /// Nothing counted yet.
    pub fn new(name: impl Into<String>, seed: u64) -> Self {
        Self { name: name.into(), seed, passed: 0, failed: 0, values: 0 }
    }

    /// Counts one case; the reason of a failure is printed.
    pub fn case(&mut self, outcome: Result<(), String>) {
        match outcome {
            Ok(()) => self.passed += 1,
            Err(reason) => {
                self.failed += 1;
                if self.failed <= SHOWN {
                    say!("FAIL {}: {reason}", self.name);
                }
            }
        }
    }

    /// Counts one case of floats that must agree in every bit.
    pub fn bits(&mut self, what: impl FnOnce() -> String, got: &[f32], want: &[f32]) {
        self.values += want.len() as u64;
        self.case(same_bits(got, want).map_err(|e| format!("{}: {e}", what())));
    }

    /// Adds another tally's counts.
    pub fn absorb(&mut self, other: &Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.values += other.values;
    }

    /// Cases that failed.
    pub fn failures(&self) -> u64 {
        self.failed
    }

    /// Prints the line of counts.
    pub fn print(&self) {
        let Self { name, seed, passed, failed, values } = self;
        say!("{name}: seed {seed}, {} cases, {values} values, {passed} passed, {failed} failed", passed + failed);
    }
}

/// Compares floats by bits.
///
/// # Errors
/// The first difference.
pub fn same_bits(got: &[f32], want: &[f32]) -> Result<(), String> {
    if got.len() != want.len() {
        return Err(format!("{} values, wanted {}", got.len(), want.len()));
    }
    match got.iter().zip(want).position(|(g, w)| g.to_bits() != w.to_bits()) {
        None => Ok(()),
        Some(i) => {
            let different = got.iter().zip(want).filter(|(g, w)| g.to_bits() != w.to_bits()).count();
            Err(format!("value {i} is {:e}, wanted {:e}; {different} of {} differ", got[i], want[i], want.len()))
        }
    }
}
