//! The kernels of one model, loaded, and their typed launchers. A launcher checks shapes, alignment and capacities, then launches.
//!
//! The argument structs mirror those of kernels/*.cuh field by field. Addresses come from `DeviceBuffer`s that outlive the step.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::rc::Rc;

use super::adjust::AdjustArgs;
use super::cache::{Cache, Source};
use super::driver::{Device, DeviceError, Kernel, LaunchShape, Module, Overlap};
use super::nvrtc::Compiler;
use super::program::{Kind, Program};

/// Rows that the linear kernels of decode take at most.
pub const FEW_ROWS: usize = 16;

/// What a linear kernel does with its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// out = y.
    Store = 0,
    /// out = out + y.
    Add = 1,
    /// Outputs 2i and 2i+1 are gate and up: out[i] = swiglu(gate, up).
    Swiglu = 2,
}

/// `LinearArgs` of kernels/linear.cuh.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LinearArgs {
    pub x: u64,
    pub w: u64,
    pub scale: u64,
    pub minimum: u64,
    pub out: u64,
    pub xq: u64,
    pub da: u64,
    pub sa: u64,
    pub oq: u64,
    pub oda: u64,
    pub osa: u64,
    pub rows: i32,
    pub n: i32,
    pub k: i32,
    pub x_stride: i32,
    pub out_stride: i32,
    pub epilogue: i32,
}

/// `AttendArgs` of kernels/attention.cuh.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AttendArgs {
    pub qkv: u64,
    pub out: u64,
    pub oq: u64,
    pub oda: u64,
    pub osa: u64,
    pub tok_slot: u64,
    pub tok_pos: u64,
    pub tables: u64,
    pub k_pool: u64,
    pub v_pool: u64,
    pub angles: u64,
    pub partial: u64,
    pub counters: u64,
    pub entries: u64,
    pub heads: i32,
    pub kv_heads: i32,
    pub layers: i32,
    pub layer: i32,
    pub table_stride: i32,
    pub segment: i32,
    pub max_segments: i32,
    pub adjacent: i32,
    pub capacity: i32,
    pub scale: f32,
}

/// `RopeArgs` of kernels/rows.cu.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RopeArgs {
    pub qkv: u64,
    pub angles: u64,
    pub tok_slot: u64,
    pub tok_pos: u64,
    pub tables: u64,
    pub k_pool: u64,
    pub v_pool: u64,
    pub heads: i32,
    pub kv_heads: i32,
    pub head_dim: i32,
    pub layers: i32,
    pub layer: i32,
    pub table_stride: i32,
    pub adjacent: i32,
}

/// `StepRow` of kernels/rows.cu.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct StepRow {
    pub slot: u32,
    pub len: u32,
    pub token: u32,
    pub start: u32,
    pub input: u32,
    pub reserved: [u32; 3],
}

/// `StepRow::start` of a row that starts at the slot's position, and `StepRow::input` of one that reads the slot's last token.
pub const FROM_DEVICE: u32 = u32::MAX;

/// `SelectRow` of kernels/select.cu.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct SelectRow {
    pub seed: u64,
    pub top_p: u64,
    pub token_index: u32,
    pub choice: u32,
    pub top_k: u32,
    pub inv_temperature: f32,
    pub min_p: f32,
    pub greedy: u32,
    pub slot: u32,
    pub is_last: u32,
    pub adjusted: u32,
    pub reserved: u32,
}

/// `SelectOut` of kernels/select.cu.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct SelectOut {
    pub token: u32,
    pub finite: u32,
}

/// Addresses that `select_token` reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct SelectBuffers {
    /// `[rows][vocab]`, raw; only read.
    pub logits: u64,
    /// `SelectRow` a row.
    pub sampling: u64,
    /// `SelectOut` a row.
    pub out: u64,
    /// Last token of each slot.
    pub last_token: u64,
    /// Penalties, biases and counts; only touched for rows that are adjusted.
    pub adjust: AdjustArgs,
}

/// Why a launch was refused or failed.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A shape, an alignment or a capacity is wrong.
    #[error("{kernel} cannot be launched: {reason}")]
    Shape {
        /// Which launcher.
        kernel: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// The driver refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

fn require(kernel: &'static str, holds: bool, reason: impl FnOnce() -> String) -> Result<(), LaunchError> {
    if holds { Ok(()) } else { Err(LaunchError::Shape { kernel, reason: reason() }) }
}

macro_rules! params {
    ($($value:expr),* $(,)?) => { &mut [$(std::ptr::from_ref(&$value).cast_mut().cast::<c_void>()),*] };
}

/// The kernels of one model.
#[derive(Debug)]
pub struct Kernels {
    device: Rc<Device>,
    head_dim: usize,
    rows: BTreeMap<&'static str, Kernel>,
    few: BTreeMap<(Kind, FewRows), Kernel>,
    tile: BTreeMap<(Kind, usize), Kernel>,
    decode: [Kernel; 2],
    prefill: BTreeMap<(usize, usize), Kernel>,
    select: Kernel,
    bind_adjust: Kernel,
}

const ROW_KERNELS: [&str; 9] =
    ["bind", "prepare", "embed_f32", "embed_int8", "embed_block", "norm_f32", "norm_q8", "rope_kv", "swiglu_rows"];

/// (query rows, heads) of the prefill attention tiles.
const PREFILL_TILES: [(usize, usize); 3] = [(8, 4), (4, 4), (16, 1)];

/// How blocks of the decode linear kernels take tiles of outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Tiles {
    /// One each.
    One,
    /// One after the other, without a second buffer.
    Strided,
    /// One after the other, the next one fetched ahead.
    Ahead,
}

/// One instantiation of the decode linear kernels: outputs of a tile, rows that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FewRows {
    outputs: usize,
    rows: usize,
    tiles: Tiles,
}

impl FewRows {
    fn kernel_name(self) -> String {
        match self.tiles {
            Tiles::One => format!("linear_rows_{}", self.outputs),
            Tiles::Strided => format!("linear_rows_{}_{}", self.outputs, self.rows),
            Tiles::Ahead => format!("linear_rows_{}_ahead", self.outputs),
        }
    }

    /// Dynamic shared memory, as the kernels lay it out.
    fn shared(self, kind: Kind, k: usize) -> usize {
        let Self { outputs, rows, tiles } = self;
        if kind.is_block() {
            let (stride, blocks) = (k.next_multiple_of(128) + 32, k / 32);
            let (held, sums) = (outputs * stride, 8 * rows * (outputs + 2) * 4);
            let weights = if tiles == Tiles::Ahead { 2 * held + sums } else { held.max(sums) };
            let scales = 4 * (blocks * (outputs + 2) + rows * (blocks | 1));
            rows * stride + weights + scales * if kind == Kind::BlockMin { 2 } else { 1 }
        } else {
            let size = if kind == Kind::F32 { 4 } else { 1 };
            4 * rows * (k + 4) + 4 * 8 * FEW_ROWS * (outputs + 2) + outputs * (k * size + 16)
        }
    }
}

/// Instantiations of a kind, the widest blocks first, then the fewest rows.
fn few_rows_shapes(kind: Kind) -> Vec<FewRows> {
    let block = |outputs, tiles| FewRows { outputs, rows: FEW_ROWS, tiles };
    let strided = |outputs| [4, 8, FEW_ROWS].map(|rows| FewRows { outputs, rows, tiles: Tiles::Strided });
    if kind.is_block() {
        vec![block(64, Tiles::Ahead), block(64, Tiles::One), block(8, Tiles::One)]
    } else {
        [32, 8].into_iter().flat_map(strided).collect()
    }
}

/// Blocks below which wide blocks would leave multiprocessors idle, in tenths of the multiprocessors, by kind: a block with scales
/// is bound by latency and half of the multiprocessors reach the memory's rate; f32 sums need them all.
const fn enough_tenths(kind: Kind) -> usize {
    if kind.is_block() { 4 } else { 9 }
}

impl Kernels {
    /// Compiles or reads from the cache, and loads, every kernel that a model needs.
    ///
    /// # Errors
    /// The compiler's or the driver's, in words.
    pub fn load(
        device: &Rc<Device>,
        compiler: &Compiler,
        cache: &Cache,
        kinds: &[Kind],
        head_dim: usize,
    ) -> Result<Self, String> {
        let architecture = device.architecture();
        let mut compiled = 0;
        let mut load = |program: Program| {
            let (cubin, source) = cache.cubin(compiler, program, &architecture).map_err(|e| e.to_string())?;
            compiled += usize::from(source == Source::Compiled);
            Module::load(device, &cubin).map_err(|e| e.to_string())
        };
        let text = |e: DeviceError| e.to_string();
        let rows_module = load(Program::Rows)?;
        let mut rows = BTreeMap::new();
        for name in ROW_KERNELS {
            rows.insert(name, rows_module.kernel(name).map_err(text)?);
        }
        let (mut few, mut tile) = (BTreeMap::new(), BTreeMap::new());
        for &kind in kinds {
            let module = load(Program::LinearRows(kind))?;
            for shape in few_rows_shapes(kind) {
                let kernel = module.kernel(&shape.kernel_name()).map_err(text)?;
                few.insert((kind, shape), kernel);
            }
            let module = load(Program::LinearTile(kind))?;
            if kind.is_block() {
                tile.insert((kind, 64), module.kernel("linear_tile_q8").map_err(text)?);
            } else {
                tile.insert((kind, 64), module.kernel("linear_tile_f32_4").map_err(text)?);
                tile.insert((kind, 128), module.kernel("linear_tile_f32_8").map_err(text)?);
            }
        }
        let mut attend = |fused| load(Program::AttendDecode { head_dim, fused })?.kernel("attend_decode").map_err(text);
        let decode = [attend(false)?, attend(true)?];
        let module = load(Program::AttendPrefill { head_dim })?;
        let mut prefill = BTreeMap::new();
        for (rows, heads) in PREFILL_TILES {
            prefill.insert((rows, heads), module.kernel(&format!("attend_prefill_{rows}x{heads}")).map_err(text)?);
        }
        let module = load(Program::Select)?;
        let select = module.kernel("select_token").map_err(text)?;
        let bind_adjust = module.kernel("bind_adjust").map_err(text)?;
        tracing::debug!(compiled, architecture, "kernels loaded");
        Ok(Self { device: Rc::clone(device), head_dim, rows, few, tile, decode, prefill, select, bind_adjust })
    }

    /// Launches of every loaded kernel since it was loaded, by its name and what it is loaded for.
    pub fn launches(&self) -> Vec<(String, u64)> {
        let d = self.head_dim;
        let rows = self.rows.iter().map(|(name, k)| ((*name).to_string(), k));
        let few = self.few.iter().map(|((kind, shape), k)| (format!("{} {kind:?}", shape.kernel_name()), k));
        let tile = self.tile.iter().map(|((kind, height), k)| (format!("linear_tile of {height} {kind:?}"), k));
        let decode = ["attend_decode", "attend_decode fused"].into_iter().zip(&self.decode);
        let decode = decode.map(|(name, k)| (format!("{name} D={d}"), k));
        let prefill = self.prefill.iter().map(|((r, h), k)| (format!("attend_prefill_{r}x{h} D={d}"), k));
        let select = std::iter::once(("select_token".to_string(), &self.select));
        let all = rows.chain(few).chain(tile).chain(decode).chain(prefill).chain(select);
        all.map(|(name, k)| (name, k.launches.get())).collect()
    }

    /// The device that they are loaded on.
    pub fn device(&self) -> &Rc<Device> {
        &self.device
    }

    /// `norm_*` and `rope_kv` wait for their predecessor themselves, so that they may start early.
    fn row_kernel(
        &self,
        name: &'static str,
        grid: u32,
        threads: u32,
        params: &mut [*mut c_void],
    ) -> Result<(), LaunchError> {
        let Some(kernel) = self.rows.get(name).filter(|_| grid > 0) else {
            return Err(LaunchError::Shape { kernel: name, reason: "there is nothing to do".into() });
        };
        let waits = matches!(name, "norm_f32" | "norm_q8" | "rope_kv");
        let overlap = if waits { Overlap::Early } else { Overlap::No };
        let shape = LaunchShape { grid: (grid, 1, 1), threads, shared: 0 };
        // SAFETY: the callers below pass arguments of the kernel's types; buffers are sized by the pass for its largest step.
        Ok(unsafe { self.device.launch(kernel, shape, overlap, params) }?)
    }

    /// Writes `bindings` page tables: `words` holds their count, (slot, pages, offset) each, then the pages.
    ///
    /// # Errors
    /// The driver's.
    pub fn bind(
        &self,
        bindings: usize,
        words: u64,
        tables: u64,
        position: u64,
        table_stride: usize,
    ) -> Result<(), LaunchError> {
        let stride = table_stride as u32;
        self.row_kernel("bind", bindings as u32, 128, params![words, tables, position, stride])
    }

    /// Resolves the rows of a step into token rows.
    ///
    /// # Errors
    /// The driver's.
    pub fn prepare(
        &self,
        rows: usize,
        descriptors: u64,
        tokens: u64,
        slots: [u64; 2],
        token_rows: [u64; 3],
    ) -> Result<(), LaunchError> {
        let ([position, last], [slot, pos, id]) = (slots, token_rows);
        self.row_kernel("prepare", rows as u32, 128, params![descriptors, tokens, position, last, slot, pos, id])
    }

    /// x[t] = embedding row of token row t; `parts` are weights, scales and minima as the kind has them.
    ///
    /// # Errors
    /// The driver's.
    pub fn embed(
        &self,
        kind: Kind,
        rows: usize,
        tok_id: u64,
        parts: [u64; 3],
        x: u64,
        width: usize,
    ) -> Result<(), LaunchError> {
        let ([w, scale, minimum], n) = (parts, width as i32);
        match kind {
            Kind::F32 => self.row_kernel("embed_f32", rows as u32, 256, params![tok_id, w, x, n]),
            Kind::Int8 => self.row_kernel("embed_int8", rows as u32, 256, params![tok_id, w, scale, x, n]),
            Kind::Block | Kind::BlockMin => {
                self.row_kernel("embed_block", rows as u32, 256, params![tok_id, w, scale, minimum, x, n])
            }
        }
    }

    /// out[r] = RMSNorm(x[gather[r]]) * w.
    ///
    /// # Errors
    /// A width that is no multiple of 32, or the driver's.
    pub fn norm_f32(&self, source: Rows, w: u64, eps: f32, out: u64) -> Result<(), LaunchError> {
        require("norm_f32", source.width.is_multiple_of(32), || format!("width {}", source.width))?;
        let n = source.width as i32;
        self.row_kernel("norm_f32", source.rows as u32, 256, params![source.x, source.gather, w, out, n, eps])
    }

    /// Normalises (unless `w` is 0) and quantises rows; `out` is q, da, sa.
    ///
    /// # Errors
    /// A width that is no multiple of 32, or the driver's.
    pub fn norm_q8(&self, source: Rows, w: u64, eps: f32, out: [u64; 3]) -> Result<(), LaunchError> {
        require("norm_q8", source.width.is_multiple_of(32), || format!("width {}", source.width))?;
        let ([q, da, sa], n) = (out, source.width as i32);
        self.row_kernel("norm_q8", source.rows as u32, 256, params![source.x, source.gather, w, q, da, sa, n, eps])
    }

    /// Rotates q, stores rotated k and v.
    ///
    /// # Errors
    /// The driver's.
    pub fn rope_kv(&self, rows: usize, args: RopeArgs) -> Result<(), LaunchError> {
        require("rope_kv", args.head_dim as usize == self.head_dim, || format!("head_dim {}", args.head_dim))?;
        self.row_kernel("rope_kv", rows as u32, 256, params![args])
    }

    /// out = swiglu(gate, up), `n` values.
    ///
    /// # Errors
    /// The driver's.
    pub fn swiglu(&self, gate: u64, up: u64, out: u64, n: usize) -> Result<(), LaunchError> {
        let count = n as u64;
        self.row_kernel("swiglu_rows", n.div_ceil(256) as u32, 256, params![gate, up, out, count])
    }

    /// The instantiation for `rows` rows of `k` inputs and `n` outputs, if one can take them.
    fn few_rows(&self, kind: Kind, rows: usize, n: usize, k: usize) -> Option<FewRows> {
        let fits = |shape: &FewRows| {
            let kernel = self.few.get(&(kind, *shape));
            rows <= shape.rows && kernel.is_some_and(|kernel| shape.shared(kind, k) <= kernel.shared as usize)
        };
        let sms = self.device.multiprocessors as usize;
        let filled = |shape: &FewRows| match shape.tiles {
            Tiles::Ahead => n / shape.outputs >= 2 * sms && k <= 1024,
            _ => shape.outputs == 8 || 10 * (n / shape.outputs) >= enough_tenths(kind) * sms,
        };
        few_rows_shapes(kind).into_iter().find(|shape| fits(shape) && filled(shape))
    }

    /// Whether `linear_rows` takes so many rows of `k` inputs.
    pub fn takes_rows(&self, kind: Kind, rows: usize, n: usize, k: usize) -> bool {
        self.few_rows(kind, rows, n, k).is_some()
    }

    /// Whether `linear_rows` can quantise what SwiGLU gives.
    pub fn quantises_swiglu(&self, kind: Kind, rows: usize, n: usize, k: usize) -> bool {
        let wide = self.few_rows(kind, rows, n, k).is_some_and(|shape| shape.outputs == 64);
        kind.is_block() && wide && n.is_multiple_of(64)
    }

    fn check_linear(kernel: &'static str, args: &LinearArgs) -> Result<(), LaunchError> {
        require(kernel, args.rows > 0 && args.n > 0, || format!("{} rows, {} outputs", args.rows, args.n))?;
        require(kernel, args.k > 0 && args.k % 32 == 0, || format!("{} inputs are no multiple of 32", args.k))?;
        require(kernel, args.w.is_multiple_of(16) && args.x.is_multiple_of(16), || {
            "an address is not aligned to 16".into()
        })?;
        require(kernel, args.x_stride % 4 == 0, || format!("row stride {}", args.x_stride))?;
        let paired = args.epilogue != Epilogue::Swiglu as i32 || args.n % 2 == 0;
        require(kernel, paired, || format!("{} outputs are no pairs of gate and up", args.n))
    }

    fn check_quantised(kernel: &'static str, kind: Kind, args: &LinearArgs) -> Result<(), LaunchError> {
        let ready = args.xq.is_multiple_of(16) && args.xq != 0 && args.da != 0 && args.sa != 0;
        require(kernel, !kind.is_block() || ready, || "xq, da or sa is missing".into())
    }

    /// The linear layer for at most `FEW_ROWS` rows; block kinds read `xq`, `da` and `sa`, the others `x`.
    ///
    /// # Errors
    /// More rows or inputs than `takes_rows` allows, a quantised result where `quantises_swiglu` denies it, misaligned addresses, or
    /// the driver's.
    pub fn linear_rows(&self, kind: Kind, args: LinearArgs) -> Result<(), LaunchError> {
        const NAME: &str = "linear_rows";
        Self::check_linear(NAME, &args)?;
        Self::check_quantised(NAME, kind, &args)?;
        let (rows, n, k) = (args.rows as usize, args.n as usize, args.k as usize);
        let chosen = self.few_rows(kind, rows, n, k);
        let Some((shape, kernel)) = chosen.and_then(|s| Some((s, self.few.get(&(kind, s))?))) else {
            return Err(LaunchError::Shape { kernel: NAME, reason: format!("{rows} rows of {k} inputs are too many") });
        };
        let gated = args.epilogue == Epilogue::Swiglu as i32 && self.quantises_swiglu(kind, rows, n, k);
        require(NAME, args.oq == 0 || gated, || "only gate and up in blocks of 64 can be quantised".into())?;
        let (tiles, shared) = (n.div_ceil(shape.outputs), shape.shared(kind, k));
        let sms = self.device.multiprocessors as usize;
        let most = match shape.tiles {
            Tiles::One => tiles,
            Tiles::Strided => sms * (self.device.shared_bytes as usize / (shared + 1024)).clamp(1, 2),
            Tiles::Ahead => sms,
        };
        let shape = LaunchShape { grid: (tiles.min(most) as u32, 1, 1), threads: 256, shared: shared as u32 };
        // SAFETY: one argument of the kernel's type; shapes are checked above.
        Ok(unsafe { self.device.launch(kernel, shape, Overlap::Early, params![args]) }?)
    }

    /// The linear layer for many rows; block kinds read `xq`, `da` and `sa`.
    ///
    /// # Errors
    /// Misaligned or odd shapes, or the driver's.
    pub fn linear_tile(&self, kind: Kind, args: LinearArgs) -> Result<(), LaunchError> {
        const NAME: &str = "linear_tile";
        Self::check_linear(NAME, &args)?;
        Self::check_quantised(NAME, kind, &args)?;
        require(NAME, args.oq == 0, || "it does not quantise its result".into())?;
        let (rows, n) = (args.rows as usize, args.n as usize);
        let columns = n.div_ceil(64);
        let wide = !kind.is_block() && rows.div_ceil(128) * columns >= self.device.multiprocessors as usize;
        let height = if wide { 128 } else { 64 };
        let threads = if kind.is_block() { 128 } else { 256 };
        let Some(kernel) = self.tile.get(&(kind, height)) else {
            return Err(LaunchError::Shape { kernel: NAME, reason: format!("{kind:?} was not loaded") });
        };
        let shape = LaunchShape { grid: (columns as u32, rows.div_ceil(height) as u32, 1), threads, shared: 0 };
        // SAFETY: one argument of the kernel's type; shapes are checked above.
        Ok(unsafe { self.device.launch(kernel, shape, Overlap::Early, params![args]) }?)
    }

    fn check_attend(&self, kernel: &'static str, args: &AttendArgs) -> Result<(), LaunchError> {
        let AttendArgs { heads, kv_heads, segment, capacity, .. } = *args;
        let grouped = heads > 0 && kv_heads > 0 && heads % kv_heads == 0;
        require(kernel, grouped, || format!("{heads} heads over {kv_heads} KV heads"))?;
        let fits = segment > 0
            && segment % 256 == 0
            && segment <= 1024
            && capacity > 0
            && capacity <= segment
            && capacity % 64 == 0;
        require(kernel, fits, || format!("segment {segment}, capacity {capacity}"))
    }

    /// Query heads that one block of the decode kernel takes.
    fn decode_heads(&self) -> usize {
        if self.head_dim <= 64 { 4 } else { 2 }
    }

    /// Stages of keys and of values that a block of the decode kernel holds: DEPTH of attention_decode.cu.
    fn decode_depth(&self) -> usize {
        let few = if self.head_dim <= 64 { 2 } else { 1 };
        if self.device.shared_bytes < 160 << 10 { few } else { 2 * few }
    }

    /// Blocks in x of the decode kernel: counters an entry.
    pub fn decode_columns(&self, heads: usize, kv_heads: usize) -> usize {
        kv_heads * (heads / kv_heads).div_ceil(self.decode_heads())
    }

    /// Attention of `entries` single positions, a history spread over `splits` blocks.
    ///
    /// # Errors
    /// Shapes that do not fit each other, or the driver's.
    pub fn attend_decode(
        &self,
        fused: bool,
        entries: usize,
        splits: usize,
        args: AttendArgs,
    ) -> Result<(), LaunchError> {
        const NAME: &str = "attend_decode";
        self.check_attend(NAME, &args)?;
        require(NAME, entries > 0 && splits > 0 && splits <= args.max_segments as usize, || {
            format!("{entries} entries, {splits} splits of {} segments", args.max_segments)
        })?;
        let (heads, d) = (self.decode_heads(), self.head_dim);
        let shared = 4 * (heads * d + d + heads * args.capacity as usize + self.decode_depth() * 64 * (2 * d + 4));
        let columns = self.decode_columns(args.heads as usize, args.kv_heads as usize);
        let kernel = &self.decode[usize::from(fused)];
        require(NAME, shared <= kernel.shared as usize, || format!("{shared} bytes of shared memory"))?;
        let shape =
            LaunchShape { grid: (columns as u32, entries as u32, splits as u32), threads: 256, shared: shared as u32 };
        // SAFETY: one argument of the kernel's type; shapes are checked above.
        Ok(unsafe { self.device.launch(kernel, shape, Overlap::Early, params![args]) }?)
    }

    /// Query rows of a prefill attention tile for this group and score capacity.
    pub fn prefill_rows(group: usize, capacity: usize) -> usize {
        Self::prefill_tile(group, capacity).0
    }

    fn prefill_tile(group: usize, capacity: usize) -> (usize, usize) {
        match (group, capacity) {
            (1, _) => (16, 1),
            (_, ..=512) => (8, 4),
            _ => (4, 4),
        }
    }

    /// Attention of `tiles` tiles of adjacent positions.
    ///
    /// # Errors
    /// Shapes that do not fit each other, or the driver's.
    pub fn attend_prefill(&self, tiles: usize, args: AttendArgs) -> Result<(), LaunchError> {
        const NAME: &str = "attend_prefill";
        self.check_attend(NAME, &args)?;
        require(NAME, tiles > 0, || "no tiles".into())?;
        let (heads, kv_heads, capacity) = (args.heads as usize, args.kv_heads as usize, args.capacity as usize);
        let (rows, width) = Self::prefill_tile(heads / kv_heads, capacity);
        let shared = 4 * rows * width * (self.head_dim + capacity);
        let Some(kernel) = self.prefill.get(&(rows, width)) else {
            return Err(LaunchError::Shape { kernel: NAME, reason: format!("no tile of {rows} by {width}") });
        };
        require(NAME, shared <= kernel.shared as usize, || format!("{shared} bytes of shared memory"))?;
        let columns = kv_heads * (heads / kv_heads).div_ceil(width);
        let shape = LaunchShape { grid: (columns as u32, tiles as u32, 1), threads: 128, shared: shared as u32 };
        // SAFETY: one argument of the kernel's type; shapes are checked above.
        Ok(unsafe { self.device.launch(kernel, shape, Overlap::Early, params![args]) }?)
    }

    /// Selects one token for each of `rows` rows of logits.
    ///
    /// # Errors
    /// An empty vocabulary, or the driver's.
    pub fn select(&self, rows: usize, vocab: usize, buffers: SelectBuffers) -> Result<(), LaunchError> {
        let SelectBuffers { logits, sampling, out, last_token, adjust } = buffers;
        require("select_token", rows > 0 && vocab > 0, || format!("{rows} rows of {vocab} logits"))?;
        let n = vocab as i32;
        let shape = LaunchShape { grid: (rows as u32, 1, 1), threads: 1024, shared: 0 };
        let params = params![logits, sampling, out, last_token, adjust, n];
        // SAFETY: arguments of the kernel's types; the caller's buffers hold `rows` rows.
        Ok(unsafe { self.device.launch(&self.select, shape, Overlap::Early, params) }?)
    }
}

impl Kernels {
    /// Gives `bindings` slots their penalties and biases and zeroes their counts; `words` are those of `adjust::words`.
    ///
    /// # Errors
    /// Nothing to do, or the driver's.
    pub fn bind_adjust(
        &self,
        bindings: usize,
        words: u64,
        adjust: AdjustArgs,
        vocab: usize,
    ) -> Result<(), LaunchError> {
        require("bind_adjust", bindings > 0, || "no slot has penalties or a bias".into())?;
        let n = vocab as i32;
        let shape = LaunchShape { grid: (bindings as u32, 1, 1), threads: 1024, shared: 0 };
        // SAFETY: arguments of the kernel's types; the caller's buffers hold every slot named in `words`.
        Ok(unsafe { self.device.launch(&self.bind_adjust, shape, Overlap::No, params![words, adjust, n]) }?)
    }
}

/// Rows of f32 to read: `x[gather[r]]` (or `x[r]` when `gather` is 0), `width` values each.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Address of the first row.
    pub x: u64,
    /// Address of the row numbers, or 0.
    pub gather: u64,
    /// Rows.
    pub rows: usize,
    /// Values of a row.
    pub width: usize,
}
