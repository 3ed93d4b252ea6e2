//! What a backend counts beside its steps: graphs by class, allocations. Plain numbers since the start of the backend, which ride in
//! every step's timing up to the account (I10). All zero on the CPU.

use serde::Serialize;

/// A class of step shapes, each with its own graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GraphClass {
    /// One token a row, every row selects.
    Decode,
    /// One row of several tokens.
    Prefill,
    /// Anything else.
    Packed,
}

impl GraphClass {
    /// Every class, in the order of `DeviceCounts::graphs`.
    pub const ALL: [GraphClass; 3] = [GraphClass::Decode, GraphClass::Prefill, GraphClass::Packed];

    /// The label in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            GraphClass::Decode => "decode",
            GraphClass::Prefill => "prefill",
            GraphClass::Packed => "packed",
        }
    }
}

/// Counts of one class, or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GraphCounts {
    /// Steps replayed from a graph: hits.
    pub replays: u64,
    /// Steps launched kernel by kernel: misses.
    pub eager: u64,
    /// Graphs recorded.
    pub captures: u64,
    /// Recordings that failed.
    pub failures: u64,
    /// Graphs dropped for room.
    pub evictions: u64,
    /// Time spent recording, failed recordings included, µs.
    pub capture_us: u64,
}

impl GraphCounts {
    fn and(self, other: Self) -> Self {
        Self {
            replays: self.replays + other.replays,
            eager: self.eager + other.eager,
            captures: self.captures + other.captures,
            failures: self.failures + other.failures,
            evictions: self.evictions + other.evictions,
            capture_us: self.capture_us + other.capture_us,
        }
    }
}

/// Everything that a backend counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceCounts {
    /// By class, in the order of `GraphClass::ALL`.
    pub graphs: [GraphCounts; 3],
    /// Allocations of device and page-locked memory in this process; none happens inside a step.
    pub allocations: u64,
}

impl DeviceCounts {
    /// All classes together.
    pub fn all_graphs(&self) -> GraphCounts {
        self.graphs.iter().fold(GraphCounts::default(), |sum, &class| sum.and(class))
    }
}
