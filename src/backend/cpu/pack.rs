//! Weights as the kernels read them: tiles of 16 output rows, interleaved so that a vector lane is an output row.
//!
//! | kind | one tile |
//! |---|---|
//! | F32, F16, Bf16 | for each input k: 16 weights |
//! | Int8 | for each input k: 16 i8; then 16 row scales (f32) |
//! | Q8_0 | for each block: 8 vectors of 16 lanes × 4 bytes (q + 128, inputs 4j..4j+4); then for each block 16 d (f16) |
//! | Q4_0 | for each block: 4 such vectors of nibbles (low: inputs 4j.., high: 16+4j..); then for each block 16 d |
//! | Q4_1 | as Q4_0; then for each block 16 d and 16 m |
//!
//! Rows past the end are zero. The bytes are those of the file, moved; int8 and dequantised rows are made here, at load.

use super::memory::{Arena, Region};
use crate::arith::quant::{dequantise_row, quantise_int8_row};
use crate::model::{Matrix, MatrixFormat, Profile};

/// Rows of one tile.
pub const TILE: usize = 16;

/// How a packed matrix multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// f32 order, f32 weights.
    F32,
    /// f32 order, halves.
    F16,
    /// f32 order, bfloat16.
    Bf16,
    /// f32 order over f32(q), row scale last.
    Int8,
    /// q8 order.
    Q8_0,
    /// q8 order.
    Q4_0,
    /// q8 order with a minimum.
    Q4_1,
}

impl Kind {
    fn of(format: MatrixFormat, profile: Profile) -> Self {
        match (profile, format) {
            (Profile::F32, _) => Kind::F32,
            (Profile::Int8, _) => Kind::Int8,
            (Profile::Q8, MatrixFormat::F32) => Kind::F32,
            (Profile::Q8, MatrixFormat::F16) => Kind::F16,
            (Profile::Q8, MatrixFormat::Bf16) => Kind::Bf16,
            (Profile::Q8, MatrixFormat::Q8_0) => Kind::Q8_0,
            (Profile::Q8, MatrixFormat::Q4_0) => Kind::Q4_0,
            (Profile::Q8, MatrixFormat::Q4_1) => Kind::Q4_1,
        }
    }

    /// Whether it multiplies quantised activations.
    pub const fn is_block(self) -> bool {
        matches!(self, Kind::Q8_0 | Kind::Q4_0 | Kind::Q4_1)
    }

    /// (bytes of quants, bytes of scales) of one block of a tile.
    pub const fn block_bytes(self) -> (usize, usize) {
        match self {
            Kind::Q8_0 => (512, 32),
            Kind::Q4_0 => (256, 32),
            Kind::Q4_1 => (256, 64),
            Kind::F32 | Kind::F16 | Kind::Bf16 | Kind::Int8 => (0, 0),
        }
    }

    /// Bytes of one tile of `cols` inputs, a multiple of 64.
    pub const fn tile_bytes(self, cols: usize) -> usize {
        let bytes = match self {
            Kind::F32 => cols * TILE * 4,
            Kind::F16 | Kind::Bf16 => cols * TILE * 2,
            Kind::Int8 => cols * TILE + TILE * 4,
            Kind::Q8_0 | Kind::Q4_0 | Kind::Q4_1 => {
                let (quants, scales) = self.block_bytes();
                cols / 32 * (quants + scales)
            }
        };
        bytes.next_multiple_of(64)
    }
}

/// A matrix `[rows, cols]` in tiles.
pub struct Packed {
    kind: Kind,
    rows: usize,
    cols: usize,
    data: Region,
}

impl Packed {
    /// Bytes that `new` will take from its arena; `None` when they cannot be counted.
    pub fn size(matrix: &Matrix, profile: Profile) -> Option<usize> {
        let kind = Kind::of(matrix.format, profile);
        matrix.rows.div_ceil(TILE).checked_mul(kind.tile_bytes(matrix.cols))
    }

    /// Packs a matrix for a profile.
    ///
    /// # Errors
    /// In words: no memory, or a row length that the format cannot have.
    pub fn new(matrix: &Matrix, profile: Profile, arena: &mut Arena) -> Result<Self, String> {
        let kind = Kind::of(matrix.format, profile);
        let (rows, cols) = (matrix.rows, matrix.cols);
        let (weights, bytes) = matrix.format.block();
        if !cols.is_multiple_of(weights) || matrix.bytes.len() != rows * (cols / weights) * bytes {
            return Err(format!(
                "a {:?} matrix of {rows}×{cols} cannot have {} bytes",
                matrix.format,
                matrix.bytes.len()
            ));
        }
        let size = Self::size(matrix, profile).ok_or("a matrix is too large")?;
        let data = arena.take(size).ok_or_else(|| format!("no room for {size} bytes of weights"))?;
        let mut packed = Self { kind, rows, cols, data };
        for r in 0..rows {
            packed.put_row(matrix, r);
        }
        Ok(packed)
    }

    fn put_row(&mut self, matrix: &Matrix, r: usize) {
        let (kind, cols, lane) = (self.kind, self.cols, r % TILE);
        let tile_bytes = kind.tile_bytes(cols);
        let tile = &mut self.data.as_mut_slice()[r / TILE * tile_bytes..][..tile_bytes];
        match kind {
            Kind::F32 => {
                let mut row = vec![0.0f32; cols];
                dequantise_row(matrix, r, &mut row);
                for (k, w) in row.iter().enumerate() {
                    tile[(k * TILE + lane) * 4..][..4].copy_from_slice(&w.to_le_bytes());
                }
            }
            Kind::F16 | Kind::Bf16 => {
                for (k, w) in matrix.row(r).chunks_exact(2).enumerate() {
                    tile[(k * TILE + lane) * 2..][..2].copy_from_slice(w);
                }
            }
            Kind::Int8 => {
                let mut row = vec![0.0f32; cols];
                dequantise_row(matrix, r, &mut row);
                let row = quantise_int8_row(&row);
                for (k, q) in row.q.iter().enumerate() {
                    tile[k * TILE + lane] = *q as u8;
                }
                tile[cols * TILE + lane * 4..][..4].copy_from_slice(&row.s.to_le_bytes());
            }
            Kind::Q8_0 | Kind::Q4_0 | Kind::Q4_1 => put_blocks(kind, matrix.row(r), tile, lane),
        }
    }

    /// How it multiplies.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Tiles of 16 rows.
    pub fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE)
    }

    /// The bytes of one tile.
    pub fn tile(&self, index: usize) -> &[u8] {
        let bytes = self.kind.tile_bytes(self.cols);
        &self.data.as_slice()[index * bytes..(index + 1) * bytes]
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Dequantises row `r` into `out` `[cols]`: the embedding of a token. Int8: f32(q)·s.
    pub fn unpack_row(&self, r: usize, out: &mut [f32]) {
        let (tile, lane) = (self.tile(r / TILE), r % TILE);
        let f32_at = |at: usize| f32::from_le_bytes([tile[at], tile[at + 1], tile[at + 2], tile[at + 3]]);
        let half_at = |at: usize| u16::from_le_bytes([tile[at], tile[at + 1]]);
        match self.kind {
            Kind::F32 => out.iter_mut().enumerate().for_each(|(k, o)| *o = f32_at((k * TILE + lane) * 4)),
            Kind::F16 => out
                .iter_mut()
                .enumerate()
                .for_each(|(k, o)| *o = half::f16::from_bits(half_at((k * TILE + lane) * 2)).to_f32()),
            Kind::Bf16 => out
                .iter_mut()
                .enumerate()
                .for_each(|(k, o)| *o = half::bf16::from_bits(half_at((k * TILE + lane) * 2)).to_f32()),
            Kind::Int8 => {
                let s = f32_at(self.cols * TILE + lane * 4);
                out.iter_mut().enumerate().for_each(|(k, o)| *o = f32::from(tile[k * TILE + lane] as i8) * s);
            }
            Kind::Q8_0 | Kind::Q4_0 | Kind::Q4_1 => self.unpack_blocks(tile, lane, out),
        }
    }

    fn unpack_blocks(&self, tile: &[u8], lane: usize, out: &mut [f32]) {
        let (quants, scales) = self.kind.block_bytes();
        let blocks = self.cols / 32;
        for (b, out) in out.chunks_exact_mut(32).enumerate() {
            let q = &tile[b * quants..][..quants];
            let scale = &tile[blocks * quants + b * scales..][..scales];
            let half = |at: usize| half::f16::from_le_bytes([scale[at], scale[at + 1]]).to_f32();
            let d = half(lane * 2);
            for (i, o) in out.iter_mut().enumerate() {
                let byte = |i: usize| q[i / 4 * 64 + lane * 4 + i % 4];
                *o = match self.kind {
                    Kind::Q8_0 => f32::from((byte(i) ^ 0x80) as i8) * d,
                    Kind::Q4_0 => f32::from(nibble_at(&byte, i) as i8 - 8) * d,
                    _ => f32::from(nibble_at(&byte, i)) * d + half(32 + lane * 2),
                };
            }
        }
    }
}

/// Input i of a block of nibbles.
fn nibble_at(byte: &impl Fn(usize) -> u8, i: usize) -> u8 {
    if i < 16 { byte(i) & 15 } else { byte(i - 16) >> 4 }
}

/// Moves one stored row of blocks into its lane.
fn put_blocks(kind: Kind, row: &[u8], tile: &mut [u8], lane: usize) {
    let (quants, scales) = kind.block_bytes();
    let (size, header) = match kind {
        Kind::Q8_0 => (34, 2),
        Kind::Q4_0 => (18, 2),
        _ => (20, 4),
    };
    let flip = if kind == Kind::Q8_0 { 0x80 } else { 0 };
    let blocks = row.len() / size;
    for (b, block) in row.chunks_exact(size).enumerate() {
        for (i, byte) in block[header..].iter().enumerate() {
            tile[b * quants + i / 4 * 64 + lane * 4 + i % 4] = byte ^ flip;
        }
        let at = blocks * quants + b * scales;
        for (part, half) in block[..header].chunks_exact(2).enumerate() {
            tile[at + part * 32 + lane * 2..][..2].copy_from_slice(half);
        }
    }
}
