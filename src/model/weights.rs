//! Weights as they are stored: matrices `[rows (outputs), cols (inputs)]`, row-major, in one of a few formats. A backend reads
//! them once and keeps its own layout; nothing here computes.

use std::ops::{Deref, Range};
use std::sync::Arc;

use super::geometry::Geometry;

/// Bytes of one tensor: a window of a mapped file, or owned.
#[derive(Clone)]
pub enum TensorBytes {
    /// A range of a shared memory map.
    Mapped(Arc<memmap2::Mmap>, Range<usize>),
    /// Bytes made in memory (synthetic weights).
    Owned(Arc<Vec<u8>>),
}

impl Deref for TensorBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            TensorBytes::Mapped(map, range) => &map[range.clone()],
            TensorBytes::Owned(bytes) => bytes,
        }
    }
}

impl std::fmt::Debug for TensorBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TensorBytes({} bytes)", self.len())
    }
}

/// Storage format of a matrix. Block formats hold 32 weights a block along a row, little-endian, as GGUF has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixFormat {
    /// 4 bytes a weight.
    F32,
    /// IEEE half, 2 bytes a weight.
    F16,
    /// bfloat16, 2 bytes a weight.
    Bf16,
    /// Block of 32: f16 d, 32 × i8 q; w = d·q. 34 bytes.
    Q8_0,
    /// Block of 32: f16 d, 16 bytes of nibbles (low nibble = weights 0..16, high = 16..32); w = d·(q−8). 18 bytes.
    Q4_0,
    /// Block of 32: f16 d, f16 m, 16 bytes of nibbles (as Q4_0); w = d·q + m. 20 bytes.
    Q4_1,
}

impl MatrixFormat {
    /// (weights, bytes) of the smallest unit.
    pub const fn block(self) -> (usize, usize) {
        match self {
            MatrixFormat::F32 => (1, 4),
            MatrixFormat::F16 | MatrixFormat::Bf16 => (1, 2),
            MatrixFormat::Q8_0 => (32, 34),
            MatrixFormat::Q4_0 => (32, 18),
            MatrixFormat::Q4_1 => (32, 20),
        }
    }

    /// Whether profile q8 multiplies it by blocks of quantised activations.
    pub const fn is_block(self) -> bool {
        self.block().0 > 1
    }
}

/// One matrix `[rows, cols]`, row-major: output r is the dot of row r with the input.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Storage format.
    pub format: MatrixFormat,
    /// Outputs.
    pub rows: usize,
    /// Inputs; a multiple of the format's block.
    pub cols: usize,
    /// `rows · cols / block.0 · block.1` bytes.
    pub bytes: TensorBytes,
}

impl Matrix {
    /// Bytes of one row.
    pub const fn row_bytes(&self) -> usize {
        let (weights, bytes) = self.format.block();
        self.cols / weights * bytes
    }

    /// The stored bytes of row `r`; panics when `r >= rows`.
    pub fn row(&self, r: usize) -> &[u8] {
        let n = self.row_bytes();
        &self.bytes[r * n..(r + 1) * n]
    }
}

/// One transformer layer. Norms are f32 `[hidden]`.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// RMSNorm before attention.
    pub attn_norm: Vec<f32>,
    /// Query projection `[q_dim, hidden]`.
    pub wq: Matrix,
    /// Key projection `[kv_dim, hidden]`.
    pub wk: Matrix,
    /// Value projection `[kv_dim, hidden]`.
    pub wv: Matrix,
    /// Output projection `[hidden, q_dim]`.
    pub wo: Matrix,
    /// RMSNorm before the feed-forward layer.
    pub ffn_norm: Vec<f32>,
    /// Gate projection `[ffn, hidden]`.
    pub w_gate: Matrix,
    /// Up projection `[ffn, hidden]`.
    pub w_up: Matrix,
    /// Down projection `[hidden, ffn]`.
    pub w_down: Matrix,
}

/// A whole model, ready for a backend to take.
#[derive(Clone, Debug)]
pub struct ModelWeights {
    /// Shape.
    pub geometry: Geometry,
    /// Token embedding `[vocab, hidden]`.
    pub embedding: Matrix,
    /// Layers in order.
    pub layers: Vec<LayerWeights>,
    /// RMSNorm before the vocabulary projection.
    pub final_norm: Vec<f32>,
    /// Vocabulary projection `[vocab, hidden]`; absent when tied to the embedding.
    pub head: Option<Matrix>,
}
