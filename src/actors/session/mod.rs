//! Sessions: the response side of every request, on the HTTP worker that holds its connection.

pub mod actor;
pub mod core;
pub mod hub;
pub mod messages;
pub mod output;
pub mod registry;

pub use self::core::{SessionCore, SessionEffect};
pub use actor::{FieldNames, Plan, SessionGuard, fits_the_queue, launch};
pub use hub::SessionHub;
pub use output::{FrameBody, Output};
pub use registry::Registry;
