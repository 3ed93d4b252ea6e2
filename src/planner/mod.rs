//! The pure core of the planner: which rows the next step has, and how each sequence ends.
//!
//! Decode rows of every active sequence and one packed prefill plan share a step. A decode row starts where the device stands
//! and reads the token that the device selected last, so the next step can be planned before the last one is known; at most
//! `STEPS_IN_FLIGHT` are. The planner is the only judge of ends: the first one it is told wins, and an ended sequence enters no
//! further plan (I6). It leaves when the last step that contains it has retired (rule 5).

mod budget;
mod core;
mod counters;
mod logit_credits;
mod resident;
#[cfg(test)]
pub(crate) mod seeded;
#[cfg(test)]
mod tests;

pub use budget::{BUDGET_FLOOR, TokenBudget};
pub use core::{Departure, PlannedStep, Planner, PlannerConfig, Retired};
pub use resident::{Cause, RowEnd, Sequence};
