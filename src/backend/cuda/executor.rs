//! The CUDA backend: owns device, stream, graphs, KV pool, slot state and selection. `submit` copies a step to the device and launches
//! it, `poll` asks an event; neither waits. Next tokens and positions stay on the device, so that a step never waits for the host.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use crate::arith::select::token_logprobs;
use crate::backend::{
    Backend, BackendError, Completion, Facts, HostLogits, RowOutput, STEPS_IN_FLIGHT, StepOutput, StepTiming, ValidStep,
};
use crate::model::{Geometry, ModelWeights, Profile};

use super::adjust::{AdjustMemory, AdjustedSlots};
use super::cache::Cache;
use super::driver::{Device, DeviceError, Event};
use super::graphs::{Decision, GraphCache, GraphCounts, GraphLimits};
use super::kernels::{Kernels, LaunchError, SelectOut};
use super::memory::{self, PinnedBuffer};
use super::nvrtc::Compiler;
use super::pass::{Pass, PassLimits, PassMemory, PassShape, page_bytes};
use super::plan::{self, Expected};
use super::weights::{DeviceModel, kinds_of};

const BACKEND: &str = "cuda";

/// How many KV pages there are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PoolSize {
    /// This many.
    Pages(usize),
    /// As many as fit into this part of the memory that is free once the weights are there.
    MemoryFraction(f64),
}

/// How the backend is set up.
#[derive(Clone, Debug)]
pub struct CudaConfig {
    /// Device number.
    pub device: usize,
    /// Size of the KV pool.
    pub pool: PoolSize,
    /// Resident sequences.
    pub slots: usize,
    /// Most token rows in one step.
    pub max_step_tokens: usize,
    /// Graph classes.
    pub graphs: GraphLimits,
    /// Folder of compiled kernels.
    pub cache_dir: Option<PathBuf>,
    /// Folder that is searched first for the kernel compiler.
    pub libraries: Option<PathBuf>,
    /// Folder of kernel sources that replace embedded ones, for checks and benchmarks alone.
    pub kernels: Option<PathBuf>,
}

/// A submitted step.
#[derive(Debug)]
struct InFlight {
    step: u64,
    lane: usize,
    expected: Vec<Expected>,
    /// Logits of rows that did not fit the page-locked buffer, by wanted position.
    overflow: Vec<(usize, Vec<f32>)>,
    timing: StepTiming,
}

/// What each of the steps in flight has for itself.
#[derive(Debug)]
struct Lane {
    upload: PinnedBuffer<u8>,
    selected: PinnedBuffer<SelectOut>,
    logits: PinnedBuffer<f32>,
    begun: Event,
    done: Event,
}

/// Counters of the backend for reports and checks.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaCounts {
    /// Graphs.
    pub graphs: GraphCounts,
    /// Allocations of device and page-locked memory since the process began.
    pub allocations: u64,
}

/// The CUDA backend. Made, used and dropped on one thread.
#[derive(Debug)]
pub struct CudaBackend {
    facts: Facts,
    in_flight: VecDeque<InFlight>,
    submitted: usize,
    adjusted: AdjustedSlots,
    last_shape: Option<PassShape>,
    graphs: GraphCache,
    lanes: Vec<Lane>,
    pass: Pass,
    device: Rc<Device>,
}

fn unavailable(reason: impl ToString) -> BackendError {
    BackendError::Unavailable { backend: BACKEND, reason: reason.to_string() }
}

fn failed(error: impl ToString) -> BackendError {
    BackendError::Failed { backend: BACKEND, reason: error.to_string() }
}

fn check_geometry(g: &Geometry) -> Result<(), BackendError> {
    if ![32, 64, 96, 128].contains(&g.head_dim) {
        return Err(unavailable(format!("head dimension {} is not 32, 64, 96 or 128", g.head_dim)));
    }
    for (name, width) in [("hidden", g.hidden), ("ffn", g.ffn)] {
        if !width.is_multiple_of(32) {
            return Err(unavailable(format!("{name} ({width}) is no multiple of 32")));
        }
    }
    Ok(())
}

fn pool_pages(device: &Device, g: &Geometry, config: &CudaConfig) -> Result<usize, BackendError> {
    match config.pool {
        PoolSize::Pages(pages) => Ok(pages),
        PoolSize::MemoryFraction(fraction) => {
            let (free, _) = device.memory().map_err(unavailable)?;
            let scratch = config.max_step_tokens * 4 * (g.vocab + 6 * g.ffn.max(g.hidden) + 4 * g.q_dim())
                + AdjustMemory::bytes(config.slots, g.vocab);
            let bytes = (free as f64 * fraction) as usize;
            let pages = bytes.saturating_sub(scratch) / page_bytes(g);
            let most = config.slots * g.context.div_ceil(16);
            if pages == 0 {
                let text = format!(
                    "{} MiB are free, a fraction of {fraction} leaves no room for a KV page after {} MiB of activations",
                    free >> 20,
                    scratch >> 20
                );
                return Err(unavailable(text));
            }
            Ok(pages.min(most))
        }
    }
}

impl CudaBackend {
    /// Opens the device, compiles or loads the kernels, copies the weights, allocates everything a step may need and records the decode
    /// graphs. Positions per page are 16.
    ///
    /// # Errors
    /// `Unavailable`: no driver or compiler, a geometry without kernels, or too little memory, saying how much was wanted for what.
    pub fn new(weights: ModelWeights, profile: Profile, config: &CudaConfig) -> Result<Self, BackendError> {
        let g = weights.geometry.clone();
        check_geometry(&g)?;
        let device = Device::open(config.device).map_err(unavailable)?;
        let compiler = Compiler::open(config.libraries.as_deref(), config.kernels.as_deref()).map_err(unavailable)?;
        let cache = Cache::new(config.cache_dir.clone());
        let kinds = kinds_of(profile, &weights);
        let kernels = Kernels::load(&device, &compiler, &cache, &kinds, g.head_dim).map_err(unavailable)?;
        let model = DeviceModel::upload(&device, profile, &weights).map_err(unavailable)?;
        let pages = pool_pages(&device, &g, config)?;
        let limits = PassLimits { slots: config.slots, tokens: config.max_step_tokens.max(config.slots), pages };
        let memory = PassMemory::new(&device, &kernels, profile, &g, &limits).map_err(unavailable)?;
        let lanes = (0..STEPS_IN_FLIGHT)
            .map(|_| {
                Ok(Lane {
                    upload: PinnedBuffer::new(&device, "the step", memory.step.len())?,
                    selected: PinnedBuffer::new(&device, "selected tokens", limits.tokens)?,
                    logits: PinnedBuffer::new(&device, "logits", config.slots * g.vocab)?,
                    begun: Event::new()?,
                    done: Event::new()?,
                })
            })
            .collect::<Result<Vec<_>, DeviceError>>()
            .map_err(unavailable)?;
        let facts = Facts {
            device: device.name.clone(),
            pages,
            page_tokens: 16,
            slots: config.slots,
            max_step_tokens: limits.tokens,
            context: g.context,
            vocab: g.vocab,
            weight_bytes: model.bytes,
            kv_bytes: (pages * page_bytes(&g)) as u64,
        };
        let pass = Pass::new(kernels, model, memory, g, profile);
        let graphs = GraphCache::new(config.graphs);
        let adjusted = AdjustedSlots::new(config.slots);
        let mut backend = Self {
            facts,
            in_flight: VecDeque::new(),
            submitted: 0,
            adjusted,
            last_shape: None,
            graphs,
            lanes,
            pass,
            device,
        };
        backend.record_decode_graphs(config.graphs.decode.min(config.slots)).map_err(unavailable)?;
        backend.device.synchronise().map_err(unavailable)?;
        Ok(backend)
    }

    fn record_decode_graphs(&mut self, largest: usize) -> Result<(), LaunchError> {
        for batch in 1..=largest {
            let shape = PassShape { rows: batch, tokens: batch, wanted: batch, singles: batch, tiles: 0, capacity: 0 };
            self.record(&shape)?;
        }
        Ok(())
    }

    /// Records a shape; a failure is remembered and no error unless the device is lost.
    fn record(&mut self, shape: &PassShape) -> Result<(), LaunchError> {
        let began = Instant::now();
        let pass = &self.pass;
        match self.device.capture(|| pass.run(shape, |_| {})) {
            Ok(graph) => self.graphs.keep(shape, graph, began.elapsed().as_micros() as u64),
            Err(error) => {
                tracing::warn!(%error, ?shape, "this shape cannot be recorded and runs kernel by kernel");
                self.graphs.remember_failure(shape);
            }
        }
        Ok(())
    }

    /// Counters.
    pub fn counts(&self) -> CudaCounts {
        CudaCounts { graphs: self.graphs.counts(), allocations: memory::allocations() }
    }

    /// The pass, for checks and profiles.
    pub fn pass(&self) -> &Pass {
        &self.pass
    }

    /// Shape of the step submitted last, for profiles.
    pub fn last_shape(&self) -> Option<PassShape> {
        self.last_shape
    }

    /// The device, for checks and profiles.
    pub fn device(&self) -> &Rc<Device> {
        &self.device
    }

    fn launch(&mut self, shape: &PassShape) -> Result<(), LaunchError> {
        match self.graphs.decide(shape) {
            Decision::Eager => return self.pass.run(shape, |_| {}),
            Decision::Record => self.record(shape)?,
            Decision::Replay => {}
        }
        match self.graphs.get(shape) {
            Some(graph) => Ok(graph.replay()?),
            None => self.pass.run(shape, |_| {}),
        }
    }

    fn launch_step(&mut self, step: &ValidStep) -> Result<InFlight, LaunchError> {
        let began = Instant::now();
        self.adjusted.follow(step.step());
        let lane_index = self.submitted % STEPS_IN_FLIGHT;
        let pass = &self.pass;
        let lane = &mut self.lanes[lane_index];
        let plan = plan::write(
            step.step(),
            self.facts.context,
            |history| pass.capacity(history),
            |capacity| pass.tile_rows(capacity),
            &self.adjusted,
            lane.upload.slice_mut(),
        );
        lane.begun.record(&self.device)?;
        let memory = &pass.memory;
        memory.step.upload_from(&lane.upload, plan.bytes)?;
        if plan.bindings > 0 {
            let words = memory.step.at(plan.shape.layout().end);
            let (tables, position) = (memory.tables.address(), memory.position.address());
            pass.kernels.bind(plan.bindings, words, tables, position, memory.table_stride)?;
        }
        let (adjusted, at) = plan.adjusted;
        if adjusted > 0 {
            pass.kernels.bind_adjust(adjusted, memory.step.at(at), memory.adjust.args(), self.facts.vocab)?;
        }
        self.launch(&plan.shape)?;
        let mut timing = StepTiming { upload_bytes: plan.bytes as u64, ..StepTiming::default() };
        let overflow = self.download(lane_index, &plan.shape, &plan.expected, &mut timing)?;
        self.lanes[lane_index].done.record(&self.device)?;
        self.submitted += 1;
        self.last_shape = Some(plan.shape);
        timing.launch_us = began.elapsed().as_secs_f64() * 1e6;
        Ok(InFlight { step: step.step().id, lane: lane_index, expected: plan.expected, overflow, timing })
    }

    /// Queues the copies to the host: selected tokens, and logits of the rows that asked. Logits beyond the page-locked room (only a step
    /// that scores whole prompts asks for so many) are read at once, which waits.
    fn download(
        &mut self,
        lane: usize,
        shape: &PassShape,
        expected: &[Expected],
        timing: &mut StepTiming,
    ) -> Result<Vec<(usize, Vec<f32>)>, LaunchError> {
        let (lane, memory, vocab) = (&mut self.lanes[lane], &self.pass.memory, self.facts.vocab);
        let mut overflow = Vec::new();
        if shape.wanted == 0 {
            return Ok(overflow);
        }
        lane.selected.download(0, memory.selected.address(), shape.wanted)?;
        timing.download_bytes = (shape.wanted * size_of::<SelectOut>()) as u64;
        let mut used = 0;
        for row in expected.iter().filter(|r| r.needs_logits()) {
            for position in row.first..row.first + row.count {
                if used < self.facts.slots {
                    lane.logits.download(used * vocab, memory.logits.at(position * vocab), vocab)?;
                    used += 1;
                } else {
                    overflow.push((position, memory.logits.read(position * vocab, vocab)?));
                }
                timing.download_bytes += (vocab * 4) as u64;
            }
        }
        Ok(overflow)
    }

    fn collect(&self, done: &InFlight) -> Vec<RowOutput> {
        let (lane, vocab) = (&self.lanes[done.lane], self.facts.vocab);
        let selected = lane.selected.slice();
        let mut used = 0;
        let mut logits_of = |position: usize| -> Vec<f32> {
            if let Some((_, logits)) = done.overflow.iter().find(|(p, _)| *p == position) {
                return logits.clone();
            }
            used += 1;
            lane.logits.slice()[(used - 1) * vocab..used * vocab].to_vec()
        };
        let row_output = |row: &Expected| {
            let range = row.first..row.first + row.count;
            let chosen = &selected[range.clone()];
            let finite = chosen.iter().all(|s| s.finite == 1);
            let tokens: Vec<u32> = chosen.iter().map(|s| s.token).collect();
            let logits: Vec<Vec<f32>> =
                if row.needs_logits() { range.map(&mut logits_of).collect() } else { Vec::new() };
            let logprobs = match row.logprobs {
                Some(top) if finite => {
                    logits.iter().zip(&tokens).map(|(l, &t)| token_logprobs(l, t, usize::from(top))).collect()
                }
                _ => Vec::new(),
            };
            let logits = if row.host_logits == HostLogits::Yes { logits } else { Vec::new() };
            RowOutput { request: row.request, tokens, logprobs, logits, finite }
        };
        done.expected.iter().map(row_output).collect()
    }
}

impl Backend for CudaBackend {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn completion(&self) -> Completion {
        Completion::Polled
    }

    fn on_completion(&mut self, _notify: Arc<dyn Fn() + Send + Sync>) {}

    fn submit(&mut self, step: ValidStep) -> Result<(), BackendError> {
        if self.in_flight.len() >= STEPS_IN_FLIGHT {
            return Err(BackendError::Overrun);
        }
        let launched = self.launch_step(&step).map_err(failed)?;
        self.in_flight.push_back(launched);
        Ok(())
    }

    fn poll(&mut self) -> Result<Option<StepOutput>, BackendError> {
        let Some(oldest) = self.in_flight.front() else { return Ok(None) };
        let lane = &self.lanes[oldest.lane];
        if !lane.done.passed().map_err(failed)? {
            return Ok(None);
        }
        let device_us = lane.done.since_us(&lane.begun).map_err(failed)?;
        let Some(done) = self.in_flight.pop_front() else { return Ok(None) };
        let rows = self.collect(&done);
        let timing = StepTiming { device_us, ..done.timing };
        Ok(Some(StepOutput { step: done.step, rows, timing }))
    }
}
