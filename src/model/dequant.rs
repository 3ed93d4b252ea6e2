//! Dequantisation: what the stored bytes of a matrix mean as f32, one definition for every backend (docs/arithmetic.md).
//!
//! F32 as stored; F16 and BF16 widened exactly; Q8_0 is f32(q)·d; Q4_0 is f32(q − 8)·d; Q4_1 is (f32(q)·d) + m. The scales d
//! and m are halves widened exactly. A product has at most 8 + 11 significant bits and so is exact; only the sum of Q4_1 rounds,
//! fused or not.

use half::{bf16, f16};

use super::weights::{Matrix, MatrixFormat};

/// Weights of one block of Q8_0, Q4_0 and Q4_1.
const BLOCK: usize = 32;

/// Writes row `r` of `matrix` to `out`.
///
/// # Panics
/// When `r >= matrix.rows` or `out.len() != matrix.cols`: both are the caller's own numbers, not input.
pub fn row(matrix: &Matrix, r: usize, out: &mut [f32]) {
    assert_eq!(out.len(), matrix.cols, "a dequantised row has one value per column");
    slice(matrix.format, matrix.row(r), out);
}

/// The whole matrix as f32, `[rows, cols]`, row-major.
pub fn matrix(matrix: &Matrix) -> Vec<f32> {
    let mut out = vec![0.0; matrix.rows * matrix.cols];
    for (r, row_out) in out.chunks_exact_mut(matrix.cols).enumerate() {
        row(matrix, r, row_out);
    }
    out
}

/// Dequantises `bytes`, whole units of `format`, to `out`.
fn slice(format: MatrixFormat, bytes: &[u8], out: &mut [f32]) {
    match format {
        MatrixFormat::F32 => {
            for (w, &b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *w = f32::from_le_bytes(b);
            }
        }
        MatrixFormat::F16 => {
            for (w, &b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *w = f16::from_le_bytes(b).to_f32();
            }
        }
        MatrixFormat::Bf16 => {
            for (w, &b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *w = bf16::from_le_bytes(b).to_f32();
            }
        }
        MatrixFormat::Q8_0 => blocks::<34>(bytes, out, q8_0),
        MatrixFormat::Q4_0 => blocks::<18>(bytes, out, q4_0),
        MatrixFormat::Q4_1 => blocks::<20>(bytes, out, q4_1),
    }
}

fn blocks<const N: usize>(bytes: &[u8], out: &mut [f32], one: fn(&[u8; N], &mut [f32; BLOCK])) {
    for (block, weights) in bytes.as_chunks::<N>().0.iter().zip(out.as_chunks_mut::<BLOCK>().0) {
        one(block, weights);
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn q8_0(block: &[u8; 34], out: &mut [f32; BLOCK]) {
    let d = half_at(block, 0);
    for (w, &q) in out.iter_mut().zip(&block[2..]) {
        *w = f32::from(q as i8) * d;
    }
}

fn q4_0(block: &[u8; 18], out: &mut [f32; BLOCK]) {
    let d = half_at(block, 0);
    for (i, &byte) in block[2..].iter().enumerate() {
        out[i] = (f32::from(byte & 15) - 8.0) * d;
        out[i + 16] = (f32::from(byte >> 4) - 8.0) * d;
    }
}

fn q4_1(block: &[u8; 20], out: &mut [f32; BLOCK]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (i, &byte) in block[4..].iter().enumerate() {
        out[i] = f32::from(byte & 15) * d + m;
        out[i + 16] = f32::from(byte >> 4) * d + m;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::TensorBytes;

    fn one_row(format: MatrixFormat, cols: usize, bytes: Vec<u8>) -> Vec<f32> {
        matrix(&Matrix { format, rows: 1, cols, bytes: TensorBytes::Owned(Arc::new(bytes)) })
    }

    fn with_halves(halves: &[f32], rest: impl Iterator<Item = u8>) -> Vec<u8> {
        halves.iter().flat_map(|&h| f16::from_f32(h).to_le_bytes()).chain(rest).collect()
    }

    #[test]
    fn q8_0_is_the_signed_byte_times_the_scale() {
        let w = one_row(MatrixFormat::Q8_0, 32, with_halves(&[0.5], (0..32i16).map(|i| (i * 8 - 128) as i8 as u8)));
        for (i, w) in w.iter().enumerate() {
            assert_eq!(*w, (i as f32 * 8.0 - 128.0) * 0.5);
        }
    }

    #[test]
    fn low_nibbles_are_the_first_sixteen_weights_and_high_nibbles_the_rest() {
        let nibbles = (0..16u8).map(|i| i | ((15 - i) << 4));
        let q4_0 = one_row(MatrixFormat::Q4_0, 32, with_halves(&[2.0], nibbles.clone()));
        let q4_1 = one_row(MatrixFormat::Q4_1, 32, with_halves(&[2.0, -3.0], nibbles));
        for i in 0..16 {
            assert_eq!(q4_0[i], (i as f32 - 8.0) * 2.0);
            assert_eq!(q4_0[i + 16], (7.0 - i as f32) * 2.0);
            assert_eq!(q4_1[i], i as f32 * 2.0 - 3.0);
            assert_eq!(q4_1[i + 16], (15.0 - i as f32) * 2.0 - 3.0);
        }
    }

    #[test]
    fn halves_and_floats_widen_exactly() {
        let f = one_row(MatrixFormat::F32, 2, [1.5f32.to_le_bytes(), (-0.0f32).to_le_bytes()].concat());
        assert_eq!([f[0].to_bits(), f[1].to_bits()], [1.5f32.to_bits(), (-0.0f32).to_bits()]);
        let h = one_row(MatrixFormat::F16, 2, with_halves(&[65504.0, 5.960_464_5e-8], std::iter::empty()));
        assert_eq!(h, [65504.0, 5.960_464_5e-8]);
        let b = one_row(MatrixFormat::Bf16, 1, bf16::from_f32(-3.140_625).to_le_bytes().to_vec());
        assert_eq!(b, [-3.140_625]);
    }
}
