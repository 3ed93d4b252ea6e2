//! Drives a backend one step at a time, for commands and checks that need no engine: every step is validated, submitted and
//! waited for. Not for serving: it blocks its thread.

use std::time::Duration;

use super::{Backend, BackendError, PlanError, Row, SlotBinding, Step, StepOutput, StepValidator};

/// Pause between two questions whether the step is done.
const PAUSE: Duration = Duration::from_micros(50);

/// Why a step gave no output.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The backend refused or died.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The step was malformed or does not fit the backend.
    #[error("the step does not fit the backend: {0}")]
    Plan(#[from] PlanError),
}

/// A backend with its validator and step ids.
pub struct Driver {
    backend: Box<dyn Backend>,
    validator: StepValidator,
    last_step: u64,
}

impl Driver {
    /// Takes a fresh backend.
    pub fn new(backend: Box<dyn Backend>) -> Self {
        let validator = StepValidator::new(backend.facts().step_limits());
        Self { backend, validator, last_step: 0 }
    }

    /// The backend.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Runs one step to its end.
    ///
    /// # Errors
    /// The step is malformed, or the backend failed.
    pub fn run(
        &mut self,
        bindings: Vec<SlotBinding>,
        rows: Vec<Row>,
        tokens: Vec<u32>,
    ) -> Result<StepOutput, DriverError> {
        self.last_step += 1;
        let step = self.validator.check(Step { id: self.last_step, bindings, rows, tokens })?;
        self.backend.submit(step)?;
        loop {
            if let Some(output) = self.backend.poll()? {
                return Ok(output);
            }
            std::thread::sleep(PAUSE);
        }
    }
}
