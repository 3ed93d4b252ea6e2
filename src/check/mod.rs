//! The validation suites: each compares a backend's bits with the canonical arithmetic, prints its seed and its counts, and ends with a
//! line of passes and failures.

pub mod compile;
pub mod score;
