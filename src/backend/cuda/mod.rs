//! The CUDA backend: the same bits as the CPU's, from kernels compiled at run time. Nothing of CUDA is needed to build, and a machine
//! without a driver or compiler gets an error that says so, never a panic.
//!
//! `library` finds the libraries, `nvrtc` compiles `program`s from `sources`, `cache` keeps them, `gate` reads what was compiled; `driver` and `memory`
//! hold every raw handle; `kernels` launches, `pass` composes a forward pass, `graphs` decides what is replayed, `plan` writes a step
//! for the device, `executor` is the backend.

pub mod adjust;
pub mod cache;
pub mod driver;
pub mod executor;
pub mod gate;
pub mod graphs;
pub mod kernels;
pub mod library;
pub mod memory;
pub mod nvrtc;
pub mod pass;
pub mod plan;
pub mod probe;
pub mod program;
pub mod sources;
pub mod weights;

pub use executor::{CudaBackend, CudaConfig, CudaCounts, PoolSize};
pub use graphs::GraphLimits;
pub use probe::{DeviceReport, probe};
