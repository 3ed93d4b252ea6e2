//! One forward pass as a sequence of launches. A pass depends on its shape alone: slots, pages, positions, tokens and sampling are data
//! in the uploaded step, so that the same launches, recorded into a graph, serve every step of that shape.

use std::rc::Rc;

use crate::arith::attention::score_scale;
use crate::backend::{STEPS_IN_FLIGHT, SlotBinding};
use crate::model::{Geometry, Profile, RopePairing};

use super::adjust::{self, AdjustMemory};
use super::args::{
    AttendArgs, EmbedArgs, Epilogue, LinearArgs, NormArgs, NormedArgs, RopeArgs, Rows, SelectBuffers, SelectRow,
    StepRow,
};
use super::attention::Fusion;
use super::driver::{Device, DeviceError};
use super::kernels::{Kernels, LaunchError};
use super::memory::DeviceBuffer;
use super::weights::{DeviceLayer, DeviceMatrix, DeviceModel, Projections};

/// Everything that decides which kernels run at which grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PassShape {
    /// Rows of the step.
    pub rows: usize,
    /// Token rows.
    pub tokens: usize,
    /// Positions that select a token.
    pub wanted: usize,
    /// Rows of one token.
    pub singles: usize,
    /// Tiles of the longer rows.
    pub tiles: usize,
    /// Scores that a tile holds: 0 without tiles, else the history rounded up to 256, at most a segment.
    pub capacity: usize,
}

impl PassShape {
    /// Whether every row is one token: rotation, KV store and attention are one kernel then.
    pub const fn is_decode(&self) -> bool {
        self.tiles == 0
    }

    /// Byte offsets of the step's parts in the upload.
    pub fn layout(&self) -> Layout {
        let aligned = |bytes: usize| bytes.next_multiple_of(16);
        let sampling = aligned(self.rows * size_of::<StepRow>());
        let gather = sampling + aligned(self.wanted * size_of::<SelectRow>());
        let singles = gather + aligned(self.wanted * 4);
        let tiles = singles + aligned(self.singles * 4);
        let tokens = tiles + aligned(self.tiles * 8);
        Layout { sampling, gather, singles, tiles, tokens, end: tokens + aligned(self.tokens * 4) }
    }
}

/// Byte offsets in the upload; the rows come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// `SelectRow` a wanted position.
    pub sampling: usize,
    /// Token row of each wanted position.
    pub gather: usize,
    /// Token row of each single.
    pub singles: usize,
    /// (first token row, rows) of each tile.
    pub tiles: usize,
    /// Tokens from the host.
    pub tokens: usize,
    /// Bytes in all; bindings follow.
    pub end: usize,
}

/// Sizes that memory is allocated for.
#[derive(Clone, Copy, Debug)]
pub struct PassLimits {
    /// Slots.
    pub slots: usize,
    /// Token rows of a step.
    pub tokens: usize,
    /// Pages of the pool.
    pub pages: usize,
}

/// Memory of the pass: slot state, KV pool, activations.
#[derive(Debug)]
pub struct PassMemory {
    /// The step as uploaded.
    pub step: DeviceBuffer<u8>,
    /// Page tables `[slots][pages a context]`.
    pub tables: DeviceBuffer<u32>,
    /// Entries of one table.
    pub table_stride: usize,
    /// Next position of each slot.
    pub position: DeviceBuffer<u32>,
    /// Last selected token of each slot.
    pub last_token: DeviceBuffer<u32>,
    /// Penalties, biases and counts of each slot.
    pub adjust: AdjustMemory,
    /// K `[pages][layers][16][kv_dim]`.
    pub k_pool: DeviceBuffer<f32>,
    /// V, alike.
    pub v_pool: DeviceBuffer<f32>,
    /// `[wanted][vocab]`.
    pub logits: DeviceBuffer<f32>,
    /// Where selected tokens go, `SelectOut` `[wanted]` each: page-locked memory for each step in flight. Its owner keeps it until the
    /// stream has done the last pass.
    pub lanes: [u64; STEPS_IN_FLIGHT],
    tok_slot: DeviceBuffer<u32>,
    tok_pos: DeviceBuffer<u32>,
    tok_id: DeviceBuffer<u32>,
    x: DeviceBuffer<f32>,
    qkv: DeviceBuffer<f32>,
    attended: DeviceBuffer<f32>,
    act: DeviceBuffer<f32>,
    up: DeviceBuffer<f32>,
    normed: DeviceBuffer<f32>,
    quantised: DeviceBuffer<u8>,
    scales: DeviceBuffer<f32>,
    sums: DeviceBuffer<f32>,
    given: QuantisedRows,
    partial: DeviceBuffer<f32>,
    counters: DeviceBuffer<u32>,
}

/// Rows that attention, or gate and up, of a decode step give quantised.
#[derive(Debug)]
struct QuantisedRows {
    q: DeviceBuffer<u8>,
    scales: DeviceBuffer<f32>,
    sums: DeviceBuffer<f32>,
}

impl QuantisedRows {
    fn new(device: &Rc<Device>, rows: usize, width: usize) -> Result<Self, DeviceError> {
        let scales = || DeviceBuffer::zeroed(device, "quantised rows", rows * width.div_ceil(32));
        let q = DeviceBuffer::zeroed(device, "quantised rows", rows * width)?;
        Ok(Self { q, scales: scales()?, sums: scales()? })
    }

    fn addresses(&self) -> [u64; 3] {
        [self.q.address(), self.scales.address(), self.sums.address()]
    }
}

/// Bytes of K and V that one page holds.
pub fn page_bytes(g: &Geometry) -> usize {
    2 * g.layers * 16 * g.kv_dim() * size_of::<f32>()
}

impl PassMemory {
    /// Upload bytes of the largest step: one row a slot, every token wanted, every table rebound.
    pub(super) fn step_bytes(limits: &PassLimits, g: &Geometry) -> usize {
        let table = g.context.div_ceil(16);
        let shape = PassShape {
            rows: limits.slots,
            tokens: limits.tokens,
            wanted: limits.tokens,
            singles: limits.slots,
            tiles: limits.tokens,
            capacity: 0,
        };
        shape.layout().end + 4 * (1 + limits.slots * (3 + table) + adjust::words_max(limits.slots))
    }

    /// Allocates everything that a step may need, beside `lanes`.
    ///
    /// # Errors
    /// Out of memory, naming what was wanted.
    pub fn new(
        device: &Rc<Device>,
        profile: Profile,
        g: &Geometry,
        limits: &PassLimits,
        lanes: [u64; STEPS_IN_FLIGHT],
    ) -> Result<Self, DeviceError> {
        let (t, table) = (limits.tokens, g.context.div_ceil(16));
        let widest = g.hidden.max(g.q_dim()).max(g.ffn);
        let segments = g.context.div_ceil(profile.attention_segment());
        let pool = limits.pages * page_bytes(g) / 2 / size_of::<f32>();
        let f32s = |what: &str, len: usize| DeviceBuffer::<f32>::zeroed(device, what, len);
        let u32s = |what: &str, len: usize| DeviceBuffer::<u32>::zeroed(device, what, len);
        Ok(Self {
            step: DeviceBuffer::zeroed(device, "the step", Self::step_bytes(limits, g))?,
            tables: u32s("page tables", limits.slots * table)?,
            table_stride: table,
            position: u32s("slot positions", limits.slots)?,
            last_token: u32s("slot tokens", limits.slots)?,
            adjust: AdjustMemory::new(device, limits.slots, g.vocab)?,
            k_pool: f32s("the key pool", pool)?,
            v_pool: f32s("the value pool", pool)?,
            logits: f32s("logits", t * g.vocab)?,
            lanes,
            tok_slot: u32s("token rows", t)?,
            tok_pos: u32s("token rows", t)?,
            tok_id: u32s("token rows", t)?,
            x: f32s("the residual stream", t * g.hidden)?,
            qkv: f32s("q, k and v", t * (g.q_dim() + 2 * g.kv_dim()))?,
            attended: f32s("attention output", t * g.q_dim())?,
            act: f32s("the feed-forward layer", t * g.ffn)?,
            up: f32s("the feed-forward layer", t * g.ffn)?,
            normed: f32s("normalised rows", t * widest)?,
            quantised: DeviceBuffer::zeroed(device, "quantised rows", t * widest)?,
            scales: f32s("quantised rows", t * widest / 32)?,
            sums: f32s("quantised rows", t * widest / 32)?,
            given: QuantisedRows::new(device, limits.slots, g.q_dim().max(g.ffn))?,
            partial: f32s("attention segments", limits.slots * g.heads * segments * (g.head_dim + 2))?,
            counters: u32s("attention counters", limits.slots * g.heads)?,
        })
    }
}

impl PassMemory {
    /// For checks: fills, in stream order, what a step with these bindings must not read: the uploaded step, token rows, activations,
    /// logits, and the tables and pages of the slots that change hands.
    ///
    /// # Errors
    /// The driver's.
    pub fn poison(&self, g: &Geometry, bindings: &[SlotBinding]) -> Result<(), DeviceError> {
        const BYTE: u8 = 0xff;
        self.step.fill_bytes(BYTE)?;
        self.quantised.fill_bytes(BYTE)?;
        self.given.q.fill_bytes(BYTE)?;
        for words in [&self.tok_slot, &self.tok_pos, &self.tok_id] {
            words.fill_bytes(BYTE)?;
        }
        let activations = [&self.x, &self.qkv, &self.attended, &self.act, &self.up, &self.normed];
        let [scales, sums] = [&self.given.scales, &self.given.sums];
        let scratch = [&self.scales, &self.sums, scales, sums, &self.partial, &self.logits];
        for floats in activations.into_iter().chain(scratch) {
            floats.fill_bytes(BYTE)?;
        }
        let page = page_bytes(g) / 2 / size_of::<f32>();
        for binding in bindings {
            let slot = binding.slot as usize;
            self.tables.fill_range(BYTE, slot * self.table_stride, self.table_stride)?;
            self.last_token.fill_range(BYTE, slot, 1)?;
            for &at in &binding.pages {
                self.k_pool.fill_range(BYTE, at as usize * page, page)?;
                self.v_pool.fill_range(BYTE, at as usize * page, page)?;
            }
        }
        Ok(())
    }
}

/// Names of the stages that `Pass::run` reports, in order of appearance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// Rows to token rows, embedding.
    Embed,
    /// Q, K, V with their RMSNorm.
    Qkv,
    /// Rotation and KV store, where they are kernels of their own.
    Rope,
    /// Attention.
    Attention,
    /// Output projection and residual.
    Output,
    /// Gate and up with their RMSNorm, SwiGLU.
    GateUp,
    /// Down projection and residual.
    Down,
    /// Final norm and vocabulary projection.
    Head,
    /// Selection.
    Select,
}

/// A model ready to run passes.
#[derive(Debug)]
pub struct Pass {
    /// The kernels.
    pub kernels: Kernels,
    /// The weights.
    pub model: DeviceModel,
    /// The memory.
    pub memory: PassMemory,
    /// The model's shape.
    pub geometry: Geometry,
    segment: usize,
    scale: f32,
}

/// What a linear layer reads.
#[derive(Clone, Copy)]
enum Source {
    /// Rows, RMSNorm with these weights first unless they are 0.
    Plain { rows: Rows, norm: u64 },
    /// So many rows of q, scales and sums, for a matrix of blocks.
    Quantised { rows: usize, parts: [u64; 3] },
}

/// Where a linear layer writes.
#[derive(Clone, Copy)]
struct Target {
    out: u64,
    stride: usize,
    epilogue: Epilogue,
    /// Where SwiGLU's result goes quantised instead; zeros: nowhere.
    quantised: [u64; 3],
}

impl Target {
    const fn new(out: u64, stride: usize, epilogue: Epilogue) -> Self {
        Self { out, stride, epilogue, quantised: [0; 3] }
    }
}

impl Pass {
    /// Puts a pass together.
    pub fn new(kernels: Kernels, model: DeviceModel, memory: PassMemory, geometry: Geometry, profile: Profile) -> Self {
        let scale = score_scale(geometry.head_dim);
        Self { kernels, model, memory, geometry, segment: profile.attention_segment(), scale }
    }

    /// Query rows of a tile for a score capacity.
    pub fn tile_rows(&self, capacity: usize) -> usize {
        Kernels::prefill_rows(self.geometry.group(), capacity)
    }

    /// Score capacity of a step whose longest visible history is `history`.
    pub fn capacity(&self, history: usize) -> usize {
        history.next_multiple_of(256).min(self.segment)
    }

    /// Launches one pass; `mark` is called before each stage's launches.
    ///
    /// # Errors
    /// A launcher's.
    pub fn run(&self, shape: &PassShape, mut mark: impl FnMut(Stage)) -> Result<(), LaunchError> {
        let (g, m, layout) = (&self.geometry, &self.memory, shape.layout());
        let step = m.step.address();
        mark(Stage::Embed);
        self.embed(shape)?;
        for (index, layer) in self.model.layers.iter().enumerate() {
            self.attention_block(shape, index, layer, &mut mark)?;
            self.feed_forward(shape, layer, &mut mark)?;
        }
        if shape.wanted > 0 {
            mark(Stage::Head);
            let every = shape.is_decode() && shape.wanted == shape.tokens;
            let gather = if every { 0 } else { step + layout.gather as u64 };
            let source = Source::Plain {
                rows: Rows { x: m.x.address(), gather, rows: shape.wanted, width: g.hidden },
                norm: self.model.final_norm.address(),
            };
            let head = self.model.head.as_ref().unwrap_or(&self.model.embedding);
            self.linear(source, head, Target::new(m.logits.address(), g.vocab, Epilogue::Store))?;
            mark(Stage::Select);
            let sampling = step + layout.sampling as u64;
            let (logits, last_token) = (m.logits.address(), m.last_token.address());
            let buffers = SelectBuffers { logits, sampling, lanes: m.lanes, last_token, adjust: m.adjust.args() };
            self.kernels.select(shape.wanted, g.vocab, buffers)?;
        }
        Ok(())
    }

    /// Rows to token rows and their embeddings; where every row is one token, in one kernel.
    fn embed(&self, shape: &PassShape) -> Result<(), LaunchError> {
        let (m, table) = (&self.memory, &self.model.embedding);
        let (rows, tokens) = (m.step.address(), m.step.at(shape.layout().tokens));
        let (position, last_token) = (m.position.address(), m.last_token.address());
        let [tok_slot, tok_pos, tok_id] = [&m.tok_slot, &m.tok_pos, &m.tok_id].map(DeviceBuffer::address);
        if !shape.is_decode() {
            let (slots, token_rows) = ([position, last_token], [tok_slot, tok_pos, tok_id]);
            self.kernels.prepare(shape.rows, rows, tokens, slots, token_rows)?;
        }
        let [w, scale, minimum] = table.parts();
        let args = EmbedArgs {
            tok_id,
            rows: if shape.is_decode() { rows } else { 0 },
            tokens,
            position,
            last_token,
            tok_slot,
            tok_pos,
            w,
            scale,
            minimum,
            x: m.x.address(),
            n: self.geometry.hidden as i32,
        };
        self.kernels.embed(table.kind, shape.tokens, args)
    }

    fn attention_block(
        &self,
        shape: &PassShape,
        index: usize,
        layer: &DeviceLayer,
        mark: &mut impl FnMut(Stage),
    ) -> Result<(), LaunchError> {
        let (g, m) = (&self.geometry, &self.memory);
        let width = g.q_dim() + 2 * g.kv_dim();
        mark(Stage::Qkv);
        let source = Source::Plain { rows: self.all_rows(shape), norm: layer.attn_norm.address() };
        match &layer.qkv {
            Projections::Fused(matrix) => {
                self.linear(source, matrix, Target::new(m.qkv.address(), width, Epilogue::Store))?;
            }
            Projections::Split(parts) => {
                let mut at = 0;
                for matrix in parts {
                    let target = Target::new(m.qkv.at(at), width, Epilogue::Store);
                    self.linear(source, matrix, target)?;
                    at += matrix.n;
                }
            }
        }
        let layer_index = index as i32;
        if !shape.is_decode() {
            mark(Stage::Rope);
            self.kernels.rope_kv(shape.tokens, self.rope_args(layer_index))?;
        }
        mark(Stage::Attention);
        let ready = shape.is_decode() && layer.wo.kind.is_block();
        let given = if ready { m.given.addresses() } else { [0; 3] };
        self.attend(shape, layer_index, given)?;
        mark(Stage::Output);
        let source = if ready {
            Source::Quantised { rows: shape.tokens, parts: given }
        } else {
            let rows = Rows { x: m.attended.address(), gather: 0, rows: shape.tokens, width: g.q_dim() };
            Source::Plain { rows, norm: 0 }
        };
        self.linear(source, &layer.wo, Target::new(m.x.address(), g.hidden, Epilogue::Add))
    }

    fn rope_args(&self, layer: i32) -> RopeArgs {
        let (g, m) = (&self.geometry, &self.memory);
        RopeArgs {
            qkv: m.qkv.address(),
            angles: self.model.angles.address(),
            tok_slot: m.tok_slot.address(),
            tok_pos: m.tok_pos.address(),
            tables: m.tables.address(),
            k_pool: m.k_pool.address(),
            v_pool: m.v_pool.address(),
            heads: g.heads as i32,
            kv_heads: g.kv_heads as i32,
            head_dim: g.head_dim as i32,
            layers: g.layers as i32,
            layer,
            table_stride: m.table_stride as i32,
            adjacent: i32::from(g.rope_pairing == RopePairing::Adjacent),
        }
    }

    /// `given` takes the result quantised unless it is zeros; then every row must be a single.
    fn attend(&self, shape: &PassShape, layer: i32, given: [u64; 3]) -> Result<(), LaunchError> {
        let (g, m, layout) = (&self.geometry, &self.memory, shape.layout());
        let segments = g.context.div_ceil(self.segment);
        let args = AttendArgs {
            qkv: m.qkv.address(),
            out: m.attended.address(),
            oq: given[0],
            oda: given[1],
            osa: given[2],
            tok_slot: m.tok_slot.address(),
            tok_pos: m.tok_pos.address(),
            tables: m.tables.address(),
            k_pool: m.k_pool.address(),
            v_pool: m.v_pool.address(),
            angles: self.model.angles.address(),
            partial: m.partial.address(),
            counters: m.counters.address(),
            entries: 0,
            heads: g.heads as i32,
            kv_heads: g.kv_heads as i32,
            layers: g.layers as i32,
            layer,
            table_stride: m.table_stride as i32,
            segment: self.segment as i32,
            max_segments: segments as i32,
            adjacent: i32::from(g.rope_pairing == RopePairing::Adjacent),
            capacity: self.capacity(g.context) as i32,
            block_heads: self.kernels.block_heads(g.heads, g.kv_heads, shape.singles) as i32,
            room: self.kernels.device().multiprocessors as i32,
            scale: self.scale,
        };
        if shape.singles > 0 {
            let entries = if shape.is_decode() { 0 } else { m.step.at(layout.singles) };
            let columns = Kernels::decode_columns(g.heads, g.kv_heads, args.block_heads as usize) * shape.singles;
            let splits = (2 * args.room as usize).div_ceil(columns).clamp(1, segments);
            let fusion = if shape.is_decode() { Fusion::Fused } else { Fusion::Apart };
            self.kernels.attend_decode(fusion, shape.singles, splits, AttendArgs { entries, ..args })?;
        }
        if shape.tiles > 0 {
            let entries = m.step.at(layout.tiles);
            let capacity = shape.capacity as i32;
            self.kernels.attend_prefill(shape.tiles, AttendArgs { entries, capacity, ..args })?;
        }
        Ok(())
    }

    fn feed_forward(
        &self,
        shape: &PassShape,
        layer: &DeviceLayer,
        mark: &mut impl FnMut(Stage),
    ) -> Result<(), LaunchError> {
        let (g, m) = (&self.geometry, &self.memory);
        mark(Stage::GateUp);
        let source = Source::Plain { rows: self.all_rows(shape), norm: layer.ffn_norm.address() };
        let mut down =
            Source::Plain { rows: Rows { x: m.act.address(), gather: 0, rows: shape.tokens, width: g.ffn }, norm: 0 };
        match &layer.gate_up {
            Projections::Fused(matrix) if self.gives_quantised(shape, matrix, &layer.w_down) => {
                let parts = m.given.addresses();
                let target = Target { quantised: parts, ..Target::new(m.act.address(), g.ffn, Epilogue::Swiglu) };
                self.linear(source, matrix, target)?;
                down = Source::Quantised { rows: shape.tokens, parts };
            }
            Projections::Fused(matrix) => {
                self.linear(source, matrix, Target::new(m.act.address(), g.ffn, Epilogue::Swiglu))?;
            }
            Projections::Split(parts) => {
                for (matrix, out) in parts.iter().zip([m.act.address(), m.up.address()]) {
                    self.linear(source, matrix, Target::new(out, g.ffn, Epilogue::Store))?;
                }
                let act = m.act.address();
                self.kernels.swiglu(act, m.up.address(), act, shape.tokens * g.ffn)?;
            }
        }
        mark(Stage::Down);
        self.linear(down, &layer.w_down, Target::new(m.x.address(), g.hidden, Epilogue::Add))
    }

    /// Whether gate and up of this decode step can hand quantised rows to the down projection.
    fn gives_quantised(&self, shape: &PassShape, gate_up: &DeviceMatrix, down: &DeviceMatrix) -> bool {
        let DeviceMatrix { kind, n, k, .. } = *gate_up;
        shape.is_decode() && down.kind.is_block() && self.kernels.quantises_swiglu(kind, shape.tokens, n, k)
    }

    fn all_rows(&self, shape: &PassShape) -> Rows {
        Rows { x: self.memory.x.address(), gather: 0, rows: shape.tokens, width: self.geometry.hidden }
    }

    /// A linear layer: norm or quantisation first, then the kernel for few rows where it can take them, else tiles.
    fn linear(&self, source: Source, matrix: &DeviceMatrix, target: Target) -> Result<(), LaunchError> {
        let (m, kind, [w, scale, minimum]) = (&self.memory, matrix.kind, matrix.parts());
        let [oq, oda, osa] = target.quantised;
        let args = LinearArgs {
            w,
            scale,
            minimum,
            out: target.out,
            oq,
            oda,
            osa,
            n: matrix.n as i32,
            k: matrix.k as i32,
            x_stride: matrix.k as i32,
            out_stride: target.stride as i32,
            epilogue: target.epilogue as i32,
            ..LinearArgs::default()
        };
        let (count, args) = match source {
            Source::Quantised { rows, parts: [xq, da, sa] } => (rows, LinearArgs { xq, da, sa, ..args }),
            Source::Plain { rows, norm }
                if norm != 0 && self.kernels.normalises(kind, rows.rows, matrix.n, matrix.k) =>
            {
                let Rows { x, gather, rows, .. } = rows;
                let linear = LinearArgs { x, rows: rows as i32, ..args };
                let norm = NormArgs { weights: norm, gather, eps: self.geometry.rms_eps };
                return self.kernels.linear_rows_normed(kind, NormedArgs { linear, norm });
            }
            Source::Plain { rows, norm } if kind.is_block() => {
                let parts @ [xq, da, sa] = [m.quantised.address(), m.scales.address(), m.sums.address()];
                self.kernels.norm_q8(rows, norm, self.geometry.rms_eps, parts)?;
                (rows.rows, LinearArgs { xq, da, sa, ..args })
            }
            Source::Plain { rows, norm: 0 } => (rows.rows, LinearArgs { x: rows.x, ..args }),
            Source::Plain { rows, norm } => {
                self.kernels.norm_f32(rows, norm, self.geometry.rms_eps, m.normed.address())?;
                (rows.rows, LinearArgs { x: m.normed.address(), ..args })
            }
        };
        let args = LinearArgs { rows: count as i32, ..args };
        if self.kernels.takes_rows(kind, count, matrix.n, matrix.k) {
            self.kernels.linear_rows(kind, args)
        } else {
            self.kernels.linear_tile(kind, args)
        }
    }
}
