//! The load generator: what is asked (`workload`, `prompts`, `arrivals`), how (`dialect`, `client`), what came of it (`stats`,
//! `oracle`, `report`), and a server that answers at once (`stub`), against which the client itself is measured.
//!
//! It knows nothing of the engine: everything goes through HTTP, so that peers are measured by the same client.

pub mod arrivals;
pub mod client;
pub mod dialect;
pub mod http1;
pub mod prompts;
pub mod rng;
pub mod selftest;
pub mod sse;
pub mod stats;
pub mod stub;
pub mod target;
pub mod workload;
