//! Quantised numbers: activation blocks (profile q8), int8 weight rows (profile int8) and the GGUF weight blocks as stored.

use half::f16;

/// Dequantises row `r` of a matrix into `out` (`[cols]`).
pub use crate::model::dequant::row as dequantise_row;
use crate::model::{Matrix, MatrixFormat};

/// Activations of one quantisation block.
pub const ACT_BLOCK: usize = 32;

/// Below this maximum an activation block is all zero: 2^-100.
pub const ACT_AMAX_MIN: f32 = f32::from_bits(27 << 23);

/// One block of 32 quantised activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActBlock {
    /// q in -127..=127.
    pub q: [i8; ACT_BLOCK],
    /// Scale da = amax / 127, or +0.
    pub d: f32,
    /// Exact sum of q.
    pub sum: i32,
}

/// Quantises one block: d = amax/127; q = RNE(x·(127/amax)) clamped to ±127; amax below 2^-100 gives q = 0 and d = +0.
pub fn quantise_block(x: &[f32; ACT_BLOCK]) -> ActBlock {
    let amax = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    if amax < ACT_AMAX_MIN {
        return ActBlock { q: [0; ACT_BLOCK], d: 0.0, sum: 0 };
    }
    let inverse = 127.0 / amax;
    let mut block = ActBlock { q: [0; ACT_BLOCK], d: amax / 127.0, sum: 0 };
    for (q, v) in block.q.iter_mut().zip(x) {
        *q = (v * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
        block.sum += i32::from(*q);
    }
    block
}

/// Quantises a row; its length is a multiple of 32.
pub fn quantise_activations(x: &[f32]) -> Vec<ActBlock> {
    let (blocks, rest) = x.as_chunks::<ACT_BLOCK>();
    assert!(rest.is_empty(), "the length of a quantised row is a multiple of {ACT_BLOCK}");
    blocks.iter().map(quantise_block).collect()
}

/// One weight block of 32 as a linear row uses it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightBlock {
    /// Integer weights: q for Q8_0 and Q4_1, q − 8 for Q4_0.
    pub q: [i8; 32],
    /// dw.
    pub d: f32,
    /// mw, for formats with a minimum.
    pub m: Option<f32>,
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Nibbles as GGUF stores them: byte i holds weight i in its low and weight i + 16 in its high half.
fn nibbles(bytes: &[u8]) -> [i8; 32] {
    std::array::from_fn(|i| if i < 16 { (bytes[i] & 15) as i8 } else { (bytes[i - 16] >> 4) as i8 })
}

/// Reads one stored block; `None` for formats without blocks.
pub fn weight_block(format: MatrixFormat, bytes: &[u8]) -> Option<WeightBlock> {
    let block = match format {
        MatrixFormat::Q8_0 => {
            WeightBlock { q: std::array::from_fn(|i| bytes[2 + i] as i8), d: half_at(bytes, 0), m: None }
        }
        MatrixFormat::Q4_0 => WeightBlock { q: nibbles(&bytes[2..]).map(|q| q - 8), d: half_at(bytes, 0), m: None },
        MatrixFormat::Q4_1 => WeightBlock { q: nibbles(&bytes[4..]), d: half_at(bytes, 0), m: Some(half_at(bytes, 2)) },
        MatrixFormat::F32 | MatrixFormat::F16 | MatrixFormat::Bf16 => return None,
    };
    Some(block)
}

/// The blocks of row `r` of a block-format matrix; empty for other formats.
pub fn weight_blocks(matrix: &Matrix, r: usize) -> Vec<WeightBlock> {
    matrix.row(r).chunks_exact(matrix.format.block().1).filter_map(|b| weight_block(matrix.format, b)).collect()
}

/// One output row of profile int8.
#[derive(Clone, Debug, PartialEq)]
pub struct Int8Row {
    /// q in -127..=127.
    pub q: Vec<i8>,
    /// s = amax / 127.
    pub s: f32,
}

/// Quantises one output row: s = amax/127, q = RNE(w·(127/amax)) clamped to ±127; a row of zeros has s = +0.
pub fn quantise_int8_row(w: &[f32]) -> Int8Row {
    let amax = w.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    if amax < ACT_AMAX_MIN {
        return Int8Row { q: vec![0; w.len()], s: 0.0 };
    }
    let inverse = 127.0 / amax;
    let q = w.iter().map(|v| (v * inverse).round_ties_even().clamp(-127.0, 127.0) as i8).collect();
    Int8Row { q, s: amax / 127.0 }
}
