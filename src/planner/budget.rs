//! How many prompt tokens a step may hold. Without a target it is what the configuration says; with one it follows the measured
//! step times, so that a step that also carries decode rows takes about as long as the target. Pure: the same times give the same
//! budgets, and no budget moves a bit of any answer.
//!
//! A step over the target shrinks the budget at once by the share that the step took too long: a full step would have taken at
//! least as long. A step under 7/8 of it that used the whole budget grows it by an eighth; a fast step that had room left says
//! nothing about a larger one.

use std::time::Duration;

/// The adaptive budget never falls below this (or `prefill.token_budget`, where that is less): prompts keep going forward even when
/// the decode rows alone take longer than the target.
pub const BUDGET_FLOOR: usize = 64;

/// The current budget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBudget {
    tokens: usize,
    ceiling: usize,
    target: Option<Duration>,
}

impl TokenBudget {
    /// Begins at `ceiling`, and stays there when there is no target.
    pub fn new(ceiling: usize, target: Option<Duration>) -> Self {
        Self { tokens: ceiling, ceiling, target }
    }

    /// Prompt tokens that the next step may hold.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// A step with `prompt` prompt tokens has taken `step_us` µs on the device. Steps without prompt tokens, and those that were not
    /// measured, count for nothing.
    pub fn observe(&mut self, prompt: usize, step_us: f64) {
        let Some(target) = self.target else { return };
        if prompt == 0 || !step_us.is_finite() || step_us <= 0.0 {
            return;
        }
        let target_us = target.as_secs_f64() * 1e6;
        let floor = BUDGET_FLOOR.min(self.ceiling);
        if step_us > target_us {
            // A full step was planned with what it held, which a step before it in flight may have lowered since. Of a step that had
            // room left the prompt tokens say nothing: its time may be the decode rows', whatever the prompts.
            let planned = prompt.max(self.tokens);
            let fitting = (planned as f64 * (target_us / step_us)) as usize;
            self.tokens = self.tokens.min(fitting).max(floor);
        } else if step_us * 8.0 < target_us * 7.0 && prompt >= self.tokens {
            self.tokens = (self.tokens + self.tokens.div_ceil(8)).min(self.ceiling);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::seeded::Seeded;

    const TARGET: Duration = Duration::from_micros(2_000);

    /// A step's time on a device that needs `fixed` µs and `each` for every token.
    fn run(budget: &mut TokenBudget, steps: usize, fixed: f64, each: f64) {
        for _ in 0..steps {
            let prompt = budget.tokens();
            budget.observe(prompt, fixed + each * prompt as f64);
        }
    }

    #[test]
    fn without_a_target_no_time_changes_the_budget() {
        let mut budget = TokenBudget::new(1_024, None);
        run(&mut budget, 100, 1e6, 1e3);
        assert_eq!(budget.tokens(), 1_024);
    }

    #[test]
    fn full_steps_come_to_the_target_from_above_and_from_below() {
        let mut budget = TokenBudget::new(4_096, Some(TARGET));
        for (fixed, each) in [(500.0, 3.0), (100.0, 1.0), (900.0, 8.0)] {
            run(&mut budget, 60, fixed, each);
            let step_us = fixed + each * budget.tokens() as f64;
            assert!((1_500.0..=2_000.0 + each).contains(&step_us), "{step_us} µs at {} tokens", budget.tokens());
        }
    }

    #[test]
    fn a_device_too_slow_for_the_target_leaves_the_floor() {
        let mut budget = TokenBudget::new(1_024, Some(TARGET));
        run(&mut budget, 20, 50_000.0, 10.0);
        assert_eq!(budget.tokens(), BUDGET_FLOOR);
        let mut small = TokenBudget::new(10, Some(TARGET));
        run(&mut small, 20, 50_000.0, 10.0);
        assert_eq!(small.tokens(), 10, "the floor is never above what the configuration says");
    }

    #[test]
    fn a_fast_device_gets_the_whole_budget_back() {
        let mut budget = TokenBudget::new(1_024, Some(TARGET));
        run(&mut budget, 20, 50_000.0, 10.0);
        run(&mut budget, 40, 100.0, 0.1);
        assert_eq!(budget.tokens(), 1_024);
    }

    #[test]
    fn a_short_prompt_in_a_slow_step_takes_from_the_budget_what_the_step_took_too_long_and_no_more() {
        // Seen: ten prompt tokens in a step 5 % over the target left 64 of 1,024.
        let mut budget = TokenBudget::new(1_024, Some(TARGET));
        budget.observe(10, 2_100.0);
        assert_eq!(budget.tokens(), 975);
        budget.observe(1, 4_000.0);
        assert_eq!(budget.tokens(), 487);
    }

    #[test]
    fn the_second_of_two_full_steps_in_flight_shrinks_nothing_twice() {
        let mut budget = TokenBudget::new(1_024, Some(TARGET));
        budget.observe(1_024, 4_000.0);
        budget.observe(1_024, 4_000.0);
        assert_eq!(budget.tokens(), 512);
    }

    #[test]
    fn a_step_with_room_left_does_not_grow_the_budget() {
        let mut budget = TokenBudget::new(1_024, Some(TARGET));
        budget.observe(1_024, 8_000.0);
        assert_eq!(budget.tokens(), 256);
        budget.observe(255, 10.0);
        assert_eq!(budget.tokens(), 256);
        budget.observe(256, 10.0);
        assert_eq!(budget.tokens(), 288);
    }

    #[test]
    fn whatever_the_times_the_budget_stays_in_its_bounds_and_repeats() {
        for seed in 0..200 {
            let history = || {
                let mut random = Seeded::new(seed);
                let ceiling = 1 + random.below(3_000);
                let mut budget = TokenBudget::new(ceiling, Some(TARGET));
                let step = |_| {
                    let prompt = random.below(budget.tokens() + 2);
                    let times = [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-9, 1e12, random.below(9_000) as f64];
                    budget.observe(prompt, times[random.below(times.len())]);
                    assert!((BUDGET_FLOOR.min(ceiling)..=ceiling).contains(&budget.tokens()));
                    budget.tokens()
                };
                (0..500).map(step).collect::<Vec<_>>()
            };
            assert_eq!(history(), history());
        }
    }
}
