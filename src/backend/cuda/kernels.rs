//! The kernels of one model, loaded, and their typed launchers. A launcher checks shapes, alignment and capacities, then launches.
//! Those of the linear layers and of attention are in `linear` and `attention`.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::rc::Rc;

use super::adjust::AdjustArgs;
use super::args::{EmbedArgs, RopeArgs, Rows, SelectBuffers};
use super::attention::{Fusion, PREFILL_TILES};
use super::cache::{Cache, Source};
use super::driver::{Device, DeviceError, Kernel, LaunchShape, Module, Overlap};
use super::linear::{FewRows, few_rows_shapes};
use super::nvrtc::Compiler;
use super::program::{Kind, Program};

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

pub(super) fn require(kernel: &'static str, holds: bool, reason: impl FnOnce() -> String) -> Result<(), LaunchError> {
    if holds { Ok(()) } else { Err(LaunchError::Shape { kernel, reason: reason() }) }
}

macro_rules! params {
    ($($value:expr),* $(,)?) => { &mut [$(std::ptr::from_ref(&$value).cast_mut().cast::<std::ffi::c_void>()),*] };
}
pub(super) use params;

/// The kernels of one model.
#[derive(Debug)]
pub struct Kernels {
    pub(super) device: Rc<Device>,
    pub(super) head_dim: usize,
    rows: BTreeMap<&'static str, Kernel>,
    pub(super) few: BTreeMap<(Kind, FewRows), Kernel>,
    pub(super) normed: BTreeMap<(Kind, FewRows), Kernel>,
    pub(super) tile: BTreeMap<(Kind, usize), Kernel>,
    pub(super) decode: [Kernel; 2],
    pub(super) prefill: BTreeMap<(usize, usize), Kernel>,
    select: Kernel,
    bind_adjust: Kernel,
}

const ROW_KERNELS: [&str; 9] =
    ["bind", "prepare", "embed_f32", "embed_int8", "embed_block", "norm_f32", "norm_q8", "rope_kv", "swiglu_rows"];

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
        let (mut few, mut normed, mut tile) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for &kind in kinds {
            let module = load(Program::LinearRows(kind))?;
            for shape in few_rows_shapes(kind) {
                let kernel = module.kernel(&shape.kernel_name()).map_err(text)?;
                few.insert((kind, shape), kernel);
                if kind.is_block() {
                    normed.insert((kind, shape), module.kernel(&shape.normed_name()).map_err(text)?);
                }
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
        Ok(Self { device: Rc::clone(device), head_dim, rows, few, normed, tile, decode, prefill, select, bind_adjust })
    }

    /// Launches of every loaded kernel since it was loaded, by its name and what it is loaded for.
    pub fn launches(&self) -> Vec<(String, u64)> {
        let d = self.head_dim;
        let rows = self.rows.iter().map(|(name, k)| ((*name).to_string(), k));
        let few = self.few.iter().map(|((kind, shape), k)| (format!("{} {kind:?}", shape.kernel_name()), k));
        let normed = self.normed.iter().map(|((kind, shape), k)| (format!("{} {kind:?}", shape.normed_name()), k));
        let tile = self.tile.iter().map(|((kind, height), k)| (format!("linear_tile of {height} {kind:?}"), k));
        let decode = [Fusion::Apart, Fusion::Fused].map(Fusion::kernel_name).into_iter().zip(&self.decode);
        let decode = decode.map(|(name, k)| (format!("{name} D={d}"), k));
        let prefill = self.prefill.iter().map(|((r, h), k)| (format!("attend_prefill_{r}x{h} D={d}"), k));
        let select = [("select_token", &self.select), ("bind_adjust", &self.bind_adjust)];
        let select = select.map(|(name, k)| (name.to_string(), k));
        let all = rows.chain(few).chain(normed).chain(tile).chain(decode).chain(prefill).chain(select);
        all.map(|(name, k)| (name, k.launches.get())).collect()
    }

    /// The device that they are loaded on.
    pub fn device(&self) -> &Rc<Device> {
        &self.device
    }

    fn row_kernel(
        &self,
        name: &'static str,
        grid: u32,
        threads: u32,
        overlap: Overlap,
        params: &mut [*mut c_void],
    ) -> Result<(), LaunchError> {
        let Some(kernel) = self.rows.get(name).filter(|_| grid > 0) else {
            return Err(LaunchError::Shape { kernel: name, reason: "there is nothing to do".into() });
        };
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
        self.row_kernel("bind", bindings as u32, 128, Overlap::No, params![words, tables, position, stride])
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
        self.row_kernel(
            "prepare",
            rows as u32,
            128,
            Overlap::No,
            params![descriptors, tokens, position, last, slot, pos, id],
        )
    }

    /// x[t] = embedding row of the token of token row t, which `prepare` has resolved or, when `args.rows` is not 0, this kernel resolves.
    ///
    /// # Errors
    /// The driver's.
    pub fn embed(&self, kind: Kind, rows: usize, args: EmbedArgs) -> Result<(), LaunchError> {
        let name = match kind {
            Kind::F32 => "embed_f32",
            Kind::Int8 => "embed_int8",
            Kind::Block | Kind::BlockMin => "embed_block",
        };
        let overlap = if args.rows == 0 { Overlap::Early } else { Overlap::No };
        self.row_kernel(name, rows as u32, 256, overlap, params![args])
    }

    /// out[r] = RMSNorm(x[gather[r]]) * w.
    ///
    /// # Errors
    /// A width that is no multiple of 32, or the driver's.
    pub fn norm_f32(&self, source: Rows, w: u64, eps: f32, out: u64) -> Result<(), LaunchError> {
        require("norm_f32", source.width.is_multiple_of(32), || format!("width {}", source.width))?;
        let n = source.width as i32;
        let params = params![source.x, source.gather, w, out, n, eps];
        self.row_kernel("norm_f32", source.rows as u32, 256, Overlap::Early, params)
    }

    /// Normalises (unless `w` is 0) and quantises rows; `out` is q, da, sa.
    ///
    /// # Errors
    /// A width that is no multiple of 32, or the driver's.
    pub fn norm_q8(&self, source: Rows, w: u64, eps: f32, out: [u64; 3]) -> Result<(), LaunchError> {
        require("norm_q8", source.width.is_multiple_of(32), || format!("width {}", source.width))?;
        let ([q, da, sa], n) = (out, source.width as i32);
        let params = params![source.x, source.gather, w, q, da, sa, n, eps];
        self.row_kernel("norm_q8", source.rows as u32, 256, Overlap::Early, params)
    }

    /// Rotates q, stores rotated k and v.
    ///
    /// # Errors
    /// The driver's.
    pub fn rope_kv(&self, rows: usize, args: RopeArgs) -> Result<(), LaunchError> {
        require("rope_kv", args.head_dim as usize == self.head_dim, || format!("head_dim {}", args.head_dim))?;
        self.row_kernel("rope_kv", rows as u32, 256, Overlap::Early, params![args])
    }

    /// out = swiglu(gate, up), `n` values.
    ///
    /// # Errors
    /// The driver's.
    pub fn swiglu(&self, gate: u64, up: u64, out: u64, n: usize) -> Result<(), LaunchError> {
        let count = n as u64;
        self.row_kernel("swiglu_rows", n.div_ceil(256) as u32, 256, Overlap::No, params![gate, up, out, count])
    }

    /// Selects one token for each of `rows` rows of logits.
    ///
    /// # Errors
    /// An empty vocabulary, a missing lane, or the driver's.
    pub fn select(&self, rows: usize, vocab: usize, buffers: SelectBuffers) -> Result<(), LaunchError> {
        let SelectBuffers { logits, sampling, lanes, last_token, adjust } = buffers;
        require("select_token", rows > 0 && vocab > 0, || format!("{rows} rows of {vocab} logits"))?;
        require("select_token", !lanes.contains(&0), || "a lane is missing".into())?;
        let n = vocab as i32;
        let shape = LaunchShape { grid: (rows as u32, 1, 1), threads: 1024, shared: 0 };
        let params = params![logits, sampling, lanes, last_token, adjust, n];
        // SAFETY: arguments of the kernel's types; the caller's buffers hold `rows` rows.
        Ok(unsafe { self.device.launch(&self.select, shape, Overlap::Early, params) }?)
    }

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
