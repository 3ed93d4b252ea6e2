//! The CPU backend: SIMD kernels on its own threads, bit for bit the scalar definitions of `arith`.
//!
//! Its threads pull the next queued step themselves and sleep when there is none; a finished step is announced by the notifier.
//! Neither the instruction set, nor the number of threads, nor what shares a step moves one bit of a row.

mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod buffers;
mod forward;
pub mod kernels;
mod level;
mod linear;
mod memory;
#[forbid(unsafe_code)]
mod model;
#[forbid(unsafe_code)]
mod pack;
#[forbid(unsafe_code)]
mod pass;
mod rows;
#[forbid(unsafe_code)]
mod select;
mod simd;
mod team;
mod threads;

use std::sync::Arc;

pub use level::Isa;

use super::{AttentionVariant, Backend, BackendError, Completion, Facts, StepOutput, ValidStep};
use crate::model::{ModelWeights, Profile};
use buffers::Buffers;
use forward::{Engine, Levels};
use level::Level;
use model::Model;
use team::Team;

/// How the CPU backend is set up.
#[derive(Clone, Copy, Debug)]
pub struct CpuConfig {
    /// Compute threads; 0 takes every core.
    pub threads: usize,
    /// Instruction set.
    pub isa: Isa,
    /// Physical KV pages.
    pub pages: usize,
    /// Positions per page: 16.
    pub page_tokens: usize,
    /// Slots.
    pub slots: usize,
    /// Most token rows in one step.
    pub max_step_tokens: usize,
}

/// Computes steps on the CPU.
pub struct CpuBackend {
    facts: Facts,
    team: Team,
}

impl CpuBackend {
    /// As `with_attention`, with the fastest attention.
    ///
    /// # Errors
    /// As there.
    pub fn new(weights: ModelWeights, profile: Profile, config: CpuConfig) -> Result<Self, BackendError> {
        Self::with_attention(AttentionVariant::Auto, weights, profile, config)
    }

    /// Packs the weights (the given ones are dropped), allocates everything and starts the threads.
    ///
    /// # Errors
    /// `Unavailable`: a shape that does not fit, an instruction set that is missing, too little memory.
    pub fn with_attention(
        variant: AttentionVariant,
        weights: ModelWeights,
        profile: Profile,
        config: CpuConfig,
    ) -> Result<Self, BackendError> {
        let unavailable = |reason: String| BackendError::Unavailable { backend: "cpu", reason };
        if config.page_tokens != attention::PAGE {
            return Err(unavailable(format!("kv.page_tokens is {}, the cpu takes 16", config.page_tokens)));
        }
        if config.pages == 0 || config.slots == 0 || config.max_step_tokens == 0 {
            return Err(unavailable("pages, slots and step tokens must be at least 1".into()));
        }
        let level = Level::detect(config.isa)?;
        let attention = match variant {
            AttentionVariant::Auto => level,
            AttentionVariant::Reference => Level::detect(Isa::Scalar)?,
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if config.threads == 0 { cores } else { config.threads };
        let model = Model::new(weights, profile).map_err(unavailable)?;
        let rows = config.max_step_tokens;
        let g = &model.geometry;
        let page_bytes = 2 * g.layers * g.kv_dim() * config.page_tokens * size_of::<f32>();
        let kv_mib = config.pages.saturating_mul(page_bytes) >> 20;
        let buffers = Buffers::new(&model, rows, config.pages).ok_or_else(|| {
            let (pages, weights) = (config.pages, model.bytes() >> 20);
            unavailable(format!(
                "no memory for {pages} KV pages ({kv_mib} MiB) and {rows} token rows beside {weights} MiB of weights: lower kv.pages, \
                 prefill.token_budget or limits.max_batch"
            ))
        })?;
        let engine = Engine::new(Levels { attention, others: level }, model, buffers, threads, rows);
        let geometry = &engine.model().geometry;
        let facts = Facts {
            device: format!("cpu ({}, {threads} threads)", level.name()),
            pages: config.pages,
            page_tokens: config.page_tokens,
            slots: config.slots,
            max_step_tokens: rows,
            // The compute threads read logits where they lie.
            host_logit_rows: rows,
            context: geometry.context,
            vocab: geometry.vocab,
            weight_bytes: engine.model().bytes() as u64,
            kv_bytes: engine.kv_bytes() as u64,
        };
        let team = Team::start(engine, threads, config.slots)
            .map_err(|e| unavailable(format!("a compute thread did not start: {e}")))?;
        Ok(Self { facts, team })
    }

    /// For checks: from the next submitted step on, activations, logits and the pages of new sequences are NaN before each step.
    pub fn poison_steps(&mut self) {
        self.team.poison();
    }
}

impl Backend for CpuBackend {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn completion(&self) -> Completion {
        Completion::Notified
    }

    fn on_completion(&mut self, notify: Arc<dyn Fn() + Send + Sync>) {
        self.team.on_completion(notify);
    }

    fn submit(&mut self, step: ValidStep) -> Result<(), BackendError> {
        self.team.submit(step.into_step())
    }

    fn poll(&mut self) -> Result<Option<StepOutput>, BackendError> {
        self.team.poll()
    }
}
