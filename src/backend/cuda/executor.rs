//! The CUDA backend: owns device, stream, graphs, KV pool, slot state and selection. `submit` copies a step to the device and launches
//! it, `poll` asks an event; neither waits. Next tokens and positions stay on the device, so that a step never waits for the host.
//! Rows that need their logits on the host are finished by the thread of `host`.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use crate::backend::{
    Backend, BackendError, Completion, DeviceCounts, Facts, RowOutput, STEPS_IN_FLIGHT, SlotBinding, StepOutput,
    StepTiming, ValidStep,
};
use crate::model::{Geometry, ModelWeights, Profile};

use super::adjust::{AdjustMemory, AdjustedSlots};
use super::args::SelectOut;
use super::budget::{self, Budget};
use super::cache::Cache;
use super::driver::{Device, DeviceError, Event};
use super::graphs::{Decision, GraphCache, GraphLimits};
use super::host::{HostRows, Job, token_rows};
use super::kernels::{Kernels, LaunchError};
use super::memory::{self, PinnedBuffer, PinnedReader};
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
    /// As many as fit, beside the activations, into this part of the memory that weights and graphs leave.
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
    /// Most positions of a step whose logits the host reads; at least one a slot.
    pub host_logit_rows: usize,
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
    timing: StepTiming,
    whereabouts: Whereabouts,
}

/// Who has a submitted step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whereabouts {
    Device,
    /// The thread that makes log-probabilities.
    Host,
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

/// The CUDA backend. Made, used and dropped on one thread.
#[derive(Debug)]
pub struct CudaBackend {
    facts: Facts,
    in_flight: VecDeque<InFlight>,
    submitted: usize,
    adjusted: AdjustedSlots,
    last_shape: Option<PassShape>,
    /// Ends before the memory that it reads is freed.
    host: HostRows<PinnedReader<f32>>,
    refuse_captures: bool,
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

/// Bytes by part, with the number of pages that the configuration asks for or that the free memory allows.
fn plan_memory(
    weights: usize,
    profile: Profile,
    g: &Geometry,
    config: &CudaConfig,
    free: usize,
) -> Result<Budget, String> {
    let tokens = config.max_step_tokens.max(config.slots);
    let activations =
        budget::activation_bytes(g, profile, tokens, config.slots) + AdjustMemory::bytes(config.slots, g.vocab);
    let (decode_graphs, prompt_graphs) = budget::graph_bytes(&config.graphs, config.slots, g.layers);
    let need = Budget { weights, kv: 0, pages: 0, activations, tokens, decode_graphs, prompt_graphs };
    let pages = match config.pool {
        PoolSize::Pages(pages) => pages,
        PoolSize::MemoryFraction(fraction) => budget::pages_in(fraction, free, &need, g, config.slots)?,
    };
    let need = Budget { kv: pages * page_bytes(g), pages, ..need };
    need.check(free).map(|()| need)
}

fn lanes(device: &Rc<Device>, limits: &PassLimits, g: &Geometry, logit_rows: usize) -> Result<Vec<Lane>, DeviceError> {
    let (step, logits) = (PassMemory::step_bytes(limits, g), logit_rows * g.vocab);
    (0..STEPS_IN_FLIGHT)
        .map(|_| {
            Ok(Lane {
                upload: PinnedBuffer::new(device, "the step", step)?,
                selected: PinnedBuffer::new(device, "selected tokens", limits.tokens)?,
                logits: PinnedBuffer::new(device, "logits", logits)?,
                begun: Event::new()?,
                done: Event::new()?,
            })
        })
        .collect()
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
        let (free, _) = device.memory().map_err(unavailable)?;
        let need =
            plan_memory(budget::weight_bytes(profile, &weights), profile, &g, config, free).map_err(unavailable)?;
        let no_room = |error: DeviceError| unavailable(format!("{error}; {}", need.explain(free)));
        let model = DeviceModel::upload(&device, profile, &weights).map_err(no_room)?;
        let pages = need.pages;
        let limits = PassLimits { slots: config.slots, tokens: need.tokens, pages };
        let host_logit_rows = config.host_logit_rows.max(config.slots);
        let lanes = lanes(&device, &limits, &g, host_logit_rows).map_err(unavailable)?;
        let selected = std::array::from_fn(|i| lanes[i].selected.address());
        let memory = PassMemory::new(&device, profile, &g, &limits, selected).map_err(no_room)?;
        let facts = Facts {
            device: device.name.clone(),
            pages,
            page_tokens: 16,
            slots: config.slots,
            max_step_tokens: limits.tokens,
            host_logit_rows,
            context: g.context,
            vocab: g.vocab,
            weight_bytes: model.bytes,
            kv_bytes: (pages * page_bytes(&g)) as u64,
        };
        let pass = Pass::new(kernels, model, memory, g, profile);
        let (graphs, host) = (GraphCache::new(config.graphs), HostRows::start().map_err(unavailable)?);
        let (in_flight, adjusted) = (VecDeque::with_capacity(STEPS_IN_FLIGHT), AdjustedSlots::new(config.slots));
        let mut backend = Self {
            facts,
            in_flight,
            submitted: 0,
            adjusted,
            last_shape: None,
            host,
            refuse_captures: false,
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
        let (pass, device, refuse) = (&self.pass, &self.device, self.refuse_captures);
        let record = || -> Result<(), LaunchError> {
            pass.run(shape, |_| {})?;
            // Waiting is not allowed while a stream is recorded: the driver itself makes this recording invalid.
            if refuse { Ok(device.synchronise()?) } else { Ok(()) }
        };
        match device.capture(record) {
            Ok(graph) => self.graphs.keep(shape, graph, began.elapsed().as_micros() as u64),
            Err(error) => {
                tracing::warn!(%error, ?shape, "this shape cannot be recorded and runs kernel by kernel");
                self.graphs.remember_failure(shape, began.elapsed().as_micros() as u64);
            }
        }
        Ok(())
    }

    /// For checks: makes the driver refuse every recording from now on.
    pub fn refuse_captures(&mut self) {
        self.refuse_captures = true;
    }

    /// For checks: `PassMemory::poison` of the next step, whose lane no step in flight may hold.
    ///
    /// # Errors
    /// The driver's.
    pub fn poison(&mut self, bindings: &[SlotBinding]) -> Result<(), BackendError> {
        debug_assert!(self.in_flight.len() < STEPS_IN_FLIGHT, "a step in flight holds the lane");
        let lane = &mut self.lanes[self.submitted % STEPS_IN_FLIGHT];
        lane.selected.slice_mut().fill(SelectOut { token: u32::MAX, finite: u32::MAX });
        self.pass.memory.poison(&self.pass.geometry, bindings).map_err(failed)
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
            Decision::Replay => {
                return self.graphs.get(shape).map_or(Ok(()), |graph| graph.replay().map_err(LaunchError::from));
            }
        }
        match self.graphs.recorded(shape) {
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
            lane_index,
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
        let download_bytes = self.download(lane_index, &plan.shape, &plan.expected)?;
        self.lanes[lane_index].done.record(&self.device)?;
        self.submitted += 1;
        self.last_shape = Some(plan.shape);
        let timing = StepTiming {
            upload_bytes: plan.bytes as u64,
            download_bytes,
            counts: self.counts(),
            launch_us: began.elapsed().as_secs_f64() * 1e6,
            ..StepTiming::default()
        };
        let (step, whereabouts) = (step.step().id, Whereabouts::Device);
        Ok(InFlight { step, lane: lane_index, expected: plan.expected, timing, whereabouts })
    }

    /// Queues the copies of the logits that the host asked for and returns the bytes that travel, selected tokens included: these the
    /// selection itself writes to the lane. The validator has bounded the rows that ask by what the page-locked buffer holds.
    fn download(&mut self, lane: usize, shape: &PassShape, expected: &[Expected]) -> Result<u64, LaunchError> {
        let (lane, memory, vocab) = (&mut self.lanes[lane], &self.pass.memory, self.facts.vocab);
        let mut used = 0;
        for row in expected.iter().filter(|r| r.needs_logits()) {
            lane.logits.download(used * vocab, memory.logits.at(row.first * vocab), row.count * vocab)?;
            used += row.count;
        }
        Ok((shape.wanted * size_of::<SelectOut>() + used * vocab * size_of::<f32>()) as u64)
    }

    /// The outputs of the oldest step, when they are there. A step whose logits the host must read goes to the thread that does it.
    fn oldest_outputs(&mut self) -> Result<Option<Vec<RowOutput>>, BackendError> {
        let Some(oldest) = self.in_flight.front_mut() else { return Ok(None) };
        if oldest.whereabouts == Whereabouts::Host {
            return self.host.take();
        }
        let lane = &self.lanes[oldest.lane];
        if !lane.done.passed().map_err(failed)? {
            return Ok(None);
        }
        oldest.timing.device_us = lane.done.since_us(&lane.begun).map_err(failed)?;
        if !oldest.expected.iter().any(Expected::needs_logits) {
            return Ok(Some(token_rows(&oldest.expected, lane.selected.slice())));
        }
        let expected = std::mem::take(&mut oldest.expected);
        let wanted = expected.iter().map(|row| row.count).sum();
        let selected = lane.selected.slice()[..wanted].to_vec();
        self.host.begin(Job { expected, selected, logits: lane.logits.reader(), vocab: self.facts.vocab })?;
        oldest.whereabouts = Whereabouts::Host;
        Ok(None)
    }
}

impl Backend for CudaBackend {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn counts(&self) -> DeviceCounts {
        DeviceCounts { graphs: self.graphs.counts(), allocations: memory::allocations() }
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
        let Some(rows) = self.oldest_outputs()? else { return Ok(None) };
        Ok(self.in_flight.pop_front().map(|done| StepOutput { step: done.step, rows, timing: done.timing }))
    }
}
