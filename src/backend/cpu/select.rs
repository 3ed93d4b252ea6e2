//! Selection without a sort: thresholds by partitioning, sums in id order. Gives what `arith::select` defines.

use super::level::Level;
use super::pass::Adjusting;
use super::rows::exp_slice;
use super::threads::lock;
use crate::arith::adjusted_logit;
use crate::arith::philox::token_draw;
use crate::arith::select::{draw_point, fixed_weight, log_probability, order_key, top_p_target};
use crate::backend::{Rule, SamplingRow, TokenLogprobs};

/// Buffers of one thread, reused from row to row.
#[derive(Default)]
pub struct SelectScratch {
    e: Vec<f32>,
    adjusted: Vec<f32>,
    ranked: Vec<Ranked>,
}

/// A candidate: `key` orders by (logit descending, id ascending), smallest first.
#[derive(Clone, Copy)]
struct Ranked {
    key: u64,
    weight: u64,
}

/// Smaller for a higher logit; equal logits by id.
fn rank(logit: f32, id: u32) -> u64 {
    (u64::from(!order_key(logit)) << 32) | u64::from(id)
}

/// The id of the highest logit and that logit, or `None` when one is not finite.
pub fn highest(logits: &[f32]) -> Option<(u32, f32)> {
    // Max of sixteen strided lanes, so that the loop runs in vectors; the first id that has the maximum wins.
    let mut lanes = [f32::NEG_INFINITY; 16];
    let mut bad = [0u32; 16];
    let (chunks, rest) = logits.as_chunks::<16>();
    for chunk in chunks {
        for i in 0..16 {
            lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
            bad[i] |= u32::from(chunk[i].to_bits() & 0x7f80_0000 == 0x7f80_0000);
        }
    }
    let max = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |m, &l| if l > m { l } else { m });
    if bad.iter().any(|&b| b != 0) || rest.iter().any(|l| !l.is_finite()) {
        return None;
    }
    let id = logits.iter().position(|&l| l == max)?;
    Some((id as u32, max + 0.0))
}

/// Selects the token of one position from raw, finite logits `[vocab]` whose highest is `top` = (id, logit).
pub fn select(
    level: Level,
    logits: &[f32],
    top: (u32, f32),
    sampling: &SamplingRow,
    offset: u32,
    scratch: &mut SelectScratch,
) -> u32 {
    let Rule::Sampled { inv_temperature, top_k, top_p, min_p } = sampling.rule else { return top.0 };
    let SelectScratch { e, ranked, .. } = scratch;
    e.clear();
    e.extend_from_slice(logits);
    exp_slice(level, e, top.1, inv_temperature);

    // The last rank that top-k and top-p keep; filters that keep all cost nothing.
    let mut last = u64::MAX;
    let k = top_k.map_or(logits.len(), |k| (k.get() as usize).min(logits.len()));
    if k < logits.len() || top_p < 1 << 32 {
        ranked.clear();
        let candidate =
            |(i, (&l, &e)): (usize, (&f32, &f32))| Ranked { key: rank(l, i as u32), weight: fixed_weight(e) };
        ranked.extend(logits.iter().zip(e.iter()).enumerate().map(candidate));
        if k < ranked.len() {
            ranked.select_nth_unstable_by_key(k - 1, |r| r.key);
            ranked.truncate(k);
        }
        let total: u64 = ranked.iter().map(|r| r.weight).sum();
        last = if top_p < 1 << 32 {
            last_of_prefix(ranked, top_p_target(top_p, total))
        } else {
            ranked.iter().map(|r| r.key).max().unwrap_or(u64::MAX)
        };
    }
    let kept = |i: usize| e[i] >= min_p && rank(logits[i], i as u32) <= last;
    let total: u64 = (0..logits.len()).filter(|&i| kept(i)).map(|i| fixed_weight(e[i])).sum();
    let u = token_draw(sampling.seed, sampling.token_index.wrapping_add(offset), sampling.choice);
    let point = draw_point(u, total);
    let mut prefix = 0;
    let drawn = (0..logits.len()).filter(|&i| kept(i)).find(|&i| {
        prefix += fixed_weight(e[i]);
        prefix > point
    });
    drawn.map_or(top.0, |i| i as u32)
}

/// As `select`, after penalties and bias: only tokens with a count or a bias are touched, on a copy.
pub fn select_adjusted(
    level: Level,
    logits: &[f32],
    adjusting: &Adjusting,
    sampling: &SamplingRow,
    offset: u32,
    scratch: &mut SelectScratch,
) -> u32 {
    let mut adjusted = std::mem::take(&mut scratch.adjusted);
    adjusted.clear();
    adjusted.extend_from_slice(logits);
    let adjust = &adjusting.adjust;
    for (&id, &count) in lock(&adjusting.counts).iter() {
        let logit = &mut adjusted[id as usize];
        *logit = adjusted_logit(*logit, count, 0.0, adjust.presence, adjust.frequency);
    }
    for &(id, bias) in &adjust.bias {
        adjusted[id as usize] += bias;
    }
    // Finite logits stay finite: what is added is far below half a unit in the last place of the largest f32.
    let token = highest(&adjusted).map_or(0, |top| select(level, &adjusted, top, sampling, offset, scratch));
    scratch.adjusted = adjusted;
    token
}

/// The rank that ends the shortest prefix, in rank order, whose weight reaches `target`: a weighted quickselect.
fn last_of_prefix(mut items: &mut [Ranked], target: u64) -> u64 {
    let mut before = 0u64;
    while items.len() > 1 {
        let middle = items.len() / 2;
        items.select_nth_unstable_by_key(middle, |r| r.key);
        let (low, high) = items.split_at_mut(middle);
        let weight: u64 = low.iter().map(|r| r.weight).sum();
        if before + weight >= target {
            items = low;
        } else {
            before += weight;
            items = high;
        }
    }
    items.first().map_or(u64::MAX, |r| r.key)
}

/// Log-probabilities of the chosen token and the `top_count` most likely ones, from finite logits whose highest is `max`.
pub fn logprobs(
    level: Level,
    logits: &[f32],
    max: f32,
    chosen: u32,
    top_count: usize,
    scratch: &mut SelectScratch,
) -> TokenLogprobs {
    let e = &mut scratch.e;
    e.clear();
    e.extend_from_slice(logits);
    exp_slice(level, e, max, 1.0);
    let weight: u64 = e.iter().map(|&e| fixed_weight(e)).sum();
    let of = |i: u32| log_probability(logits[i as usize], max, weight);
    let mut keys: Vec<u64> = Vec::new();
    if top_count > 0 {
        keys.extend(logits.iter().enumerate().map(|(i, &l)| rank(l, i as u32)));
        let count = top_count.min(keys.len());
        keys.select_nth_unstable(count - 1);
        keys.truncate(count);
        keys.sort_unstable();
    }
    let top = keys.iter().map(|&k| (k as u32, of(k as u32))).collect();
    TokenLogprobs { chosen: of(chosen), top }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::Isa;

    /// Bytes of room that a selection by `rule` took.
    fn room(rule: Rule) -> usize {
        let (mut scratch, logits) = (SelectScratch::default(), [0.5, 3.0, -1.0, 3.0]);
        let sampling = SamplingRow { rule, seed: 1, token_index: 0, choice: 0 };
        let top = highest(&logits).expect("finite logits");
        let level = Level::detect(Isa::Scalar).expect("every machine is scalar");
        select(level, &logits, top, &sampling, 0, &mut scratch);
        scratch.e.capacity() + scratch.adjusted.capacity() + scratch.ranked.capacity()
    }

    /// Positions of a scored prompt ask for it: the look that finds the highest logit and whether all are finite is all they cost.
    #[test]
    fn a_greedy_row_weighs_and_ranks_nothing() {
        assert_eq!(room(Rule::Greedy), 0);
        assert!(room(Rule::Sampled { inv_temperature: 1.0, top_k: None, top_p: 1 << 31, min_p: 0.0 }) > 0);
    }
}
