//! Microbenchmarks: one file a subject; the command line prints what they return.

pub mod cpu;
pub mod memory;
pub mod profile;
pub mod step;
