//! The CUDA backend: the same bits as the CPU's, from kernels compiled at run time. Nothing of CUDA is needed to build, and a machine
//! without a driver or compiler gets an error that says so, never a panic.
//!
//! `library` finds the libraries, `nvrtc` compiles `program`s from `sources`, `cache` keeps them, `gate` reads what was compiled;
//! `driver` and `memory` hold every raw handle; `kernels` launches, `pass` composes a forward pass, `graphs` decides what is replayed,
//! `plan` writes a step for the device, `budget` says what fits, `host` computes what the host must of finished steps, `executor` is
//! the backend. `trap` breaks a device on purpose.

pub mod adjust;
pub mod args;
pub mod attention;
pub mod budget;
pub mod cache;
pub mod driver;
pub mod executor;
pub mod gate;
pub mod graphs;
pub mod host;
pub mod kernels;
pub mod library;
pub mod linear;
pub mod memory;
pub mod nvrtc;
pub mod pass;
pub mod plan;
pub mod probe;
pub mod program;
pub mod sources;
pub mod trap;
pub mod weights;

pub use executor::{CudaBackend, CudaConfig, PoolSize};
pub use graphs::GraphLimits;
pub use probe::{DeviceReport, inspect, probe};
