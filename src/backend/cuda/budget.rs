//! What the device must hold, part by part, and which key makes which part smaller: the text of every "out of memory" at load.
//! Weights and activations are estimates from the shapes, close enough to say what does not fit; nothing is allocated by them.

use super::graphs::GraphLimits;
use super::pass::page_bytes;
use super::program::Kind;
use super::weights::kind_of;
use crate::model::{Geometry, Matrix, ModelWeights, Profile};

/// Device memory of an instantiated graph, a little more than was measured: 80 KiB and 21 KiB a layer on an H200.
const fn one_graph_bytes(layers: usize) -> usize {
    (96 + 24 * layers) << 10
}

/// Keys that make activations smaller.
const ACTIVATION_KEYS: &str = "prefill.token_budget or limits.max_batch";

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
    /// Graphs of decode, one a batch size.
    pub decode_graphs: usize,
    /// Graphs of prompts, single and packed.
    pub prompt_graphs: usize,
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

/// Device bytes of as many graphs as the limits allow, roughly: of decode, and of prompts.
pub fn graph_bytes(limits: &GraphLimits, slots: usize, layers: usize) -> (usize, usize) {
    let one = one_graph_bytes(layers);
    (limits.decode.min(slots) * one, (limits.singleton + limits.packed) * one)
}

const fn mib(bytes: usize) -> usize {
    bytes.div_ceil(1 << 20)
}

impl Budget {
    /// All parts.
    pub fn total(&self) -> usize {
        self.weights + self.kv + self.activations + self.graphs()
    }

    fn graphs(&self) -> usize {
        self.decode_graphs + self.prompt_graphs
    }

    /// What to change so that it fits: the fewest keys, the largest part first.
    fn advice(&self, free: usize) -> String {
        let page = self.kv / self.pages.max(1);
        if self.weights >= free {
            let choice = "choose model.profile = \"q8\" or \"int8\", a smaller model, or another executor.device";
            return format!("the weights alone do not fit: {choice}");
        }
        if self.weights + self.activations + page > free {
            return format!("lower {ACTIVATION_KEYS}");
        }
        let mut parts = [
            (self.kv - page, "kv.pages or kv.memory_fraction"),
            (self.prompt_graphs, "graphs.max_entries"),
            (self.decode_graphs, "limits.max_batch (or turn graphs.decode off)"),
        ];
        parts.sort_by_key(|&(bytes, _)| std::cmp::Reverse(bytes));
        let (mut keys, mut over) = (Vec::new(), self.total().saturating_sub(free));
        for (bytes, key) in parts {
            keys.push(key);
            over = over.saturating_sub(bytes);
            if over == 0 {
                break;
            }
        }
        format!("lower {}", keys.join(", and "))
    }

    fn parts(&self, free: usize) -> String {
        let Self { weights, kv, pages, activations, tokens, .. } = *self;
        format!(
            "about {} MiB are needed (weights {} MiB, {pages} KV pages {} MiB, activations and logits of {tokens} token rows {} MiB, \
             graphs {} MiB) and {} MiB are free",
            mib(self.total()),
            mib(weights),
            mib(kv),
            mib(activations),
            mib(self.graphs()),
            free >> 20
        )
    }

    /// What is needed for what, what is free, and the keys to lower. `free` counts what was free before anything was allocated.
    pub fn explain(&self, free: usize) -> String {
        format!("{}: {}", self.parts(free), self.advice(free))
    }

    /// Refuses what cannot fit before anything is allocated.
    ///
    /// # Errors
    /// The explanation.
    pub fn check(&self, free: usize) -> Result<(), String> {
        if self.total() > free { Err(self.explain(free)) } else { Ok(()) }
    }
}

/// Pages that lie, beside the activations, in `fraction` (at most 1) of the memory that weights and graphs leave of `free`; at most what
/// the slots can use. What it gives passes `check`.
///
/// # Errors
/// Not one page fits.
pub fn pages_in(fraction: f64, free: usize, need: &Budget, g: &Geometry, slots: usize) -> Result<usize, String> {
    let left = free.saturating_sub(need.weights + need.graphs());
    let bytes = ((left as f64 * fraction) as usize).saturating_sub(need.activations);
    let pages = bytes / page_bytes(g);
    if pages > 0 {
        return Ok(pages.min(slots * g.context.div_ceil(16)));
    }
    let one = Budget { kv: page_bytes(g), pages: 1, ..*need };
    one.check(free)?;
    let parts = one.parts(free);
    Err(format!(
        "kv.memory_fraction = {fraction} leaves no room for a KV page: {parts}: raise it, or lower {ACTIVATION_KEYS}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::models::{Shape, weights};
    use crate::model::MatrixFormat;

    const MIB: usize = 1 << 20;

    fn budget() -> Budget {
        let [weights, kv, activations, decode_graphs, prompt_graphs] = [100, 400, 50, 4, 6].map(|m| m * MIB);
        Budget { weights, kv, pages: 4096, activations, tokens: 1040, decode_graphs, prompt_graphs }
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
    }

    #[test]
    fn graphs_that_do_not_fit_are_refused_before_anything_is_allocated() {
        assert!(budget().check(560 * MIB - 1).is_err(), "the other parts alone would fit");
        let refused = Budget { decode_graphs: 4000 * MIB, ..budget() }.check(1000 * MIB).unwrap_err();
        assert!(
            refused.contains("graphs 4006 MiB") && refused.contains("lower limits.max_batch (or turn"),
            "{refused}"
        );
    }

    #[test]
    fn decode_has_a_graph_a_batch_size_and_prompts_as_many_as_their_bounds_allow() {
        let limits = GraphLimits { decode: 64, singleton: 8, packed: 3 };
        let one = one_graph_bytes(30);
        assert_eq!(graph_bytes(&limits, 16, 30), (16 * one, 11 * one));
        assert_eq!(graph_bytes(&GraphLimits { decode: 0, singleton: 0, packed: 0 }, 16, 30), (0, 0));
        // (layers, graphs, MiB that the driver took for them on an H200).
        for (layers, graphs, taken) in [(4, 64, 10), (30, 64, 42), (60, 64, 82), (30, 256, 184)] {
            let estimate = graphs * one_graph_bytes(layers);
            assert!((taken * MIB..taken * MIB * 3 / 2).contains(&estimate), "{layers} layers: {estimate}");
        }
    }

    /// The budget with what the keys of an advice make smaller at its smallest.
    fn lowered(budget: &Budget, advice: &str) -> Budget {
        let mut lowered = *budget;
        if advice.contains("kv.pages") {
            (lowered.kv, lowered.pages) = (budget.kv / budget.pages, 1);
        }
        if advice.contains("graphs.max_entries") {
            lowered.prompt_graphs = 0;
        }
        if advice.contains("graphs.decode") {
            lowered.decode_graphs = 0;
        }
        lowered
    }

    #[test]
    fn the_advice_names_the_largest_part_and_no_more_keys_than_make_room() {
        let keys = |decode: usize, prompts: usize, free: usize| {
            let budget = Budget { decode_graphs: decode * MIB, prompt_graphs: prompts * MIB, ..budget() };
            let advice = budget.advice(free * MIB);
            assert_eq!(lowered(&budget, &advice).check(free * MIB), Ok(()), "{advice}");
            let names = ["kv.pages", "graphs.max_entries", "limits.max_batch"];
            let mut found: Vec<_> = names.into_iter().filter_map(|n| Some((advice.find(n)?, n))).collect();
            found.sort_unstable();
            found.into_iter().map(|(_, name)| name).collect::<Vec<_>>()
        };
        assert_eq!(keys(4, 6, 500), ["kv.pages"]);
        assert_eq!(keys(4, 600, 1000), ["graphs.max_entries"]);
        assert_eq!(keys(600, 6, 1000), ["limits.max_batch"]);
        assert_eq!(keys(300, 500, 500), ["graphs.max_entries", "kv.pages"]);
        assert_eq!(keys(600, 500, 160), ["limits.max_batch", "graphs.max_entries", "kv.pages"]);
    }

    #[test]
    fn a_fraction_takes_what_weights_graphs_and_activations_leave() {
        let g = Shape::Small.geometry();
        let page = page_bytes(&g);
        let none = Budget { kv: 0, pages: 0, decode_graphs: 0, prompt_graphs: 0, ..budget() };
        let need = Budget { weights: 10 * page, activations: 5 * page, ..none };
        assert_eq!(pages_in(0.5, 50 * page, &need, &g, 16), Ok(15));
        let graphs = Budget { decode_graphs: 4 * page, prompt_graphs: 6 * page, ..need };
        assert_eq!(pages_in(0.5, 50 * page, &graphs, &g, 16), Ok(10));
        assert_eq!(pages_in(1.0, 1 << 40, &need, &g, 2), Ok(2 * g.context.div_ceil(16)));
    }

    #[test]
    fn what_a_fraction_gives_passes_the_check_and_a_refusal_names_the_key_that_helps() {
        let g = Shape::Small.geometry();
        let page = page_bytes(&g);
        let (weights, activations) = (10 * page, 5 * page);
        let need = Budget { weights, activations, kv: 0, decode_graphs: 4 * page, prompt_graphs: 6 * page, ..budget() };
        for free in (0..100 * page).step_by(page / 3) {
            for fraction in [0.01, 0.3, 0.5, 0.9, 0.95, 1.0] {
                match pages_in(fraction, free, &need, &g, 16) {
                    Ok(pages) => assert_eq!(Budget { kv: pages * page, pages, ..need }.check(free), Ok(())),
                    Err(text) if free < 26 * page => assert!(!text.contains("kv.memory_fraction ="), "{text}"),
                    Err(text) => {
                        assert!(text.starts_with("kv.memory_fraction =") && text.contains("raise it"), "{text}")
                    }
                }
            }
        }
        let text = pages_in(0.95, 20 * page, &need, &g, 16).unwrap_err();
        assert!(text.contains("lower graphs.max_entries"), "{text}");
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
