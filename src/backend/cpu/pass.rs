//! A step made ready for the threads: tokens resolved, positions counted, attention cut into blocks. Also the state of the slots.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::threads::lock;
use crate::admission::RequestId;
use crate::backend::{Adjust, HostLogits, Input, LogprobsWanted, SamplingRow, Step, Want};

/// A slot between steps.
#[derive(Clone, Debug, Default)]
pub struct Slot {
    table: Arc<[u32]>,
    position: u32,
    last: u32,
    adjust: Option<Arc<Adjusting>>,
}

/// Penalties and bias of a slot, with how often it has selected each token.
#[derive(Debug)]
pub struct Adjusting {
    /// What the request asked for.
    pub adjust: Arc<Adjust>,
    /// Count by token id; changed between passes only.
    pub counts: Mutex<BTreeMap<u32, u32>>,
}

/// One row of the pass.
#[derive(Clone, Debug)]
pub struct PassRow {
    /// Whose.
    pub request: RequestId,
    /// Its slot.
    pub slot: u32,
    /// Its pages.
    pub table: Arc<[u32]>,
    /// Its first token row.
    pub first: usize,
    /// Absolute position of that.
    pub position: usize,
    /// Positions.
    pub len: usize,
    /// Which select.
    pub want: Want,
    /// How.
    pub sampling: SamplingRow,
    /// What comes before that; absent in a row that scores.
    pub adjust: Option<Arc<Adjusting>>,
    /// Log-probabilities.
    pub logprobs: LogprobsWanted,
    /// Logits to the host.
    pub host_logits: HostLogits,
}

/// Consecutive tokens of one row whose attention over one KV head is one piece of work.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Row of the pass.
    pub row: u32,
    /// KV head.
    pub head: u32,
    /// First token, from the row's first.
    pub at: u32,
    /// Tokens.
    pub tokens: u32,
}

/// A position that selects.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Row of the pass.
    pub row: usize,
    /// Token row.
    pub token: usize,
    /// Index among the row's wanted positions.
    pub offset: u32,
}

/// One forward pass, read by every thread.
#[derive(Clone, Debug, Default)]
pub struct Pass {
    /// The step's id.
    pub id: u64,
    /// Rows.
    pub rows: Vec<PassRow>,
    /// Token of every token row.
    pub tokens: Vec<u32>,
    /// Row of every token row.
    pub row_of: Vec<u32>,
    /// Attention work, most expensive first.
    pub blocks: Vec<Block>,
    /// Wanted positions in row order.
    pub wanted: Vec<Wanted>,
}

impl Pass {
    /// Applies the step's bindings to the slots and reads its rows. `step` passed the validator.
    pub fn new(step: Step, slots: &mut [Slot], kv_heads: usize, block_tokens: usize) -> Self {
        for binding in step.bindings {
            let adjust = binding.adjust.map(|adjust| Arc::new(Adjusting { adjust, counts: Mutex::default() }));
            slots[binding.slot as usize] = Slot { table: binding.pages.into(), position: 0, last: 0, adjust };
        }
        let mut pass = Self { id: step.id, ..Self::default() };
        let mut given = step.tokens.into_iter();
        for (index, row) in step.rows.into_iter().enumerate() {
            let slot = &mut slots[row.slot as usize];
            let (first, len) = (pass.tokens.len(), row.len as usize);
            match row.input {
                Input::Tokens => pass.tokens.extend(given.by_ref().take(len)),
                Input::DeviceLast => pass.tokens.push(slot.last),
            }
            pass.row_of.resize(first + len, index as u32);
            let offsets = match row.want {
                Want::None => 0..0,
                Want::Last => len - 1..len,
                Want::All => 0..len,
            };
            for (offset, at) in offsets.enumerate() {
                pass.wanted.push(Wanted { row: index, token: first + at, offset: offset as u32 });
            }
            pass.rows.push(PassRow {
                request: row.request,
                slot: row.slot,
                table: Arc::clone(&slot.table),
                first,
                position: slot.position as usize,
                len,
                want: row.want,
                sampling: row.sampling,
                adjust: slot.adjust.clone().filter(|_| row.want == Want::Last),
                logprobs: row.logprobs,
                host_logits: row.host_logits,
            });
            slot.position += row.len;
        }
        pass.cut_attention(kv_heads, block_tokens);
        pass
    }

    fn cut_attention(&mut self, kv_heads: usize, block_tokens: usize) {
        for (index, row) in self.rows.iter().enumerate() {
            for at in (0..row.len).step_by(block_tokens) {
                let tokens = block_tokens.min(row.len - at) as u32;
                let block = |head| Block { row: index as u32, head: head as u32, at: at as u32, tokens };
                self.blocks.extend((0..kv_heads).map(block));
            }
        }
        let cost = |b: &Block| (self.rows[b.row as usize].position as u64 + u64::from(b.at)) * u64::from(b.tokens);
        self.blocks.sort_by_cached_key(|b| std::cmp::Reverse(cost(b)));
    }

    /// Absolute position of a token row.
    pub fn position(&self, token: usize) -> usize {
        let row = &self.rows[self.row_of[token] as usize];
        row.position + token - row.first
    }
}

/// Remembers the token that a row selected last, and counts it where its selection was adjusted.
pub fn remember(slots: &mut [Slot], row: &PassRow, token: u32) {
    slots[row.slot as usize].last = token;
    if let Some(adjusting) = &row.adjust {
        *lock(&adjusting.counts).entry(token).or_default() += 1;
    }
}
