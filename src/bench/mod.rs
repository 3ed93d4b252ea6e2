//! Microbenchmarks: one file a subject; the command line prints what they return.

pub mod cpu;
pub mod memory;
