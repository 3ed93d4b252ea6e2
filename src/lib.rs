//! Crucible: a language-model server whose answer is a pure function of the request.
//!
//! The pure cores (`admission`, `pages`, `planner`, `sampler`) know neither actix nor time nor I/O; `actors` are thin shells
//! over them; `backend` computes; `arith` defines what every backend must compute, bit for bit. docs/architecture.md is the map.
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(missing_docs)]

pub mod actors;
pub mod admission;
pub mod arith;
pub mod backend;
pub mod bench;
pub mod check;
pub mod cli;
pub mod config;
pub mod load;
pub mod model;
pub mod pages;
pub mod planner;
pub mod protocol;
pub mod sampler;
pub mod server;
pub mod telemetry;
pub mod tui;
pub mod web;
