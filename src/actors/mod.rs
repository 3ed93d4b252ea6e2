//! Thin actix shells over the pure cores. Each receiver owns its messages; only `topology` knows every address.

pub mod admission;
mod board;
mod clock;
pub mod executor;
pub mod fatal;
pub mod pages;
pub mod planner;
pub mod sampler;
pub mod scorer;
pub mod session;
pub mod topology;
mod watchdog;
