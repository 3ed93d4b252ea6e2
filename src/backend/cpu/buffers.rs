//! Everything a pass writes, allocated once at start: activations, the KV pool, logits.

use super::level::Level;
use super::linear::Acts;
use super::memory::Shared;
use super::model::Model;
use super::pack::Packed;
use super::rows::{QuantisedRow, quantise_row};

/// Wanted positions whose logits are held at once; more are taken in turns.
pub const LOGIT_ROWS: usize = 64;

/// Inputs of a matrix product, `[rows][cols]`, in the forms that its matrices read.
pub struct ActBuffer {
    cols: usize,
    float: bool,
    block: bool,
    x: Shared<f32>,
    q: Shared<i8>,
    d: Shared<f32>,
    s: Shared<f32>,
    excess: Shared<i32>,
}

impl ActBuffer {
    /// Room for `rows` rows that feed `matrices`; `None` when there is no memory.
    fn new<'a>(rows: usize, cols: usize, matrices: impl Iterator<Item = &'a Packed> + Clone) -> Option<Self> {
        let block = matrices.clone().any(|m| m.kind().is_block());
        let float = matrices.clone().any(|m| !m.kind().is_block());
        let (quants, scales) = if block { (rows * cols, rows * (cols / 32)) } else { (0, 0) };
        Some(Self {
            cols,
            float,
            block,
            x: Shared::zeroed(rows * cols)?,
            q: Shared::zeroed(quants)?,
            d: Shared::zeroed(scales)?,
            s: Shared::zeroed(scales)?,
            excess: Shared::zeroed(scales)?,
        })
    }

    /// The rows from `row` on, for a kernel; `rows` of them exist.
    pub fn acts(&self, row: usize, rows: usize) -> Acts {
        let (cols, blocks) = (self.cols, self.cols / 32);
        let (q, s) = if self.block { (cols, blocks) } else { (0, 0) };
        Acts {
            cols,
            x: self.x.ptr(row * cols, rows * cols),
            q: self.q.ptr(row * q, rows * q),
            d: self.d.ptr(row * s, rows * s),
            s: self.s.ptr(row * s, rows * s),
            excess: self.excess.ptr(row * s, rows * s),
        }
    }

    /// The f32 form of inputs `at..at+count` of a row, to write before `finish`.
    ///
    /// # Safety
    /// No other thread touches them in this phase.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn floats(&self, row: usize, at: usize, count: usize) -> &mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { self.x.write(row * self.cols + at, count) }
    }

    /// Where input `at` of a row lies in its f32 form, `count` floats long.
    pub fn place(&self, row: usize, at: usize, count: usize) -> *mut f32 {
        self.x.ptr(row * self.cols + at, count)
    }

    /// Puts `values` in as inputs `at..` of a row, in every form that is read. Block forms need whole blocks.
    ///
    /// # Safety
    /// No other thread touches them in this phase.
    pub unsafe fn put(&self, level: Level, row: usize, at: usize, values: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.float {
                self.floats(row, at, values.len()).copy_from_slice(values);
            }
            self.quantise(level, row, at, values);
        }
    }

    /// Makes the block form of inputs `at..at+count` from the f32 form that `floats` gave out.
    ///
    /// # Safety
    /// No other thread touches them in this phase.
    pub unsafe fn finish(&self, level: Level, row: usize, at: usize, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.quantise(level, row, at, self.x.read(row * self.cols + at, count)) }
    }

    unsafe fn quantise(&self, level: Level, row: usize, at: usize, values: &[f32]) {
        if !self.block {
            return;
        }
        let (first, count) = (row * (self.cols / 32) + at / 32, values.len() / 32);
        // SAFETY: the caller's promise.
        let out = unsafe {
            QuantisedRow {
                q: self.q.write(row * self.cols + at, values.len()),
                d: self.d.write(first, count),
                s: self.s.write(first, count),
                excess: self.excess.write(first, count),
            }
        };
        quantise_row(level, values, out);
    }
}

/// The buffers of one backend for passes of at most `rows` token rows.
pub struct Buffers {
    /// Residual stream `[rows][hidden]`.
    pub x: Shared<f32>,
    /// Normalised residual, input of qkv and of gate and up.
    pub normed: ActBuffer,
    /// Queries, keys and values `[rows][q_dim + 2·kv_dim]`.
    pub qkv: Shared<f32>,
    /// Attention output, input of wo.
    pub attended: ActBuffer,
    /// SwiGLU output, input of w_down.
    pub gated: ActBuffer,
    /// Rotary cos `[rows][head_dim/2]`.
    pub cos: Shared<f32>,
    /// Rotary sin.
    pub sin: Shared<f32>,
    /// Normalised wanted rows, input of the vocabulary projection.
    pub finals: ActBuffer,
    /// Logits `[LOGIT_ROWS][vocab]`.
    pub logits: Shared<f32>,
    /// Keys `[page][layer][kv_head][head_dim][16]`.
    pub keys: Shared<f32>,
    /// Values `[page][layer][kv_head][16][head_dim]`.
    pub values: Shared<f32>,
}

impl Buffers {
    /// Allocates all; `None` when there is no memory.
    pub fn new(model: &Model, rows: usize, pages: usize) -> Option<Self> {
        let g = &model.geometry;
        let kv = pages.checked_mul(g.layers)?.checked_mul(g.kv_dim() * 16)?;
        let wanted = rows.min(LOGIT_ROWS);
        let residual = model.layers.iter().flat_map(|l| [&l.wq, &l.wk, &l.wv, &l.w_gate, &l.w_up]);
        Some(Self {
            x: Shared::zeroed(rows * g.hidden)?,
            normed: ActBuffer::new(rows, g.hidden, residual)?,
            qkv: Shared::zeroed(rows * (g.q_dim() + 2 * g.kv_dim()))?,
            attended: ActBuffer::new(rows, g.q_dim(), model.layers.iter().map(|l| &l.wo))?,
            gated: ActBuffer::new(rows, g.ffn, model.layers.iter().map(|l| &l.w_down))?,
            cos: Shared::zeroed(rows * g.head_dim / 2)?,
            sin: Shared::zeroed(rows * g.head_dim / 2)?,
            finals: ActBuffer::new(wanted, g.hidden, std::iter::once(model.head()))?,
            logits: Shared::zeroed(wanted * g.vocab)?,
            keys: Shared::zeroed(kv)?,
            values: Shared::zeroed(kv)?,
        })
    }

    /// Fills with NaN what a step must write before it reads it: activations, logits, and `pages` of `floats` floats of K and of V.
    ///
    /// # Safety
    /// No thread is inside a pass.
    pub unsafe fn poison(&self, pages: impl Iterator<Item = usize>, floats: usize) {
        let activations = [&self.normed.x, &self.attended.x, &self.gated.x, &self.finals.x];
        for buffer in activations.into_iter().chain([&self.x, &self.qkv, &self.cos, &self.sin, &self.logits]) {
            // SAFETY: the caller's promise.
            unsafe { buffer.write(0, buffer.len()) }.fill(f32::NAN);
        }
        for page in pages {
            for pool in [&self.keys, &self.values] {
                // SAFETY: the caller's promise.
                unsafe { pool.write(page * floats, floats) }.fill(f32::NAN);
            }
        }
    }
}
