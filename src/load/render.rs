//! From a shot of a workload to the bytes of a request: prompt, sampling seed and oracle key follow from (seed, workload, variant,
//! index) alone, so that two runs with one seed ask exactly the same.

use std::collections::BTreeMap;

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::dialect::{Ask, Capabilities, Dialect};
use super::job::Wire;
use super::prompts::{self, TokenRange};
use super::rng::SplitMix64;
use super::target::{Target, TargetError, probe};
use super::workload::Shot;
use crate::hex::hex;

/// Bytes of a key's hash that are kept.
const KEY_BYTES: usize = 16;

/// What all prompts of a run have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Seeding {
    /// The run's seed.
    pub seed: u64,
    /// Token ids of prompts.
    pub token_range: TokenRange,
}

/// Writes the requests of one target.
#[derive(Clone, Debug)]
pub struct Renderer {
    target: Target,
    model: String,
    dialect: Dialect,
    takes: BTreeMap<Dialect, Capabilities>,
    seeding: Seeding,
}

impl Renderer {
    /// Asks the target for its model (unless one is named) and probes every dialect in `dialects`; the first is the one of shots
    /// that name none.
    ///
    /// # Errors
    /// The target does not answer, or refuses a dialect in every form.
    pub fn connect(
        target: Target,
        model: Option<String>,
        dialects: &[Dialect],
        seeding: Seeding,
    ) -> Result<Self, TargetError> {
        let model = match model {
            Some(model) => model,
            None => target.first_model()?.unwrap_or_default(),
        };
        let mut takes = BTreeMap::new();
        for &dialect in dialects {
            takes.insert(dialect, probe(&target, dialect, &model, seeding.token_range)?);
        }
        let dialect = dialects.first().copied().unwrap_or(Dialect::Native);
        Ok(Self { target, model, dialect, takes, seeding })
    }

    /// Probes one more dialect.
    ///
    /// # Errors
    /// The target refuses it in every form.
    pub fn add(&mut self, dialect: Dialect) -> Result<(), TargetError> {
        let takes = probe(&self.target, dialect, &self.model, self.seeding.token_range)?;
        self.takes.insert(dialect, takes);
        Ok(())
    }

    /// A renderer that asks nothing and assumes the best of every dialect, for tests and the stub.
    pub fn unprobed(target: Target, model: &str, dialect: Dialect, seeding: Seeding) -> Self {
        let takes = Dialect::ALL.into_iter().map(|d| (d, Capabilities::best_of(d))).collect();
        Self { target, model: model.into(), dialect, takes, seeding }
    }

    /// The same, for a target of which one dialect takes so much.
    #[must_use]
    pub fn taking(mut self, dialect: Dialect, takes: Capabilities) -> Self {
        self.takes.insert(dialect, takes);
        self
    }

    /// The target.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The model that requests name.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// What each probed dialect takes.
    pub fn takes(&self) -> &BTreeMap<Dialect, Capabilities> {
        &self.takes
    }

    /// What prompts follow from.
    pub fn seeding(&self) -> Seeding {
        self.seeding
    }

    /// The request of a shot. `variant` separates rounds, `index` the shots of one round.
    pub fn wire(&self, workload: &str, variant: u64, index: u64, shot: &Shot) -> Wire {
        let dialect = shot.dialect.unwrap_or(self.dialect);
        let takes = self.takes.get(&dialect).copied().unwrap_or_else(|| Capabilities::best_of(dialect));
        let mut rng = SplitMix64::keyed(self.seeding.seed, workload, &[variant, index]);
        let seed = rng.below(1 << 31);
        let prompt = if takes.token_prompts {
            prompts::tokens(&mut rng, shot.prompt, self.seeding.token_range)
        } else {
            prompts::words(&mut rng, shot.prompt)
        };
        let (model, max_tokens, policy) = (self.model.as_str(), shot.output, shot.policy);
        let ask = Ask { dialect, model, prompt: &prompt, max_tokens, policy, seed, takes };
        let body = ask.body();
        let key = if takes.repeats(policy) { key(dialect, &body) } else { String::new() };
        Wire::new(dialect, self.target.post(dialect, &body), key, ask.length())
    }
}

/// Names a request by what it asks: 32 hexadecimal digits of the SHA-256 of path and body.
fn key(dialect: Dialect, body: &str) -> String {
    let mut hash = Sha256::new();
    hash.update(dialect.path().as_bytes());
    hash.update([b'\n']);
    hash.update(body.as_bytes());
    hex(&hash.finalize()[..KEY_BYTES])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::dialect::Policy;

    fn renderer(seed: u64) -> Renderer {
        let target = Target::new("http://127.0.0.1:1", None).expect("a target");
        let seeding = Seeding { seed, token_range: TokenRange::default() };
        Renderer::unprobed(target, "m", Dialect::Native, seeding)
    }

    #[test]
    fn a_request_follows_from_seed_workload_variant_and_index() {
        let shot = Shot::new(5, 3);
        let wire = |seed, name, variant, index| renderer(seed).wire(name, variant, index, &shot);
        let base = wire(1, "a", 0, 0);
        assert_eq!((&base.bytes, &base.key), (&wire(1, "a", 0, 0).bytes, &wire(1, "a", 0, 0).key));
        for other in [wire(2, "a", 0, 0), wire(1, "b", 0, 0), wire(1, "a", 1, 0), wire(1, "a", 0, 1)] {
            assert_ne!(base.key, other.key);
        }
        assert_eq!(base.key.len(), 2 * KEY_BYTES);
    }

    #[test]
    fn a_drawn_answer_without_a_seed_has_no_name_in_an_oracle() {
        let mut renderer = renderer(1);
        let shot = |policy| Shot { policy, ..Shot::new(5, 3) };
        let key = |renderer: &Renderer, policy| renderer.wire("a", 0, 0, &shot(policy)).key.len();
        assert_eq!(key(&renderer, Policy::TopP), 2 * KEY_BYTES);
        renderer.takes.insert(Dialect::Native, Capabilities { seed: false, ..Capabilities::best_of(Dialect::Native) });
        assert_eq!(key(&renderer, Policy::TopP), 0);
        assert_eq!(key(&renderer, Policy::Greedy), 2 * KEY_BYTES);
    }
}
