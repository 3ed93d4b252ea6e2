//! The bounds of every number that the load generator takes, from the command line or from a file, in one place; docs/load.md lists them.
//! Nothing past them is tried: a number that no run can mean is refused with its bounds. Pure.

/// Bounds of a whole number, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whole {
    /// The least.
    pub min: u64,
    /// The greatest.
    pub max: u64,
}

/// Bounds of a number with a fraction: above `above`, at most `max`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Real {
    /// It must be greater.
    pub above: f64,
    /// The greatest.
    pub max: f64,
}

const fn whole(min: u64, max: u64) -> Whole {
    Whole { min, max }
}

const fn positive(max: f64) -> Real {
    Real { above: 0.0, max }
}

/// Bytes of a file that is read: workloads, a trace, an oracle, a configuration to compare.
pub const FILE_BYTES: Whole = whole(0, 1 << 28);
/// Worker threads of the client or of the stub.
pub const THREADS: Whole = whole(1, 256);
/// `--timeout-s`: event times are microseconds in 32 bits, which hold an hour.
pub const TIMEOUT_S: Whole = whole(1, 3_600);
/// `--ready-s`.
pub const READY_S: Whole = whole(1, 86_400);
/// `--trials`.
pub const TRIALS: Whole = whole(1, 10_000);
/// `--warmups`.
pub const WARMUPS: Whole = whole(0, 10_000);
/// `--pairs`.
pub const PAIRS: Whole = whole(1, 1_000);
/// Prompt tokens of one request.
pub const PROMPT_TOKENS: Whole = whole(1, 1 << 20);
/// Generated tokens of one request.
pub const OUTPUT_TOKENS: Whole = whole(1, 1 << 20);
/// Requests of one burst.
pub const BURST_REQUESTS: Whole = whole(1, 100_000);
/// Prompt tokens of one burst in all.
pub const BURST_TOKENS: Whole = whole(1, 1 << 26);
/// Requests of one open-loop run, by rate and time or in a trace; all of them are written before the first is sent.
pub const RUN_REQUESTS: Whole = whole(1, 1_000_000);
/// Prompt tokens of one open-loop run in all.
pub const RUN_TOKENS: Whole = whole(1, 1 << 29);
/// Requests in flight in a closed loop.
pub const CONCURRENCY: Whole = whole(1, 100_000);
/// `--cancelled`.
pub const CANCELLED: Whole = whole(0, 10_000_000);
/// `--cancel-every`; 0 cancels none.
pub const CANCEL_EVERY: Whole = whole(0, 1_000_000);
/// Milliseconds of a cancel point.
pub const CANCEL_MS: Whole = whole(0, 3_600_000);
/// `--prompt-variants`.
pub const PROMPT_VARIANTS: Whole = whole(1, 100_000);
/// `--expect-queue`, `--expect-pages`.
pub const EXPECTED: Whole = whole(0, 1 << 32);
/// Token ids of prompts.
pub const TOKEN_IDS: Whole = whole(0, 1 << 24);
/// `--gpu`.
pub const GPU: Whole = whole(0, 1_023);
/// `--budgets`.
pub const BUDGETS: Whole = whole(1, 1 << 20);
/// `--gap-us`.
pub const GAP_US: Whole = whole(0, 60_000_000);
/// `--refuse-every`, `--break-every`; 0 is never.
pub const EVERY: Whole = whole(0, 1 << 32);

/// Requests a second.
pub const RATE: Real = positive(100_000.0);
/// A share of the capacity.
pub const FACTOR: Real = positive(1_000.0);
/// Seconds of a run, a phase or a trace.
pub const DURATION_S: Real = positive(604_800.0);
/// Seconds of a calibration or a self-test.
pub const CALIBRATE_S: Real = positive(3_600.0);
/// Milliseconds of an objective.
pub const OBJECTIVE_MS: Real = positive(3_600_000.0);
/// Milliseconds from the start of a burst, and between two of its requests.
pub const AT_MS: Real = Real { above: -f64::MIN_POSITIVE, max: 3_600_000.0 };
/// `--expect-events-per-s`.
pub const EVENTS_PER_S: Real = positive(1e9);

impl Whole {
    /// The number, or what it must be.
    ///
    /// # Errors
    /// It is out of bounds.
    pub fn check(self, value: u64) -> Result<u64, String> {
        if (self.min..=self.max).contains(&value) { Ok(value) } else { Err(self.refusal(&value.to_string())) }
    }

    /// A parser of such a number for the command line.
    pub fn parse<T: TryFrom<u64>>(self) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
        move |text| {
            let value = text.parse().ok().and_then(|value| self.check(value).ok());
            value.and_then(|value| T::try_from(value).ok()).ok_or_else(|| self.refusal(text))
        }
    }

    fn refusal(self, text: &str) -> String {
        format!("{text} is not a whole number from {} to {}", self.min, self.max)
    }
}

impl Real {
    /// The number, or what it must be.
    ///
    /// # Errors
    /// It is out of bounds or no number.
    pub fn check(self, value: f64) -> Result<f64, String> {
        if value > self.above && value <= self.max { Ok(value) } else { Err(self.refusal(&value.to_string())) }
    }

    /// A parser of such a number for the command line.
    pub fn parse(self) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync + 'static {
        move |text| text.parse().ok().and_then(|v| self.check(v).ok()).ok_or_else(|| self.refusal(text))
    }

    fn refusal(self, text: &str) -> String {
        let least = if self.above < 0.0 { "from 0" } else { "above 0" };
        format!("{text} is not a number {least} and up to {}", self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_no_run_can_mean_are_refused_with_their_bounds() {
        for text in ["inf", "-inf", "NaN", "1e300", "0", "-1", "", "fast", "604801"] {
            let refusal = DURATION_S.parse()(text).expect_err(text);
            assert!(refusal.ends_with("is not a number above 0 and up to 604800"), "{refusal}");
        }
        for text in ["0", "-1", "257", "1000000", "4294967295", "18446744073709551615", "1e3", "NaN", ""] {
            let refusal = THREADS.parse::<usize>()(text).expect_err(text);
            assert!(refusal.ends_with("is not a whole number from 1 to 256"), "{refusal}");
        }
        assert_eq!(DURATION_S.parse()("604800"), Ok(604_800.0));
        assert_eq!((THREADS.parse()("1"), THREADS.parse()("256")), (Ok(1usize), Ok(256usize)));
        assert_eq!((AT_MS.check(0.0), AT_MS.check(-0.5).is_err()), (Ok(0.0), true));
    }

    #[test]
    fn the_page_lists_every_bound() {
        let page = include_str!("../../docs/load.md");
        let source = include_str!("limits.rs");
        let names = source.lines().filter_map(|l| l.strip_prefix("pub const ")?.split(':').next());
        for name in names {
            let told = page.lines().any(|l| l.starts_with("| ") && l.contains(&format!("`{name}`")));
            assert!(told, "{name}");
        }
    }
}
