//! The kernels behind safe doors: for the tests that compare each instruction set with the scalar definitions, and for a backend
//! whose log-probabilities the host computes.

use super::level::Level;
use super::linear::{Acts, TOKENS, linear_tile};
use super::memory::Arena;
use super::pack::{Packed, TILE};
use super::rows::{QuantisedRow, exp_slice, norm_row, quantise_row, swiglu_rows};
use super::select;
use super::{BackendError, Isa};
use crate::arith::quant::ActBlock;
use crate::backend::{SamplingRow, TokenLogprobs};
use crate::model::{Matrix, Profile};

/// Token rows that share one pass over a weight tile: the edge that neighbour tests must cross.
pub const ROW_TILE: usize = TOKENS;

/// Kernels of one instruction set.
#[derive(Clone, Copy, Debug)]
pub struct Kernels(Level);

impl Kernels {
    /// # Errors
    /// The machine lacks the instruction set.
    pub fn new(isa: Isa) -> Result<Self, BackendError> {
        Level::detect(isa).map(Self)
    }

    /// exp_c of every element, in place.
    pub fn exp(self, x: &mut [f32]) {
        exp_slice(self.0, x, 0.0, 1.0);
    }

    /// RMSNorm.
    pub fn rms_norm(self, x: &[f32], w: &[f32], eps: f32) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        norm_row(self.0, x, w, eps, &mut out);
        out
    }

    /// SwiGLU; lengths are equal multiples of 16.
    pub fn swiglu(self, gate: &[f32], up: &[f32]) -> Vec<f32> {
        let mut out = gate.to_vec();
        swiglu_rows(self.0, &mut out, up);
        out
    }

    /// Activation quantisation of a row of whole blocks.
    pub fn quantise(self, x: &[f32]) -> Vec<ActBlock> {
        let quantised = Quantised::new(self.0, x);
        let block = |b: usize| ActBlock {
            q: std::array::from_fn(|i| quantised.q[b * 32 + i]),
            d: quantised.d[b],
            sum: quantised.excess[b] / -128,
        };
        (0..x.len() / 32).map(block).collect()
    }

    /// `matrix` in `profile` times `rows` rows of `x` `[rows][cols]`; returns `[rows][matrix.rows]`.
    ///
    /// # Errors
    /// The matrix cannot be packed.
    pub fn linear(self, matrix: &Matrix, profile: Profile, x: &[f32], rows: usize) -> Result<Vec<f32>, String> {
        let packed = packed(matrix, profile)?;
        assert_eq!(x.len(), rows * matrix.cols, "x is [rows][cols]");
        let blocks = Quantised::new(self.0, if packed.kind().is_block() { x } else { &[] });
        let acts = Acts {
            cols: matrix.cols,
            x: x.as_ptr(),
            q: blocks.q.as_ptr(),
            d: blocks.d.as_ptr(),
            s: blocks.s.as_ptr(),
            excess: blocks.excess.as_ptr(),
        };
        let stride = packed.tiles() * TILE;
        let mut wide = vec![f32::NAN; rows * stride];
        for tile in 0..packed.tiles() {
            let out = wide[tile * TILE..].as_mut_ptr();
            // SAFETY: `acts` holds `rows` rows in the form of the kind; `wide` takes 16 outputs at every row's place.
            unsafe { linear_tile(self.0, packed.kind(), packed.tile(tile).as_ptr(), acts, rows, out, stride) };
        }
        Ok(wide.chunks_exact(stride).flat_map(|row| &row[..matrix.rows]).copied().collect())
    }

    /// The row of an embedding as the backend reads it from its packed form.
    ///
    /// # Errors
    /// The matrix cannot be packed.
    pub fn embedding_row(self, matrix: &Matrix, profile: Profile, r: usize) -> Result<Vec<f32>, String> {
        let mut out = vec![f32::NAN; matrix.cols];
        packed(matrix, profile)?.unpack_row(r, &mut out);
        Ok(out)
    }

    /// Selection; `None` when a logit is not finite.
    pub fn select(self, logits: &[f32], sampling: &SamplingRow, offset: u32) -> Option<u32> {
        let top = select::highest(logits)?;
        Some(select::select(self.0, logits, top, sampling, offset, &mut Default::default()))
    }

    /// Log-probabilities; `None` when a logit is not finite.
    pub fn logprobs(self, logits: &[f32], chosen: u32, top: usize) -> Option<TokenLogprobs> {
        let (_, max) = select::highest(logits)?;
        Some(select::logprobs(self.0, logits, max, chosen, top, &mut Default::default()))
    }
}

fn packed(matrix: &Matrix, profile: Profile) -> Result<Packed, String> {
    let arena = Packed::size(matrix, profile).and_then(Arena::new);
    Packed::new(matrix, profile, &mut arena.ok_or("no memory")?)
}

struct Quantised {
    q: Vec<i8>,
    d: Vec<f32>,
    s: Vec<f32>,
    excess: Vec<i32>,
}

impl Quantised {
    fn new(level: Level, x: &[f32]) -> Self {
        let blocks = x.len() / 32;
        let mut out = Self { q: vec![0; x.len()], d: vec![0.0; blocks], s: vec![0.0; blocks], excess: vec![0; blocks] };
        let Self { q, d, s, excess } = &mut out;
        quantise_row(level, x, QuantisedRow { q, d, s, excess });
        out
    }
}
