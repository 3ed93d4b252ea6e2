//! Microbenchmarks and the profiler: device and host time of steps, stage by stage.

pub mod profile;
pub mod step;
