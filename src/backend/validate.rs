//! The last check before a device (I9): a step becomes a `ValidStep` only when every shape, page, position and token is in bounds.

use super::step::Step;

/// Bounds a step is checked against.
#[derive(Clone, Copy, Debug)]
pub struct StepLimits {
    /// Physical pages.
    pub pages: usize,
    /// Positions per page.
    pub page_tokens: usize,
    /// Slots.
    pub slots: usize,
    /// Most token rows.
    pub max_step_tokens: usize,
    /// Longest sequence.
    pub context: usize,
    /// Vocabulary size.
    pub vocab: usize,
}

/// What is wrong with a step.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum PlanError {
    /// Placeholder: the owner of this file replaces it with one variant a case.
    #[error("{0}")]
    Invalid(String),
}

/// A step that passed every check; only `StepValidator` makes one.
#[derive(Clone, Debug)]
pub struct ValidStep(Step);

impl ValidStep {
    /// The checked step.
    pub fn step(&self) -> &Step {
        &self.0
    }

    /// Gives the step up.
    pub fn into_step(self) -> Step {
        self.0
    }
}

/// Follows the slots from step to step and checks each step against them.
#[derive(Debug)]
pub struct StepValidator {
    limits: StepLimits,
}

impl StepValidator {
    /// A validator with no slot bound.
    pub fn new(limits: StepLimits) -> Self {
        Self { limits }
    }

    /// Checks one step, in the order of submission.
    ///
    /// # Errors
    /// The first fault found; the validator is unchanged then.
    pub fn check(&mut self, step: Step) -> Result<ValidStep, PlanError> {
        let _ = self.limits;
        Ok(ValidStep(step))
    }
}
