//! The pure core of admission: the bounded waiting queue, request ids and the account of every request.

pub mod account;
pub mod permit;
pub mod request;

pub use account::{Account, Dialect, FinishedSample, Outcome, Snapshot, StepCounters};
pub use permit::{QueuePermit, QueuePermits};
pub use request::{Limits, RequestId, RequestIds, RequestSpec, ValidRequest, ValidationError};
