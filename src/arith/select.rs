//! Selection of a token: the definition. It sorts; backends must not, and are tested equal.

use std::cmp::Reverse;

use super::exp::exp_c;
use super::philox::token_draw;
use crate::backend::{Rule, SamplingRow, TokenLogprobs};

/// A selected token.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// Its id; 0 when `finite` is false.
    pub token: u32,
    /// False when a logit was not finite.
    pub finite: bool,
}

/// Maps a finite f32 to an integer of the same order; −0 and +0 are equal.
#[inline(always)]
pub fn order_key(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 0x8000_0000 } else { !bits }
}

/// w = trunc(e·2^40).
#[inline(always)]
pub fn fixed_weight(e: f32) -> u64 {
    (e * 1_099_511_627_776.0) as u64
}

/// The weight that top-p must reach: ceil(P·W / 2^32), P = round(p·2^32).
pub fn top_p_target(top_p: u64, weight: u64) -> u64 {
    (u128::from(top_p) * u128::from(weight)).div_ceil(1 << 32) as u64
}

/// r of a draw: the high 64 bits of U·W.
pub fn draw_point(u: u64, weight: u64) -> u64 {
    ((u128::from(u) * u128::from(weight)) >> 64) as u64
}

/// Selects the token of one position from raw logits `[vocab]`; `offset` is the position's index among the row's wanted ones.
pub fn select(logits: &[f32], sampling: &SamplingRow, offset: u32) -> Selection {
    if !logits.iter().all(|l| l.is_finite()) {
        return Selection { token: 0, finite: false };
    }
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by_key(|&i| (Reverse(order_key(logits[i as usize])), i));
    let Rule::Sampled { inv_temperature, top_k, top_p, min_p } = sampling.rule else {
        return Selection { token: order[0], finite: true };
    };
    let highest = logits[order[0] as usize] + 0.0;
    let e = |i: u32| exp_c((logits[i as usize] + 0.0 - highest) * inv_temperature);

    order.truncate(top_k.map_or(order.len(), |k| k.get() as usize));
    let target = top_p_target(top_p, order.iter().map(|&i| fixed_weight(e(i))).sum());
    let mut reached = 0;
    let mut kept: Vec<u32> = Vec::new();
    for &i in &order {
        if reached >= target && !kept.is_empty() {
            break;
        }
        reached += fixed_weight(e(i));
        kept.push(i);
    }
    kept.retain(|&i| e(i) >= min_p);
    kept.sort_unstable();

    let total = kept.iter().map(|&i| fixed_weight(e(i))).sum();
    let point =
        draw_point(token_draw(sampling.seed, sampling.token_index.wrapping_add(offset), sampling.choice), total);
    let mut prefix = 0;
    for &i in &kept {
        prefix += fixed_weight(e(i));
        if prefix > point {
            return Selection { token: i, finite: true };
        }
    }
    Selection { token: order[0], finite: true }
}

/// W at T = 1 over the raw logits.
pub fn total_weight(logits: &[f32]) -> u64 {
    let highest = logits.iter().fold(f32::NEG_INFINITY, |m, &l| m.max(l));
    logits.iter().map(|l| fixed_weight(exp_c(l - highest))).sum()
}

/// Log-probability from a logit, the highest logit and W: f64(l − l_max) − ln(f64(W)/2^40).
pub fn log_probability(logit: f32, highest: f32, weight: u64) -> f64 {
    f64::from(logit - highest) - libm::log(weight as f64 / 1_099_511_627_776.0)
}

/// Log-probabilities of the chosen token and of the `top` most likely ones, by (logit descending, id ascending).
pub fn token_logprobs(logits: &[f32], chosen: u32, top: usize) -> TokenLogprobs {
    let highest = logits.iter().fold(f32::NEG_INFINITY, |m, &l| m.max(l));
    let weight = total_weight(logits);
    let of = |i: u32| log_probability(logits[i as usize], highest, weight);
    let key = |&i: &u32| (Reverse(order_key(logits[i as usize])), i);
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    if top < order.len() {
        order.select_nth_unstable_by_key(top, key);
        order.truncate(top);
    }
    order.sort_unstable_by_key(key);
    TokenLogprobs { chosen: of(chosen), top: order.into_iter().map(|i| (i, of(i))).collect() }
}
