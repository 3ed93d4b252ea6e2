//! What the device must hold, part by part, and which key makes which part smaller: the text of every "out of memory" at load.
//! Weights and activations are estimates from the shapes, close enough to say what does not fit; nothing is allocated by them.

use super::graphs::GraphLimits;
use super::pass::page_bytes;
use super::program::Kind;
use super::weights::kind_of;
use crate::model::{Geometry, Matrix, ModelWeights, Profile};

/// Device memory of an instantiated graph, roughly: a few KiB a kernel.
const GRAPH_BYTES: usize = 1 << 20;

/// Bytes by part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Weights.
    pub weights: usize,
    /// KV pool.
    pub kv: usize,
    /// Pages in it.
    pub pages: usize,
    /// Activations and logits.
    pub activations: usize,
    /// Token rows that they are for.
    pub tokens: usize,
    /// Graphs.
    pub graphs: usize,
}

/// Device bytes of a matrix under a profile.
fn matrix_bytes(profile: Profile, m: &Matrix) -> usize {
    let values = m.rows * m.cols;
    match kind_of(profile, m.format) {
        Kind::F32 => 4 * values,
        Kind::Int8 => values + 4 * m.rows,
        kind if kind.is_block() => values + values / 8,
        _ => values,
    }
}

/// Device bytes of the weights, roughly.
pub fn weight_bytes(profile: Profile, weights: &ModelWeights) -> usize {
    let layers = weights.layers.iter().flat_map(|l| [&l.wq, &l.wk, &l.wv, &l.wo, &l.w_gate, &l.w_up, &l.w_down]);
    let all = layers.chain([&weights.embedding]).chain(weights.head.as_ref());
    let angles = weights.geometry.context * weights.geometry.head_dim * 4;
    angles + all.map(|m| matrix_bytes(profile, m)).sum::<usize>()
}

/// Device bytes of activations, logits and attention's partial results for `tokens` token rows and `slots` slots, roughly.
pub fn activation_bytes(g: &Geometry, profile: Profile, tokens: usize, slots: usize) -> usize {
    let widest = g.hidden.max(g.q_dim()).max(g.ffn);
    let row = g.vocab + g.hidden + 2 * g.q_dim() + 2 * g.kv_dim() + 2 * g.ffn + widest + widest / 4 + widest / 16;
    let partial = g.heads * g.context.div_ceil(profile.attention_segment()) * (g.head_dim + 2);
    4 * (tokens * row + slots * partial)
}

/// Device bytes of as many graphs as the limits allow, roughly.
pub fn graph_bytes(limits: &GraphLimits, slots: usize) -> usize {
    (limits.decode.min(slots) + limits.singleton + limits.packed) * GRAPH_BYTES
}

const fn mib(bytes: usize) -> usize {
    bytes.div_ceil(1 << 20)
}

impl Budget {
    /// All parts.
    pub fn total(&self) -> usize {
        self.weights + self.kv + self.activations + self.graphs
    }

    /// What is needed for what, what is free, and the key to lower. `free` counts what was free before anything was allocated.
    pub fn explain(&self, free: usize) -> String {
        let Self { weights, kv, pages, activations, tokens, graphs } = *self;
        let advice = if weights >= free {
            "the weights alone do not fit: choose model.profile = \"q8\" or \"int8\", a smaller model, or another executor.device"
        } else if weights + activations >= free {
            "lower prefill.token_budget or limits.max_batch"
        } else if graphs > kv {
            "lower graphs.max_entries"
        } else {
            "lower kv.pages or kv.memory_fraction"
        };
        format!(
            "about {} MiB are needed (weights {} MiB, {pages} KV pages {} MiB, activations and logits of {tokens} token rows {} MiB, \
             graphs {} MiB) and {} MiB are free: {advice}",
            mib(self.total()),
            mib(weights),
            mib(kv),
            mib(activations),
            mib(graphs),
            free >> 20
        )
    }

    /// Refuses what cannot fit before anything is allocated.
    ///
    /// # Errors
    /// The explanation.
    pub fn check(&self, free: usize) -> Result<(), String> {
        if self.weights + self.kv + self.activations > free { Err(self.explain(free)) } else { Ok(()) }
    }
}

/// Pages that fit into `fraction` of the memory that weights and activations leave of `free`, at most what the slots can use.
///
/// # Errors
/// Not one page fits.
pub fn pages_in(fraction: f64, free: usize, need: &Budget, g: &Geometry, slots: usize) -> Result<usize, String> {
    let left = free.saturating_sub(need.weights + need.graphs);
    let bytes = ((left as f64 * fraction) as usize).saturating_sub(need.activations);
    match bytes / page_bytes(g) {
        0 => Err(format!("kv.memory_fraction = {fraction} leaves no room for a KV page: {}", need.explain(free))),
        pages => Ok(pages.min(slots * g.context.div_ceil(16))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::models::{Shape, weights};
    use crate::model::MatrixFormat;

    const MIB: usize = 1 << 20;

    fn budget() -> Budget {
        let [weights, kv, activations, graphs] = [100, 400, 50, 10].map(|m| m * MIB);
        Budget { weights, kv, pages: 4096, activations, tokens: 1040, graphs }
    }

    #[test]
    fn what_does_not_fit_is_said_part_by_part_with_the_key_to_lower() {
        assert_eq!(budget().check(560 * MIB), Ok(()));
        let text = budget().check(500 * MIB).unwrap_err();
        for part in [
            "560 MiB",
            "weights 100 MiB",
            "4096 KV pages 400 MiB",
            "1040 token rows 50 MiB",
            "graphs 10 MiB",
            "500 MiB are free",
            "lower kv.pages",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(budget().explain(90 * MIB).contains("model.profile"));
        assert!(budget().explain(120 * MIB).contains("prefill.token_budget"));
        assert!(Budget { graphs: 500 * MIB, ..budget() }.explain(500 * MIB).contains("graphs.max_entries"));
    }

    #[test]
    fn a_fraction_takes_what_weights_graphs_and_activations_leave() {
        let g = Shape::Small.geometry();
        let page = page_bytes(&g);
        let need = Budget { weights: 10 * page, graphs: 0, activations: 5 * page, ..budget() };
        assert_eq!(pages_in(0.5, 50 * page, &need, &g, 16), Ok(15));
        assert_eq!(pages_in(1.0, 1 << 40, &need, &g, 2), Ok(2 * g.context.div_ceil(16)));
        assert!(pages_in(0.5, 20 * page, &need, &g, 16).unwrap_err().contains("kv.memory_fraction = 0.5"));
    }

    #[test]
    fn int8_and_q8_weights_are_about_a_quarter_of_the_f32_ones() {
        let bytes = |profile| weight_bytes(profile, &weights(Shape::Small, profile, MatrixFormat::Q8_0, 1));
        let whole = bytes(Profile::F32);
        for profile in [Profile::Int8, Profile::Q8] {
            let share = bytes(profile) as f64 / whole as f64;
            assert!((0.2..0.5).contains(&share), "{profile:?} {share}");
        }
    }
}
