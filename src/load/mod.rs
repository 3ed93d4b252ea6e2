//! The load generator: what is asked (`workload`, `prompts`, `arrivals`), how (`dialect`, `client`), what came of it (`stats`,
//! `oracle`, `report`), and a server that answers at once (`stub`), against which the client itself is measured.
//!
//! It knows nothing of the engine: everything goes through HTTP, so that peers are measured by the same client. Only where the driver's
//! management library lies is asked of the CUDA backend (`devices`).

mod answer;
pub mod arrivals;
pub mod burst;
pub mod calibrate;
pub mod client;
#[cfg(test)]
mod client_tests;
pub mod compare;
pub mod devices;
pub mod dialect;
pub mod drive;
#[cfg(test)]
mod fake;
pub mod figures;
pub mod file;
pub mod growth;
pub mod http1;
pub mod interrupt;
pub mod job;
pub mod launch;
pub mod limits;
pub mod open;
pub mod oracle;
mod process;
pub mod prompts;
pub mod render;
pub mod report;
pub mod rng;
pub mod selftest;
pub mod slo;
pub mod soak;
pub mod stats;
pub mod stub;
pub mod target;
pub mod variant;
pub mod watch;
pub mod workload;
