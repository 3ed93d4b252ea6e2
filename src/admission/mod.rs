//! The pure core of admission: the bounded waiting queue, request ids and the account of every request.

pub mod account;
mod core;
pub mod permit;
pub mod request;
mod roll;

#[cfg(test)]
mod tests;

pub use account::{Account, Dialect, FinishedSample, Outcome, Snapshot, StepCounters};
pub use core::{Admission, Arrival, Effect};
pub use permit::{QueuePermit, QueuePermits};
pub use request::{Limits, RequestId, RequestIds, RequestSpec, ValidRequest, ValidationError};
pub use roll::{Ended, Timing};
