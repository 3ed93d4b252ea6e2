//! Penalties and bias: what a request adds to its logits before the selection rule. The definition; backends touch the few tokens
//! that have a count or a bias and are tested equal.
//!
//! Presence and frequency penalties are those of OpenAI's documentation: μ[j] − c[j]·α_frequency − [c[j] > 0]·α_presence, where c[j]
//! counts how often token j was generated before this position; the prompt does not count. The bias is added last.

use crate::backend::Adjust;

/// Most entries of `Adjust::bias`: what the device holds for a slot.
pub const MAX_BIAS: usize = 1_024;

/// The logit of one token after `count` selections of it, with its bias (0 for none):
/// `(fma(−f32(count), frequency, logit) − presence) + bias`, the first two only where count is not 0.
#[inline(always)]
pub fn adjusted_logit(logit: f32, count: u32, bias: f32, presence: f32, frequency: f32) -> f32 {
    let penalised = if count == 0 { logit } else { (-(count as f32)).mul_add(frequency, logit) - presence };
    penalised + bias
}

/// All logits `[vocab]` of a sequence that has generated `generated`, in any order.
pub fn adjusted_logits(logits: &[f32], adjust: &Adjust, generated: &[u32]) -> Vec<f32> {
    let of = |(id, &logit): (usize, &f32)| {
        let count = generated.iter().filter(|&&t| t as usize == id).count() as u32;
        let bias = adjust.bias.iter().find(|(i, _)| *i as usize == id).map_or(0.0, |&(_, bias)| bias);
        adjusted_logit(logit, count, bias, adjust.presence, adjust.frequency)
    };
    logits.iter().enumerate().map(of).collect()
}

/// Rounds penalties and biases to f32, once, and sorts the biases by id. `None` when nothing of it can move a logit. An id that
/// stands twice is kept twice, and refused later.
pub fn adjust(presence: f64, frequency: f64, bias: impl IntoIterator<Item = (u32, f64)>) -> Option<Adjust> {
    let bias = bias.into_iter().map(|(id, value)| (id, value as f32));
    let mut bias: Vec<(u32, f32)> = bias.filter(|(_, value)| *value != 0.0).collect();
    bias.sort_by_key(|(id, _)| *id);
    let (presence, frequency) = (presence as f32, frequency as f32);
    let effective = presence != 0.0 || frequency != 0.0 || !bias.is_empty();
    effective.then_some(Adjust { presence, frequency, bias })
}
