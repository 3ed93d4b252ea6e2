//! Launchers of the linear kernels, and which instantiation takes which shape.

use super::args::{Epilogue, FEW_ROWS, LinearArgs, NormedArgs};
use super::driver::{LaunchShape, Overlap};
use super::kernels::{Kernels, LaunchError, params, require};
use super::program::Kind;

/// Rows that blocks of `FEW_ROWS` share, at most, and only where tiles of 64 by 64 would leave multiprocessors idle: on an H200 a
/// prefill of 16x16 takes 1.2 ms so, 1.5 ms by tiles alone, and decode of 64 rows 0.6 ms against 1.3.
const MOST_ROWS: usize = 512;

/// Rows of f32 and int8 weights that they share however many tiles there are: by tiles the vocabulary projection makes a decode step of 64
/// rows of seed-120m in int8 1,501 us long instead of 1,390. Weights of blocks gain by tiles: 607 and 570.
const MOST_ROWS_UNTILED: usize = 64;

/// Rows that every block normalises and quantises for itself, at most: at one row this makes a decode step of seed-120m 13 us shorter, at
/// four 65 us longer.
const MOST_NORMALISED: usize = 1;

/// Values of a row that a block normalises, at most: 256 threads hold four each.
const WIDEST_NORMALISED: usize = 1024;

/// How blocks of the decode linear kernels take tiles of outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Tiles {
    /// One each.
    One,
    /// One after the other, without a second buffer.
    Strided,
    /// One after the other, the next one fetched ahead.
    Ahead,
}

/// One instantiation of the decode linear kernels: outputs of a tile, rows that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FewRows {
    outputs: usize,
    rows: usize,
    tiles: Tiles,
}

impl FewRows {
    pub(super) fn kernel_name(self) -> String {
        match self.tiles {
            Tiles::One => format!("linear_rows_{}", self.outputs),
            Tiles::Strided => format!("linear_rows_{}_{}", self.outputs, self.rows),
            Tiles::Ahead => format!("linear_rows_{}_ahead", self.outputs),
        }
    }

    /// The same with the norm inside; kinds of blocks alone have it.
    pub(super) fn normed_name(self) -> String {
        format!("{}_norm", self.kernel_name())
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
pub(super) fn few_rows_shapes(kind: Kind) -> Vec<FewRows> {
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

fn not_loaded(kernel: &'static str, kind: Kind) -> LaunchError {
    LaunchError::Shape { kernel, reason: format!("{kind:?} was not loaded") }
}

impl Kernels {
    /// The instantiation for `rows` rows of `k` inputs and `n` outputs, if one can take them.
    fn few_rows(&self, kind: Kind, rows: usize, n: usize, k: usize) -> Option<FewRows> {
        let fits = |shape: &FewRows| {
            let kernel = self.few.get(&(kind, *shape));
            rows.min(FEW_ROWS) <= shape.rows
                && kernel.is_some_and(|kernel| shape.shared(kind, k) <= kernel.shared as usize)
        };
        let (sms, chunks) = (self.device.multiprocessors as usize, rows.div_ceil(FEW_ROWS));
        let tiles = rows.div_ceil(64) * n.div_ceil(64);
        let untiled = if kind.is_block() { FEW_ROWS } else { MOST_ROWS_UNTILED };
        if rows > MOST_ROWS || (rows > untiled && tiles >= sms) {
            return None;
        }
        let filled = |shape: &FewRows| match shape.tiles {
            Tiles::Ahead => n / shape.outputs >= 2 * sms && k <= 1024,
            _ => shape.outputs == 8 || 10 * (n / shape.outputs) * chunks >= enough_tenths(kind) * sms,
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

    /// Whether `linear_rows` can normalise and quantise so few rows of `x` itself.
    pub fn normalises(&self, kind: Kind, rows: usize, n: usize, k: usize) -> bool {
        let fits = |shape: FewRows| {
            self.normed.get(&(kind, shape)).is_some_and(|kernel| shape.shared(kind, k) <= kernel.shared as usize)
        };
        rows <= MOST_NORMALISED && k <= WIDEST_NORMALISED && self.few_rows(kind, rows, n, k).is_some_and(fits)
    }

    /// The instantiation and the grid for a linear layer of few rows.
    fn shape_of(
        &self,
        kernel: &'static str,
        kind: Kind,
        args: &LinearArgs,
    ) -> Result<(FewRows, LaunchShape), LaunchError> {
        Self::check_linear(kernel, args)?;
        let (rows, n, k) = (args.rows as usize, args.n as usize, args.k as usize);
        let Some(shape) = self.few_rows(kind, rows, n, k) else {
            return Err(LaunchError::Shape { kernel, reason: format!("{rows} rows of {k} inputs are too many") });
        };
        let gated = args.epilogue == Epilogue::Swiglu as i32 && self.quantises_swiglu(kind, rows, n, k);
        require(kernel, args.oq == 0 || gated, || "only gate and up in blocks of 64 can be quantised".into())?;
        let (tiles, chunks, shared) = (n.div_ceil(shape.outputs), rows.div_ceil(FEW_ROWS), shape.shared(kind, k));
        let sms = self.device.multiprocessors as usize;
        let most = match shape.tiles {
            Tiles::One => tiles,
            Tiles::Strided => sms * (self.device.shared_bytes as usize / (shared + 1024)).clamp(1, 2),
            Tiles::Ahead => sms,
        };
        let grid = (tiles.min(most) as u32, chunks as u32, 1);
        Ok((shape, LaunchShape { grid, threads: 256, shared: shared as u32 }))
    }

    /// The linear layer for few rows; block kinds read `xq`, `da` and `sa`, the others `x`.
    ///
    /// # Errors
    /// More rows or inputs than `takes_rows` allows, a quantised result where `quantises_swiglu` denies it, misaligned addresses, or
    /// the driver's.
    pub fn linear_rows(&self, kind: Kind, args: LinearArgs) -> Result<(), LaunchError> {
        const NAME: &str = "linear_rows";
        Self::check_quantised(NAME, kind, &args)?;
        let (shape, launch) = self.shape_of(NAME, kind, &args)?;
        let Some(kernel) = self.few.get(&(kind, shape)) else { return Err(not_loaded(NAME, kind)) };
        // SAFETY: one argument of the kernel's type; shapes are checked above.
        Ok(unsafe { self.device.launch(kernel, launch, Overlap::Early, params![args]) }?)
    }

    /// The same of rows of `x` that the kernel normalises and quantises itself.
    ///
    /// # Errors
    /// As `linear_rows`; shapes that `normalises` denies.
    pub fn linear_rows_normed(&self, kind: Kind, args: NormedArgs) -> Result<(), LaunchError> {
        const NAME: &str = "linear_rows_norm";
        let LinearArgs { rows, n, k, x, .. } = args.linear;
        let small = self.normalises(kind, rows as usize, n as usize, k as usize);
        require(NAME, small && x != 0 && args.norm.weights != 0, || format!("a norm of {rows} rows of {k}"))?;
        let (shape, launch) = self.shape_of(NAME, kind, &args.linear)?;
        let Some(kernel) = self.normed.get(&(kind, shape)) else { return Err(not_loaded(NAME, kind)) };
        // SAFETY: one argument of the kernel's type; shapes are checked above.
        Ok(unsafe { self.device.launch(kernel, launch, Overlap::Early, params![args]) }?)
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
            return Err(not_loaded(NAME, kind));
        };
        let shape = LaunchShape { grid: (columns as u32, rows.div_ceil(height) as u32, 1), threads, shared: 0 };
        // SAFETY: one argument of the kernel's type; shapes are checked above.
        Ok(unsafe { self.device.launch(kernel, shape, Overlap::Early, params![args]) }?)
    }
}
