//! Crucible: a language-model server whose answer is a pure function of the request.
//!
//! The pure cores (`admission`, `pages`, `planner`, `sampler`, `scorer`) know neither actix nor time nor I/O; `actors` are thin shells
//! over them; `backend` computes; `arith` defines what every backend must compute, bit for bit. docs/architecture.md is the map.
//!
//! `unsafe` lives in three places: the CPU's kernels and buffers, the CUDA launchers, and the mapping of model files. Every other
//! module forbids it.
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(missing_docs)]

#[forbid(unsafe_code)]
pub mod actors;
#[forbid(unsafe_code)]
pub mod admission;
#[forbid(unsafe_code)]
pub mod arith;
pub mod backend;
#[forbid(unsafe_code)]
pub mod bench;
#[forbid(unsafe_code)]
pub mod check;
#[forbid(unsafe_code)]
pub mod cli;
#[forbid(unsafe_code)]
pub mod config;
#[cfg(feature = "fault-injection")]
#[forbid(unsafe_code)]
pub mod faults;
#[forbid(unsafe_code)]
pub mod hex;
#[forbid(unsafe_code)]
pub mod load;
pub mod model;
#[forbid(unsafe_code)]
pub mod output;
#[forbid(unsafe_code)]
pub mod pages;
#[forbid(unsafe_code)]
pub mod planner;
#[forbid(unsafe_code)]
pub mod protocol;
#[forbid(unsafe_code)]
pub mod sampler;
#[forbid(unsafe_code)]
pub mod scorer;
#[forbid(unsafe_code)]
pub mod server;
#[forbid(unsafe_code)]
pub mod telemetry;
#[forbid(unsafe_code)]
pub mod tui;
#[forbid(unsafe_code)]
pub mod web;
