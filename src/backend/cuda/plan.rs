//! Turns a checked step into the bytes that the device reads, and its shape into the key of a graph. Pure.

use crate::admission::RequestId;
use crate::backend::{HostLogits, Input, LogprobsWanted, Row, Rule, SamplingRow, Start, Step, Want};

use super::adjust::{self, AdjustedSlots};
use super::args::{FROM_DEVICE, SelectRow, StepRow};
use super::pass::PassShape;

/// What the host must remember of a row until its step is done.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// Whose.
    pub request: RequestId,
    /// First of its wanted positions.
    pub first: usize,
    /// Wanted positions.
    pub count: usize,
    /// Log-probabilities asked for.
    pub logprobs: LogprobsWanted,
    /// Whether logits are reported.
    pub host_logits: HostLogits,
}

impl Expected {
    /// Whether its logits travel to the host.
    pub fn needs_logits(&self) -> bool {
        self.logprobs.is_some() || self.host_logits == HostLogits::Yes
    }
}

/// A step ready to upload.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Shape of the pass.
    pub shape: PassShape,
    /// Bytes of the upload, bindings included.
    pub bytes: usize,
    /// Bindings in it.
    pub bindings: usize,
    /// Bindings with penalties or a bias, and where their words are, in bytes.
    pub adjusted: (usize, usize),
    /// Rows that yield something, in row order.
    pub expected: Vec<Expected>,
}

fn wanted(row: &Row) -> usize {
    match row.want {
        Want::None => 0,
        Want::Last => 1,
        Want::All => row.len as usize,
    }
}

/// Longest history that a tile of this step may see; without a position on the host it is the whole context.
fn history(step: &Step, context: usize) -> usize {
    let end = |row: &Row| match row.start {
        Start::Host(start) => start as usize + row.len as usize,
        Start::Device => context,
    };
    step.rows.iter().filter(|r| r.len > 1).map(end).max().unwrap_or(0)
}

/// How the wanted position `offset` of a row selects. The last one of them becomes the slot's last token.
fn sampling_row(row: &Row, offset: usize, adjusted: &AdjustedSlots) -> SelectRow {
    let SamplingRow { rule, seed, token_index, choice } = row.sampling;
    let base = SelectRow {
        seed,
        token_index: token_index.wrapping_add(offset as u32),
        choice,
        slot: row.slot,
        is_last: u32::from(offset + 1 == wanted(row)),
        adjusted: u32::from(row.want == Want::Last && adjusted.has(row.slot)),
        ..SelectRow::default()
    };
    match rule {
        Rule::Greedy => SelectRow { greedy: 1, ..base },
        Rule::Sampled { inv_temperature, top_k, top_p, min_p } => {
            SelectRow { top_p, top_k: top_k.map_or(0, |k| k.get()), inv_temperature, min_p, ..base }
        }
    }
}

/// Writes `step` into `buffer` (16-byte aligned, large enough for any checked step). `capacity` maps a history to the score capacity of a
/// tile, `tile_rows` a capacity to a tile's query rows; `adjusted` has followed this step; `lane` is the
/// host's buffer that takes the selected tokens.
pub fn write(
    step: &Step,
    context: usize,
    capacity: impl Fn(usize) -> usize,
    tile_rows: impl Fn(usize) -> usize,
    adjusted: &AdjustedSlots,
    lane: usize,
    buffer: &mut [u8],
) -> Plan {
    let longest = history(step, context);
    let capacity = if longest == 0 { 0 } else { capacity(longest) };
    let height = if longest == 0 { 1 } else { tile_rows(capacity) };
    let shape = PassShape {
        rows: step.rows.len(),
        tokens: step.token_rows(),
        wanted: step.rows.iter().map(wanted).sum(),
        singles: step.rows.iter().filter(|r| r.len == 1).count(),
        tiles: step.rows.iter().filter(|r| r.len > 1).map(|r| (r.len as usize).div_ceil(height)).sum(),
        capacity,
    };
    let layout = shape.layout();
    let mut expected = Vec::with_capacity(shape.rows);
    let (mut token, mut input, mut want, mut single, mut tile) = (0usize, 0usize, 0usize, 0usize, 0usize);
    for (index, row) in step.rows.iter().enumerate() {
        let len = row.len as usize;
        let from_host = row.input == Input::Tokens;
        let descriptor = StepRow {
            slot: row.slot,
            len: row.len,
            token: token as u32,
            start: match row.start {
                Start::Host(start) => start,
                Start::Device => FROM_DEVICE,
            },
            input: if from_host { input as u32 } else { FROM_DEVICE },
            reserved: [0; 3],
        };
        put(buffer, index * size_of::<StepRow>(), bytemuck::bytes_of(&descriptor));
        let count = wanted(row);
        if count > 0 {
            let (logprobs, host_logits) = (row.logprobs, row.host_logits);
            expected.push(Expected { request: row.request, first: want, count, logprobs, host_logits });
        }
        for offset in 0..count {
            let selection = SelectRow { lane: lane as u32, ..sampling_row(row, offset, adjusted) };
            put(buffer, layout.sampling + want * size_of::<SelectRow>(), bytemuck::bytes_of(&selection));
            let at = (token + len - count + offset) as u32;
            put(buffer, layout.gather + want * 4, &at.to_le_bytes());
            want += 1;
        }
        if len == 1 {
            put(buffer, layout.singles + single * 4, &(token as u32).to_le_bytes());
            single += 1;
        } else {
            for first in (0..len).step_by(height) {
                let entry = [(token + first) as u32, height.min(len - first) as u32];
                put(buffer, layout.tiles + tile * 8, bytemuck::bytes_of(&entry));
                tile += 1;
            }
        }
        token += len;
        input += if from_host { len } else { 0 };
    }
    put(buffer, layout.tokens, bytemuck::cast_slice(&step.tokens));
    let adjust_at = write_bindings(step, layout.end, buffer);
    let (words, bindings_adjusted) = adjust::words(step);
    put(buffer, adjust_at, bytemuck::cast_slice(&words));
    let bytes = adjust_at + 4 * words.len();
    Plan { shape, bytes, bindings: step.bindings.len(), adjusted: (bindings_adjusted, adjust_at), expected }
}

/// count, then (slot, pages, offset in words) a binding, then the pages; returns the end in bytes.
fn write_bindings(step: &Step, at: usize, buffer: &mut [u8]) -> usize {
    if step.bindings.is_empty() {
        return at;
    }
    put(buffer, at, &(step.bindings.len() as u32).to_le_bytes());
    let mut pages_at = 1 + 3 * step.bindings.len();
    for (i, binding) in step.bindings.iter().enumerate() {
        let head = [binding.slot, binding.pages.len() as u32, pages_at as u32];
        put(buffer, at + 4 * (1 + 3 * i), bytemuck::bytes_of(&head));
        put(buffer, at + 4 * pages_at, bytemuck::cast_slice(&binding.pages));
        pages_at += binding.pages.len();
    }
    at + 4 * pages_at
}

fn put(buffer: &mut [u8], at: usize, bytes: &[u8]) {
    buffer[at..at + bytes.len()].copy_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::{Adjust, SlotBinding};

    const SAMPLED: Rule = Rule::Sampled { inv_temperature: 0.5, top_k: None, top_p: 1 << 31, min_p: 0.25 };

    fn row(slot: u32, len: u32, want: Want, rule: Rule) -> Row {
        Row {
            request: RequestId(u64::from(slot)),
            slot,
            start: Start::Host(0),
            len,
            input: Input::Tokens,
            want,
            sampling: SamplingRow { rule, seed: 9, token_index: 5, choice: 2 },
            logprobs: None,
            host_logits: HostLogits::No,
        }
    }

    /// How the wanted positions of these rows select, on slots that all have penalties.
    fn selections(rows: Vec<Row>) -> Vec<SelectRow> {
        let adjust = Arc::new(Adjust { presence: 1.0, frequency: 0.0, bias: vec![] });
        let bind = |r: &Row| SlotBinding {
            slot: r.slot,
            request: r.request,
            pages: vec![r.slot],
            adjust: Some(adjust.clone()),
        };
        let (bindings, tokens) = (rows.iter().map(bind).collect(), vec![1; rows.iter().map(|r| r.len as usize).sum()]);
        let step = Step { id: 1, bindings, rows, tokens };
        let mut adjusted = AdjustedSlots::new(8);
        adjusted.follow(&step);
        let mut buffer = vec![0; 4096];
        let plan = write(&step, 256, |history| history, |_| 8, &adjusted, 1, &mut buffer);
        let at = |i: usize| plan.shape.layout().sampling + i * size_of::<SelectRow>();
        let read = |i: usize| bytemuck::pod_read_unaligned(&buffer[at(i)..at(i + 1)]);
        (0..plan.shape.wanted).map(read).collect()
    }

    #[test]
    fn every_wanted_position_has_its_own_token_index_and_the_last_of_a_row_is_the_slot_s_last_token() {
        let rows = vec![row(3, 4, Want::Last, SAMPLED), row(1, 7, Want::None, SAMPLED), row(2, 3, Want::All, SAMPLED)];
        let got = selections(rows);
        let seen: Vec<_> = got.iter().map(|s| (s.slot, s.token_index, s.is_last, s.adjusted, s.greedy)).collect();
        assert_eq!(seen, [(3, 5, 1, 1, 0), (2, 5, 0, 0, 0), (2, 6, 0, 0, 0), (2, 7, 1, 0, 0)]);
        assert!(got.iter().all(|s| (s.seed, s.choice, s.top_p, s.min_p, s.lane) == (9, 2, 1 << 31, 0.25, 1)));
    }

    /// What the planner asks of the positions of a scored prompt: the kernel ends after its first look at the logits.
    #[test]
    fn a_row_whose_tokens_nobody_reads_is_greedy_at_every_position() {
        let got = selections(vec![row(2, 3, Want::All, Rule::Greedy), row(4, 1, Want::Last, SAMPLED)]);
        assert_eq!(got.iter().map(|s| s.greedy).collect::<Vec<_>>(), [1, 1, 1, 0]);
    }
}
