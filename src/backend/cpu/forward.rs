//! The forward pass as every compute thread runs it: phases between barriers, each cut into units that threads claim.
//!
//! In a phase every buffer element is written by the thread that claimed its unit and read by nobody else, or read only. That is
//! the promise behind each `SAFETY: phase` below. Which thread computes a unit, and how many rows share a kernel call, moves no bit.

use std::ops::Range;
use std::sync::Mutex;
use std::time::Instant;

use super::attention::{AttentionBlock, AttentionScratch, PAGE, PagedHead, attention};
use super::buffers::{ActBuffer, Buffers, LOGIT_ROWS};
use super::level::Level;
use super::linear::linear_tile;
use super::memory::Shared;
use super::model::{Layer, Model};
use super::pack::{Packed, TILE};
use super::pass::{Pass, Wanted};
use super::rows::{norm_row, rotate, swiglu_rows};
use super::select::{SelectScratch, highest, logprobs, select, select_adjusted};
use super::threads::{Abandoned, Barrier, Claims, lock};
use crate::arith::attention::score_scale;
use crate::backend::{HostLogits, SlotBinding, TokenLogprobs};

/// Token rows that one unit of a linear phase takes.
const CHUNK: usize = 64;

/// Outputs of a unit of gate and up: two tiles, one quantisation block.
const PAIR: usize = 2 * TILE;

/// Phases of a layer, and of one turn of the vocabulary projection.
const LAYER_PHASES: usize = 8;
const TURN_PHASES: usize = 3;

/// What one wanted position yielded.
#[derive(Debug)]
pub struct Outcome {
    pub token: u32,
    pub finite: bool,
    pub logprobs: Option<TokenLogprobs>,
    pub logits: Option<Vec<f32>>,
}

/// Room of one thread.
pub struct Scratch {
    gate: Vec<f32>,
    up: Vec<f32>,
    attention: AttentionScratch,
    select: SelectScratch,
}

impl Default for Scratch {
    fn default() -> Self {
        let tile = vec![0.0; CHUNK * PAIR];
        Self { gate: tile.clone(), up: tile, attention: Default::default(), select: Default::default() }
    }
}

/// Everything that the threads of one backend share.
pub struct Engine {
    level: Level,
    attention_level: Level,
    model: Model,
    buffers: Buffers,
    threads: usize,
    barrier: Barrier,
    claims: Vec<Claims>,
    inverse_frequencies: Vec<f64>,
    scale: f32,
}

/// The phases of one pass, counted by each thread alike.
struct Phases<'a> {
    engine: &'a Engine,
    index: usize,
}

impl Phases<'_> {
    /// Runs `work` on units that this thread claims, then waits for the others.
    fn run(&mut self, units: usize, mut work: impl FnMut(usize)) -> Result<(), Abandoned> {
        let (claims, threads) = (&self.engine.claims[self.index], self.engine.threads);
        let grain = (units / (threads * 8)).clamp(1, 64);
        while let Some(run) = claims.next(units, grain) {
            run.for_each(&mut work);
        }
        self.index += 1;
        self.engine.barrier.wait()
    }
}

/// Where the outputs of a linear phase go.
#[derive(Clone, Copy)]
enum Out<'a> {
    /// Stored at `[row][offset + output]` of a buffer with this stride.
    Store(&'a Shared<f32>, usize),
    /// Added to the residual stream.
    Residual,
}

/// The instruction sets of the kernels.
#[derive(Clone, Copy)]
pub struct Levels {
    pub attention: Level,
    pub others: Level,
}

impl Engine {
    /// Shares `model` and `buffers` among `threads` threads.
    pub fn new(levels: Levels, model: Model, buffers: Buffers, threads: usize, max_rows: usize) -> Self {
        let g = &model.geometry;
        let phases = 1 + LAYER_PHASES * g.layers + TURN_PHASES * max_rows.div_ceil(LOGIT_ROWS);
        let exponent = |i: usize| libm::pow(g.rope_base, -2.0 * i as f64 / g.head_dim as f64);
        Self {
            level: levels.others,
            attention_level: levels.attention,
            threads,
            barrier: Barrier::new(threads),
            claims: (0..phases).map(|_| Claims::default()).collect(),
            inverse_frequencies: (0..g.head_dim / 2).map(exponent).collect(),
            scale: score_scale(g.head_dim),
            model,
            buffers,
        }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Fills with NaN what a step with these bindings must not read.
    ///
    /// # Safety
    /// No thread is inside a pass.
    pub unsafe fn poison(&self, bindings: &[SlotBinding]) {
        let g = &self.model.geometry;
        let pages = bindings.iter().flat_map(|b| &b.pages).map(|&p| p as usize);
        // SAFETY: the caller's promise.
        unsafe { self.buffers.poison(pages, g.layers * g.kv_dim() * PAGE) }
    }

    /// The barrier, to break it up.
    pub fn barrier(&self) -> &Barrier {
        &self.barrier
    }

    /// Bytes of the KV pool.
    pub fn kv_bytes(&self) -> usize {
        self.buffers.keys.bytes() + self.buffers.values.bytes()
    }

    /// Tokens of an attention block: about 32 queries share what a page brings into the cache.
    pub fn block_tokens(&self) -> usize {
        (32 / self.model.geometry.group()).clamp(1, 8)
    }

    /// Makes every unit claimable; while no thread is in a pass.
    pub fn reset(&self) {
        self.claims.iter().for_each(Claims::reset);
    }

    /// Runs the pass together with the other threads; outcomes come by index of `pass.wanted`. Returns µs spent in selection.
    ///
    /// # Errors
    /// Another thread has panicked.
    pub fn run(
        &self,
        pass: &Pass,
        outcomes: &Mutex<Vec<(usize, Outcome)>>,
        scratch: &mut Scratch,
    ) -> Result<f64, Abandoned> {
        let mut phases = Phases { engine: self, index: 0 };
        let rows = pass.tokens.len();
        phases.run(rows, |t| self.embed(pass, t))?;
        for (index, layer) in self.model.layers.iter().enumerate() {
            phases.run(rows, |t| self.norm(t, &layer.attn_norm))?;
            self.qkv(&mut phases, layer, rows, scratch)?;
            let heads = self.model.geometry.kv_heads;
            phases.run(rows * heads, |u| self.rotate_and_store(pass, index, u / heads, u % heads))?;
            phases.run(pass.blocks.len(), |b| self.attend(pass, index, b, &mut scratch.attention))?;
            self.linear(&mut phases, &[(&layer.wo, 0)], &self.buffers.attended, rows, Out::Residual, scratch)?;
            phases.run(rows, |t| self.norm(t, &layer.ffn_norm))?;
            self.gate_up(&mut phases, layer, rows, scratch)?;
            self.linear(&mut phases, &[(&layer.w_down, 0)], &self.buffers.gated, rows, Out::Residual, scratch)?;
        }
        let mut selection_us = 0.0;
        for (turn, wanted) in pass.wanted.chunks(LOGIT_ROWS).enumerate() {
            phases.run(wanted.len(), |w| self.final_norm(w, wanted[w].token))?;
            let vocab = self.model.geometry.vocab;
            let out = Out::Store(&self.buffers.logits, vocab);
            self.linear(&mut phases, &[(self.model.head(), 0)], &self.buffers.finals, wanted.len(), out, scratch)?;
            let begun = Instant::now();
            phases.run(wanted.len(), |w| {
                let outcome = self.select(pass, w, &wanted[w], &mut scratch.select);
                lock(outcomes).push((turn * LOGIT_ROWS + w, outcome));
            })?;
            selection_us += begun.elapsed().as_secs_f64() * 1e6;
        }
        Ok(selection_us)
    }

    fn embed(&self, pass: &Pass, t: usize) {
        let (hidden, pairs) = (self.model.geometry.hidden, self.inverse_frequencies.len());
        // SAFETY: phase: token row t is this unit's.
        let (x, cos, sin) = unsafe {
            let b = &self.buffers;
            (b.x.write(t * hidden, hidden), b.cos.write(t * pairs, pairs), b.sin.write(t * pairs, pairs))
        };
        self.model.embedding.unpack_row(pass.tokens[t] as usize, x);
        let position = pass.position(t) as f64;
        for ((c, s), f) in cos.iter_mut().zip(sin).zip(&self.inverse_frequencies) {
            let angle = position * f;
            (*c, *s) = (libm::cos(angle) as f32, libm::sin(angle) as f32);
        }
    }

    fn norm(&self, t: usize, weights: &[f32]) {
        let (g, out) = (&self.model.geometry, &self.buffers.normed);
        // SAFETY: phase: row t of `normed` is this unit's, `x` is only read.
        unsafe {
            let x = self.buffers.x.read(t * g.hidden, g.hidden);
            norm_row(self.level, x, weights, g.rms_eps, out.floats(t, 0, g.hidden));
            out.finish(self.level, t, 0, g.hidden);
        }
    }

    fn final_norm(&self, w: usize, token: usize) {
        let (g, out) = (&self.model.geometry, &self.buffers.finals);
        // SAFETY: phase: row w of `finals` is this unit's, `x` is only read.
        unsafe {
            let x = self.buffers.x.read(token * g.hidden, g.hidden);
            norm_row(self.level, x, &self.model.final_norm, g.rms_eps, out.floats(w, 0, g.hidden));
            out.finish(self.level, w, 0, g.hidden);
        }
    }

    fn qkv(&self, phases: &mut Phases<'_>, layer: &Layer, rows: usize, scratch: &mut Scratch) -> Result<(), Abandoned> {
        let g = &self.model.geometry;
        let matrices = [(&layer.wq, 0), (&layer.wk, g.q_dim()), (&layer.wv, g.q_dim() + g.kv_dim())];
        let out = Out::Store(&self.buffers.qkv, g.q_dim() + 2 * g.kv_dim());
        self.linear(phases, &matrices, &self.buffers.normed, rows, out, scratch)
    }

    /// One phase: every matrix times every row; a unit is one tile times `CHUNK` rows.
    fn linear(
        &self,
        phases: &mut Phases<'_>,
        matrices: &[(&Packed, usize)],
        acts: &ActBuffer,
        rows: usize,
        out: Out<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), Abandoned> {
        let chunks = rows.div_ceil(CHUNK);
        let tiles: usize = matrices.iter().map(|(m, _)| m.tiles()).sum();
        phases.run(tiles * chunks, |unit| {
            let mut tile = unit / chunks;
            let chunk = unit % chunks * CHUNK..rows.min((unit % chunks + 1) * CHUNK);
            for &(matrix, offset) in matrices {
                if tile < matrix.tiles() {
                    return self.linear_unit(matrix, tile, acts, chunk, out, offset, &mut scratch.gate);
                }
                tile -= matrix.tiles();
            }
        })
    }

    #[allow(clippy::too_many_arguments)]
    fn linear_unit(
        &self,
        matrix: &Packed,
        tile: usize,
        acts: &ActBuffer,
        rows: Range<usize>,
        out: Out<'_>,
        offset: usize,
        scratch: &mut [f32],
    ) {
        let (first, count) = (tile * TILE, rows.len());
        let width = TILE.min(matrix.rows() - first);
        let weights = matrix.tile(tile).as_ptr();
        let inputs = acts.acts(rows.start, count);
        if let (Out::Store(buffer, stride), TILE) = (out, width) {
            let at = buffer.ptr(rows.start * stride + offset + first, (count - 1) * stride + TILE);
            // SAFETY: phase: these outputs are this unit's; the tile and the inputs are whole.
            return unsafe { linear_tile(self.level, matrix.kind(), weights, inputs, count, at, stride) };
        }
        assert!(scratch.len() >= count * TILE, "a chunk of outputs fits the scratch");
        // SAFETY: the tile and the inputs are whole, the scratch is long enough.
        unsafe { linear_tile(self.level, matrix.kind(), weights, inputs, count, scratch.as_mut_ptr(), TILE) };
        let hidden = self.model.geometry.hidden;
        for (t, values) in rows.zip(scratch.chunks_exact(TILE)) {
            let values = &values[..width];
            // SAFETY: phase: these outputs are this unit's.
            match out {
                Out::Store(buffer, stride) => unsafe {
                    buffer.write(t * stride + offset + first, width).copy_from_slice(values);
                },
                Out::Residual => unsafe {
                    let x = self.buffers.x.write(t * hidden + first, width);
                    x.iter_mut().zip(values).for_each(|(x, v)| *x += v);
                },
            }
        }
    }

    /// Gate, up and SwiGLU: a unit is 32 outputs of both times `CHUNK` rows.
    fn gate_up(
        &self,
        phases: &mut Phases<'_>,
        layer: &Layer,
        rows: usize,
        scratch: &mut Scratch,
    ) -> Result<(), Abandoned> {
        let (chunks, ffn) = (rows.div_ceil(CHUNK), self.model.geometry.ffn);
        phases.run(ffn.div_ceil(PAIR) * chunks, |unit| {
            let (pair, chunk) = (unit / chunks, unit % chunks);
            let rows = chunk * CHUNK..rows.min((chunk + 1) * CHUNK);
            let inputs = self.buffers.normed.acts(rows.start, rows.len());
            for (matrix, out) in [(&layer.w_gate, &mut scratch.gate), (&layer.w_up, &mut scratch.up)] {
                for tile in (pair * 2..pair * 2 + 2).filter(|&t| t < matrix.tiles()) {
                    let (weights, at) = (matrix.tile(tile).as_ptr(), out[tile % 2 * TILE..].as_mut_ptr());
                    // SAFETY: the tile and the inputs are whole; the scratch holds CHUNK rows of PAIR.
                    unsafe { linear_tile(self.level, matrix.kind(), weights, inputs, rows.len(), at, PAIR) }
                }
            }
            let used = rows.len() * PAIR;
            swiglu_rows(self.level, &mut scratch.gate[..used], &scratch.up[..used]);
            let width = PAIR.min(ffn - pair * PAIR);
            for (t, values) in rows.zip(scratch.gate.chunks_exact(PAIR)) {
                // SAFETY: phase: these inputs of the next product are this unit's.
                unsafe { self.buffers.gated.put(self.level, t, pair * PAIR, &values[..width]) }
            }
        })
    }

    /// Floats before the K (or V) of a page, layer and KV head.
    fn kv_at(&self, page: usize, layer: usize, head: usize) -> usize {
        let g = &self.model.geometry;
        ((page * g.layers + layer) * g.kv_heads + head) * g.head_dim * PAGE
    }

    /// Rotates the queries and the key of one token and KV head; writes K and V to their page.
    fn rotate_and_store(&self, pass: &Pass, layer: usize, t: usize, head: usize) {
        let (g, b) = (&self.model.geometry, &self.buffers);
        let (dim, pairs, group) = (g.head_dim, g.head_dim / 2, g.group());
        let row = t * (g.q_dim() + 2 * g.kv_dim());
        let position = pass.position(t);
        let table = &pass.rows[pass.row_of[t] as usize].table;
        let at = self.kv_at(table[position / PAGE] as usize, layer, head);
        let slot = position % PAGE;
        // SAFETY: phase: the heads of this unit are its own, and so are its slots of the page.
        unsafe {
            let (cos, sin) = (b.cos.read(t * pairs, pairs), b.sin.read(t * pairs, pairs));
            for q in b.qkv.write(row + head * group * dim, group * dim).chunks_exact_mut(dim) {
                rotate(self.level, q, cos, sin, g.rope_pairing);
            }
            let k = b.qkv.write(row + g.q_dim() + head * dim, dim);
            rotate(self.level, k, cos, sin, g.rope_pairing);
            let keys = b.keys.ptr(at, dim * PAGE);
            for (d, k) in k.iter().enumerate() {
                keys.add(d * PAGE + slot).write(*k);
            }
            let v = b.qkv.read(row + g.q_dim() + g.kv_dim() + head * dim, dim);
            b.values.write(at + slot * dim, dim).copy_from_slice(v);
        }
    }

    fn attend(&self, pass: &Pass, layer: usize, block: usize, scratch: &mut AttentionScratch) {
        let (g, b, block) = (&self.model.geometry, &self.buffers, pass.blocks[block]);
        let (head, tokens, width) = (block.head as usize, block.tokens as usize, g.group() * g.head_dim);
        let row = &pass.rows[block.row as usize];
        let first = row.first + block.at as usize;
        let (q_stride, out_stride) = (g.q_dim() + 2 * g.kv_dim(), g.q_dim());
        let page_stride = self.kv_at(1, 0, 0);
        let (from, all) = (self.kv_at(0, layer, head), b.keys.bytes() / 4);
        let work = AttentionBlock {
            q: b.qkv.ptr(first * q_stride + head * width, (tokens - 1) * q_stride + width),
            out: b.attended.place(first, head * width, (tokens - 1) * out_stride + width),
            q_stride,
            out_stride,
            tokens,
            group: g.group(),
            head_dim: g.head_dim,
            position: row.position + block.at as usize,
            table: &row.table,
            k: PagedHead { base: b.keys.ptr(from, all - from), page_stride },
            v: PagedHead { base: b.values.ptr(from, all - from), page_stride },
            segment: self.model.profile.attention_segment(),
            scale: self.scale,
        };
        // SAFETY: the validator has checked the table; K and V up to these positions are written.
        unsafe {
            attention(self.attention_level, &work, scratch);
            for t in first..first + tokens {
                b.attended.finish(self.level, t, head * width, width);
            }
        }
    }

    fn select(&self, pass: &Pass, w: usize, wanted: &Wanted, scratch: &mut SelectScratch) -> Outcome {
        let vocab = self.model.geometry.vocab;
        // SAFETY: phase: logits are only read.
        let logits = unsafe { self.buffers.logits.read(w * vocab, vocab) };
        let row = &pass.rows[wanted.row];
        let host = (row.host_logits == HostLogits::Yes).then(|| logits.to_vec());
        let Some(top) = highest(logits) else {
            return Outcome { token: 0, finite: false, logprobs: None, logits: host };
        };
        let token = match &row.adjust {
            None => select(self.level, logits, top, &row.sampling, wanted.offset, scratch),
            Some(adjusting) => select_adjusted(self.level, logits, adjusting, &row.sampling, wanted.offset, scratch),
        };
        let logprobs = row.logprobs.map(|n| logprobs(self.level, logits, top.1, token, n.into(), scratch));
        Outcome { token, finite: true, logprobs, logits: host }
    }
}
