//! Linear kernels: one tile of 16 output rows times a run of token rows, in the orders of `arith::linear`.
//!
//! A lane is an output row, so nothing is ever added across lanes; N token rows share the unpacked weights and each keeps its own
//! accumulators: neither N nor a neighbour can move a bit.

use super::level::dispatch;
use super::pack::{Kind, TILE};
use super::simd::Simd;
use crate::arith::linear::{GROUPS, SEGMENT, group_len};

/// Most token rows that one pass over a tile takes; longer runs are cut into 8, 4, 2 and 1.
pub const TOKENS: usize = 8;

/// Bytes between the weights at work and those asked for.
const AHEAD: usize = 8 << 10;

/// Rows of activations, as the consumers of one matrix input read them. Pointers to the first row; absent forms are null.
#[derive(Clone, Copy)]
pub struct Acts {
    /// Inputs of a row.
    pub cols: usize,
    /// f32 `[rows][cols]`, for the f32 order.
    pub x: *const f32,
    /// i8 `[rows][cols]`, for the q8 order.
    pub q: *const i8,
    /// da `[rows][cols/32]`.
    pub d: *const f32,
    /// da·f32(asum) `[rows][cols/32]`.
    pub s: *const f32,
    /// −128·asum `[rows][cols/32]`: what unsigned weights (q + 128) add too much, negated.
    pub excess: *const i32,
}

impl Acts {
    /// The rows from `row` on.
    pub fn starting_at(self, row: usize) -> Self {
        let (cols, blocks) = (self.cols, self.cols / 32);
        Self {
            cols,
            x: self.x.wrapping_add(row * cols),
            q: self.q.wrapping_add(row * cols),
            d: self.d.wrapping_add(row * blocks),
            s: self.s.wrapping_add(row * blocks),
            excess: self.excess.wrapping_add(row * blocks),
        }
    }
}

dispatch! {
    /// Multiplies `tile` with `rows` rows of `acts`; row t's 16 outputs go to `out + t·stride`.
    ///
    /// # Safety
    /// `tile` holds `kind.tile_bytes(cols)` bytes; `acts` holds `rows` rows in the form that `kind` reads; `out` takes 16 floats at
    /// every row's place.
    pub unsafe fn linear_tile(kind: Kind, tile: *const u8, acts: Acts, rows: usize, out: *mut f32, stride: usize) = linear_body
}

#[inline(always)]
unsafe fn linear_body<S: Simd>(kind: Kind, tile: *const u8, acts: Acts, rows: usize, out: *mut f32, stride: usize) {
    // SAFETY: the caller's grant, handed on.
    unsafe {
        match kind {
            Kind::F32 => float_rows::<S, F32>(tile, acts, rows, out, stride),
            Kind::F16 => float_rows::<S, F16>(tile, acts, rows, out, stride),
            Kind::Bf16 => float_rows::<S, Bf16>(tile, acts, rows, out, stride),
            Kind::Int8 => float_rows::<S, Int8>(tile, acts, rows, out, stride),
            Kind::Q8_0 => block_rows::<S, Q8_0>(tile, acts, rows, out, stride),
            Kind::Q4_0 => block_rows::<S, Q4_0>(tile, acts, rows, out, stride),
            Kind::Q4_1 => block_rows::<S, Q4_1>(tile, acts, rows, out, stride),
        }
    }
}

/// How a block of a tile is read.
trait BlockWeights {
    const KIND: Kind;
    const MINIMUM: bool;
    /// The eight vectors of a block: vector j holds inputs 4j..4j+4.
    unsafe fn load<S: Simd>(quants: *const u8) -> [S::I; 8];
    /// What the integer sum starts at.
    fn start<S: Simd>(excess: i32) -> S::I;
    fn dot<S: Simd>(acc: S::I, w: S::I, x: i32) -> S::I;
}

struct Q8_0;
struct Q4_0;
struct Q4_1;

#[inline(always)]
unsafe fn load_nibbles<S: Simd>(quants: *const u8) -> [S::I; 8] {
    // SAFETY: the caller grants 256 bytes.
    let v: [S::I; 4] = std::array::from_fn(|j| unsafe { S::iload(quants.add(64 * j)) });
    std::array::from_fn(|j| if j < 4 { S::low_nibbles(v[j]) } else { S::high_nibbles(v[j - 4]) })
}

impl BlockWeights for Q8_0 {
    const KIND: Kind = Kind::Q8_0;
    const MINIMUM: bool = false;
    #[inline(always)]
    unsafe fn load<S: Simd>(quants: *const u8) -> [S::I; 8] {
        // SAFETY: the caller grants 512 bytes.
        std::array::from_fn(|j| unsafe { S::iload(quants.add(64 * j)) })
    }
    #[inline(always)]
    fn start<S: Simd>(excess: i32) -> S::I {
        S::isplat(excess)
    }
    #[inline(always)]
    fn dot<S: Simd>(acc: S::I, w: S::I, x: i32) -> S::I {
        S::dot4(acc, w, x)
    }
}

impl BlockWeights for Q4_0 {
    const KIND: Kind = Kind::Q4_0;
    const MINIMUM: bool = false;
    #[inline(always)]
    unsafe fn load<S: Simd>(quants: *const u8) -> [S::I; 8] {
        // SAFETY: the caller grants 256 bytes.
        unsafe { load_nibbles::<S>(quants) }
    }
    #[inline(always)]
    fn start<S: Simd>(excess: i32) -> S::I {
        S::ishr4(S::isplat(excess)) // −128·asum / 16 = −8·asum, exactly
    }
    #[inline(always)]
    fn dot<S: Simd>(acc: S::I, w: S::I, x: i32) -> S::I {
        S::dot4_nibbles(acc, w, x)
    }
}

impl BlockWeights for Q4_1 {
    const KIND: Kind = Kind::Q4_1;
    const MINIMUM: bool = true;
    #[inline(always)]
    unsafe fn load<S: Simd>(quants: *const u8) -> [S::I; 8] {
        // SAFETY: the caller grants 256 bytes.
        unsafe { load_nibbles::<S>(quants) }
    }
    #[inline(always)]
    fn start<S: Simd>(_excess: i32) -> S::I {
        S::isplat(0)
    }
    #[inline(always)]
    fn dot<S: Simd>(acc: S::I, w: S::I, x: i32) -> S::I {
        S::dot4_nibbles(acc, w, x)
    }
}

/// Cuts a run of rows into 8, 4, 2 and 1 and hands each piece to `$body::<S, W, N…>`.
macro_rules! by_tokens {
    ($rows:ident, $acts:ident, $out:ident, $stride:ident, |$a:ident, $o:ident| $eight:expr, $four:expr, $two:expr, $one:expr) => {{
        let mut t = 0;
        while t < $rows {
            let ($a, $o) = ($acts.starting_at(t), $out.add(t * $stride));
            t += match $rows - t {
                8.. => ($eight, 8).1,
                4.. => ($four, 4).1,
                2.. => ($two, 2).1,
                _ => ($one, 1).1,
            };
        }
    }};
}

#[inline(always)]
unsafe fn block_rows<S: Simd, W: BlockWeights>(tile: *const u8, acts: Acts, rows: usize, out: *mut f32, stride: usize) {
    // SAFETY: each piece lies inside the caller's grant.
    unsafe {
        by_tokens!(
            rows,
            acts,
            out,
            stride,
            |a, o| blocks_times::<S, W, 8>(tile, a, o, stride),
            blocks_times::<S, W, 4>(tile, a, o, stride),
            blocks_times::<S, W, 2>(tile, a, o, stride),
            blocks_times::<S, W, 1>(tile, a, o, stride)
        );
    }
}

/// The q8 order for N token rows.
#[inline(always)]
unsafe fn blocks_times<S: Simd, W: BlockWeights, const N: usize>(
    tile: *const u8,
    a: Acts,
    out: *mut f32,
    stride: usize,
) {
    let (blocks, (quant_bytes, scale_bytes)) = (a.cols / 32, W::KIND.block_bytes());
    let scales = tile.wrapping_add(blocks * quant_bytes);
    let per_group = group_len(blocks);
    let mut groups = [[S::splat(0.0); N]; GROUPS];
    for (g, group) in groups.iter_mut().enumerate() {
        let mut acc = [S::splat(0.0); N];
        for b in (g * per_group).min(blocks)..((g + 1) * per_group).min(blocks) {
            // SAFETY: block b of the tile and of N rows lies inside the caller's grant.
            unsafe {
                if N == 1 {
                    // Decode reads every weight once: the next tiles are on their way while this block is computed.
                    for line in (0..quant_bytes + scale_bytes).step_by(64) {
                        S::prefetch(tile.wrapping_add(b * (quant_bytes + scale_bytes) + line + AHEAD));
                    }
                }
                let w = W::load::<S>(tile.add(b * quant_bytes));
                let dw = S::load_f16(scales.add(b * scale_bytes));
                let mw = if W::MINIMUM { S::load_f16(scales.add(b * scale_bytes + 32)) } else { dw };
                for (n, acc) in acc.iter_mut().enumerate() {
                    let at = n * blocks + b;
                    let x = a.q.add(at * 32).cast::<i32>();
                    let mut sum = W::start::<S>(if W::MINIMUM { 0 } else { *a.excess.add(at) });
                    for (j, w) in w.iter().enumerate() {
                        sum = W::dot::<S>(sum, *w, x.add(j).read_unaligned());
                    }
                    *acc = S::fma(S::to_f32(sum), S::mul(dw, S::splat(*a.d.add(at))), *acc);
                    if W::MINIMUM {
                        *acc = S::fma(mw, S::splat(*a.s.add(at)), *acc);
                    }
                }
            }
        }
        *group = acc;
    }
    for n in 0..N {
        // SAFETY: row n's place takes 16 floats.
        unsafe { S::store(out.add(n * stride), combine::<S, N>(&groups, n)) }
    }
}

#[inline(always)]
fn combine<S: Simd, const N: usize>(g: &[[S::F; N]; GROUPS], n: usize) -> S::F {
    let low = S::add(S::add(g[0][n], g[1][n]), S::add(g[2][n], g[3][n]));
    S::add(low, S::add(S::add(g[4][n], g[5][n]), S::add(g[6][n], g[7][n])))
}

/// How sixteen weights of one input are read.
trait FloatWeights {
    /// Bytes of sixteen weights.
    const BYTES: usize;
    const ROW_SCALE: bool;
    unsafe fn load<S: Simd>(p: *const u8) -> S::F;
}

struct F32;
struct F16;
struct Bf16;
struct Int8;

impl FloatWeights for F32 {
    const BYTES: usize = 4 * TILE;
    const ROW_SCALE: bool = false;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the caller's grant.
        unsafe { S::load(p.cast()) }
    }
}

impl FloatWeights for F16 {
    const BYTES: usize = 2 * TILE;
    const ROW_SCALE: bool = false;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the caller's grant.
        unsafe { S::load_f16(p) }
    }
}

impl FloatWeights for Bf16 {
    const BYTES: usize = 2 * TILE;
    const ROW_SCALE: bool = false;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the caller's grant.
        unsafe { S::load_bf16(p) }
    }
}

impl FloatWeights for Int8 {
    const BYTES: usize = TILE;
    const ROW_SCALE: bool = true;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the caller's grant.
        unsafe { S::load_i8(p) }
    }
}

#[inline(always)]
unsafe fn float_rows<S: Simd, W: FloatWeights>(tile: *const u8, acts: Acts, rows: usize, out: *mut f32, stride: usize) {
    // SAFETY: each piece lies inside the caller's grant.
    unsafe {
        by_tokens!(
            rows,
            acts,
            out,
            stride,
            |a, o| floats_times::<S, W, 8, 1>(tile, a, o, stride),
            floats_times::<S, W, 4, 1>(tile, a, o, stride),
            floats_times::<S, W, 2, 2>(tile, a, o, stride),
            floats_times::<S, W, 1, 4>(tile, a, o, stride)
        );
    }
}

/// The f32 order for N token rows, P segments at a time (their chains are independent; they are added in order).
#[inline(always)]
unsafe fn floats_times<S: Simd, W: FloatWeights, const N: usize, const P: usize>(
    tile: *const u8,
    a: Acts,
    out: *mut f32,
    stride: usize,
) {
    let segments = a.cols.div_ceil(SEGMENT);
    let per_group = group_len(segments);
    let mut groups = [[S::splat(0.0); N]; GROUPS];
    for (g, group) in groups.iter_mut().enumerate() {
        let mut acc = [S::splat(0.0); N];
        let (mut s, end) = ((g * per_group).min(segments), ((g + 1) * per_group).min(segments));
        while s < end {
            // SAFETY: segments s.. of the tile and of N rows lie inside the caller's grant; P whole ones only where they exist.
            unsafe {
                if s + P <= end && (s + P) * SEGMENT <= a.cols {
                    add_chains::<S, W, N, P>(tile, &a, s, SEGMENT, &mut acc);
                    s += P;
                } else {
                    let len = SEGMENT.min(a.cols - s * SEGMENT);
                    add_chains::<S, W, N, 1>(tile, &a, s, len, &mut acc);
                    s += 1;
                }
            }
        }
        *group = acc;
    }
    for n in 0..N {
        let mut sum = combine::<S, N>(&groups, n);
        // SAFETY: the row scales end the tile; row n's place takes 16 floats.
        unsafe {
            if W::ROW_SCALE {
                sum = S::mul(sum, S::load(tile.add(a.cols * W::BYTES).cast()));
            }
            S::store(out.add(n * stride), sum);
        }
    }
}

/// Adds P consecutive segments of `len` inputs, each one ascending chain from +0, to the group sums.
#[inline(always)]
unsafe fn add_chains<S: Simd, W: FloatWeights, const N: usize, const P: usize>(
    tile: *const u8,
    a: &Acts,
    segment: usize,
    len: usize,
    acc: &mut [S::F; N],
) {
    let mut chain = [[S::splat(0.0); N]; P];
    for k in 0..len {
        for (p, chain) in chain.iter_mut().enumerate() {
            let at = (segment + p) * SEGMENT + k;
            // SAFETY: input `at` of the tile and of N rows lies inside the caller's grant.
            unsafe {
                let w = W::load::<S>(tile.add(at * W::BYTES));
                for (n, chain) in chain.iter_mut().enumerate() {
                    *chain = S::fma(w, S::splat(*a.x.add(n * a.cols + at)), *chain);
                }
            }
        }
    }
    for chain in chain {
        for (acc, chain) in acc.iter_mut().zip(chain) {
            *acc = S::add(*acc, chain);
        }
    }
}
