//! The CPU backend as a device whose steps complete when the history says so, and may report a logit that is not finite.

use std::collections::VecDeque;

use crucible::admission::RequestId;
use crucible::backend::cpu::CpuBackend;
use crucible::backend::{Backend, RowOutput, STEPS_IN_FLIGHT, Step, StepOutput, StepValidator, Want};

/// The device.
pub struct Device {
    backend: CpuBackend,
    validator: StepValidator,
    in_flight: VecDeque<InFlight>,
    seed: u64,
}

/// What is known of a step on its way.
struct InFlight {
    /// Whose logits are not finite.
    bad: Vec<RequestId>,
    logit_rows: usize,
}

/// Rows of logits that a step yields for the scorer.
pub fn logit_rows(step: &Step) -> usize {
    step.rows.iter().filter(|r| r.want == Want::All).map(|r| r.len as usize).sum()
}

impl Device {
    /// A device at work for the history of this seed.
    pub fn new(backend: CpuBackend, seed: u64) -> Self {
        let validator = StepValidator::new(backend.facts().step_limits());
        Self { backend, validator, in_flight: VecDeque::new(), seed }
    }

    /// Takes a planned step.
    pub fn submit(&mut self, step: Step) {
        assert!(self.in_flight.len() < STEPS_IN_FLIGHT, "two steps in flight at most");
        let bad = |index, request| bad_from(self.seed, request).is_some_and(|bad| index >= bad);
        let bad = step.rows.iter().filter(|r| bad(r.sampling.token_index, r.request)).map(|r| r.request).collect();
        let logit_rows = logit_rows(&step);
        let step = self.validator.check(step).expect("I9: what is planned is well-formed");
        self.backend.submit(step).expect("room for a step");
        self.in_flight.push_back(InFlight { bad, logit_rows });
    }

    /// Whether a step is on its way.
    pub fn is_busy(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Rows of logits of the steps on their way.
    pub fn logit_rows(&self) -> usize {
        self.in_flight.iter().map(|step| step.logit_rows).sum()
    }

    /// Waits for the oldest step.
    pub fn complete(&mut self) -> StepOutput {
        let InFlight { bad, .. } = self.in_flight.pop_front().expect("a step in flight");
        let mut output = loop {
            match self.backend.poll().expect("the backend computes") {
                Some(output) => break output,
                None => std::thread::yield_now(),
            }
        };
        // The time that the device claims depends on the step alone, so that a history repeats.
        output.timing.device_us = (output.step % 7 * 100) as f64;
        let spoil = |row: &mut RowOutput| row.finite &= !bad.contains(&row.request);
        output.rows.iter_mut().for_each(spoil);
        output
    }
}

/// Every eleventh request meets a logit that is not finite, at a token that the seed fixes.
pub fn bad_from(seed: u64, request: RequestId) -> Option<u32> {
    (seed + request.0).is_multiple_of(11).then_some((seed % 5) as u32)
}
