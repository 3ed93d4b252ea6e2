//! What the executor is told.

use std::time::Duration;

use actix::Message;

use crate::planner::PlannedStep;

/// Run one step; sent by the planner only, at most `STEPS_IN_FLIGHT` ahead of what has completed.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct RunStep {
    /// The step.
    pub planned: PlannedStep,
    /// Time that planning took.
    pub prepare: Duration,
}

/// A `Notified` backend finished a step.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub struct Finished;

/// The engine is dead: submit and poll nothing more.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub struct Close;
