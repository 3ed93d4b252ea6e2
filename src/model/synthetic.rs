//! Synthetic models: any geometry, seeded random weights, made in memory. The weights depend on the geometry, the profile, the
//! block format and the seed alone; each tensor has a stream of its own, so that no tensor's size moves another's values.
//!
//! Scales keep every activation near 1 at any depth: matrices have standard deviation 1/sqrt(cols), those that write to the
//! residual stream 1/sqrt(2·layers·cols), norms lie in [0.9, 1.1], and logits have a standard deviation near `LOGIT_STD`.

use std::sync::Arc;

use half::{bf16, f16};

use super::geometry::{Geometry, Profile};
use super::weights::{LayerWeights, Matrix, MatrixFormat, ModelWeights, TensorBytes};

/// Standard deviation of the logits, roughly: wide enough to rank tokens, narrow enough that a token does not always follow itself.
const LOGIT_STD: f64 = 2.5;

/// Makes the weights of a synthetic model; the vocabulary projection is tied to the embedding.
///
/// `block` is the format of the matrices in profile q8; the other profiles have f32 matrices. `geometry` must be valid, and
/// `hidden`, `ffn` and `q_dim` multiples of 32 for a block format (`load` checks both).
pub fn weights(geometry: &Geometry, profile: Profile, block: MatrixFormat, seed: u64) -> ModelWeights {
    let g = geometry;
    let format = format(profile, block);
    let inner = |cols: usize| 1.0 / (cols as f64).sqrt();
    let outer = |cols: usize| inner(cols) / (2.0 * g.layers as f64).sqrt();
    let matrix = |name: Name, rows: usize, cols: usize, std: f64| Matrix {
        format,
        rows,
        cols,
        bytes: TensorBytes::Owned(Arc::new(fill(&mut name.stream(seed), format, rows * cols, std))),
    };
    let layers = (0..g.layers)
        .map(|layer| {
            let name = |tensor| Name { layer, tensor };
            LayerWeights {
                attn_norm: norm(&mut name(1).stream(seed), g.hidden),
                wq: matrix(name(2), g.q_dim(), g.hidden, inner(g.hidden)),
                wk: matrix(name(3), g.kv_dim(), g.hidden, inner(g.hidden)),
                wv: matrix(name(4), g.kv_dim(), g.hidden, inner(g.hidden)),
                wo: matrix(name(5), g.hidden, g.q_dim(), outer(g.q_dim())),
                ffn_norm: norm(&mut name(6).stream(seed), g.hidden),
                w_gate: matrix(name(7), g.ffn, g.hidden, inner(g.hidden)),
                w_up: matrix(name(8), g.ffn, g.hidden, inner(g.hidden)),
                w_down: matrix(name(9), g.hidden, g.ffn, outer(g.ffn)),
            }
        })
        .collect();
    let outside = |tensor| Name { layer: usize::MAX, tensor };
    ModelWeights {
        geometry: geometry.clone(),
        embedding: matrix(outside(1), g.vocab, g.hidden, LOGIT_STD * inner(g.hidden)),
        layers,
        final_norm: norm(&mut outside(2).stream(seed), g.hidden),
        head: None,
    }
}

/// Bytes of the weights that [`weights`] makes, before anything is made.
pub fn bytes(geometry: &Geometry, profile: Profile, block: MatrixFormat) -> usize {
    let g = geometry;
    let (unit, stored) = format(profile, block).block();
    let layer = g.hidden * (2 * g.q_dim() + 2 * g.kv_dim() + 3 * g.ffn);
    let matrices = (layer.saturating_mul(g.layers)).saturating_add(g.vocab * g.hidden);
    let norms = (2 * g.layers + 1) * g.hidden * size_of::<f32>();
    (matrices / unit).saturating_mul(stored).saturating_add(norms)
}

/// The format of the matrices.
fn format(profile: Profile, block: MatrixFormat) -> MatrixFormat {
    match profile {
        Profile::Q8 => block,
        Profile::F32 | Profile::Int8 => MatrixFormat::F32,
    }
}

/// Which tensor: the coordinates of its random stream.
#[derive(Clone, Copy)]
struct Name {
    layer: usize,
    tensor: u64,
}

impl Name {
    fn stream(self, seed: u64) -> SplitMix64 {
        let mut mixed = SplitMix64(seed);
        mixed.0 = mixed.next() ^ (self.layer as u64).wrapping_add(1);
        mixed.0 = mixed.next() ^ self.tensor;
        SplitMix64(mixed.next())
    }
}

/// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Two values, uniform in [−1, 1).
    fn pair(&mut self) -> [f32; 2] {
        let bits = self.next();
        [bits as u32 as i32, (bits >> 32) as u32 as i32].map(|b| b as f32 * (1.0 / 2_147_483_648.0))
    }
}

fn norm(stream: &mut SplitMix64, n: usize) -> Vec<f32> {
    (0..n).map(|_| 1.0 + 0.1 * stream.pair()[0]).collect()
}

/// `n` weights of standard deviation `std` and mean near 0, stored as `format`.
fn fill(stream: &mut SplitMix64, format: MatrixFormat, n: usize, std: f64) -> Vec<u8> {
    // A uniform variable on [−a, a) has standard deviation a/sqrt(3).
    let amplitude = (std * 3f64.sqrt()) as f32;
    match format {
        MatrixFormat::F32 => floats(stream, n, |x| (x * amplitude).to_le_bytes()),
        MatrixFormat::F16 => floats(stream, n, |x| f16::from_f32(x * amplitude).to_le_bytes()),
        MatrixFormat::Bf16 => floats(stream, n, |x| bf16::from_f32(x * amplitude).to_le_bytes()),
        // q is uniform over a byte or a nibble: amplitude/128 or amplitude/8 a unit (Q4_0 is off centre by half a unit).
        MatrixFormat::Q8_0 => blocks::<34>(stream, n, |d, block| set_half(block, 0, d * amplitude / 128.0), 2),
        MatrixFormat::Q4_0 => blocks::<18>(stream, n, |d, block| set_half(block, 0, d * amplitude / 8.0), 2),
        MatrixFormat::Q4_1 => blocks::<20>(
            stream,
            n,
            |d, block| {
                set_half(block, 0, d * amplitude / 8.0);
                set_half(block, 2, -d * amplitude * 7.5 / 8.0);
            },
            4,
        ),
    }
}

fn floats<const N: usize>(stream: &mut SplitMix64, n: usize, store: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
    let mut bytes = vec![0u8; n * N];
    for two in bytes.as_chunks_mut::<N>().0.chunks_mut(2) {
        for (slot, x) in two.iter_mut().zip(stream.pair()) {
            *slot = store(x);
        }
    }
    bytes
}

/// Blocks of `N` bytes: `scale` writes the head from a factor in [0.75, 1.25), the rest from `quants` on is random.
fn blocks<const N: usize>(
    stream: &mut SplitMix64,
    n: usize,
    scale: impl Fn(f32, &mut [u8; N]),
    quants: usize,
) -> Vec<u8> {
    let mut bytes = vec![0u8; n / 32 * N];
    for block in bytes.as_chunks_mut::<N>().0 {
        scale(1.0 + 0.25 * stream.pair()[0], block);
        for eight in block[quants..].as_chunks_mut::<8>().0 {
            *eight = stream.next().to_le_bytes();
        }
    }
    bytes
}

fn set_half(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{RopePairing, dequant};

    fn geometry() -> Geometry {
        Geometry {
            layers: 2,
            hidden: 64,
            heads: 2,
            kv_heads: 1,
            head_dim: 32,
            ffn: 128,
            vocab: 512,
            context: 128,
            rope_base: 10_000.0,
            rms_eps: 1e-5,
            rope_pairing: RopePairing::Halves,
        }
    }

    #[test]
    fn every_format_has_the_spread_that_was_asked_for() {
        use MatrixFormat::*;
        for format in [F32, F16, Bf16, Q8_0, Q4_0, Q4_1] {
            let w = weights(&geometry(), Profile::Q8, format, 7);
            let values = dequant::matrix(&w.layers[1].w_up);
            let n = values.len() as f64;
            let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
            let std = (values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n - mean * mean).sqrt();
            let wanted = 1.0 / 64f64.sqrt();
            assert!((std / wanted - 1.0).abs() < 0.1, "{format:?}: standard deviation {std}, wanted {wanted}");
            assert!(mean.abs() < 0.15 * wanted, "{format:?}: mean {mean}");
        }
    }

    #[test]
    fn the_bytes_that_are_told_before_are_those_that_are_made() {
        for (profile, block) in
            [(Profile::Q8, MatrixFormat::Q4_1), (Profile::Q8, MatrixFormat::Q8_0), (Profile::F32, MatrixFormat::Q8_0)]
        {
            let w = weights(&geometry(), profile, block, 1);
            let matrices = w.layers.iter().flat_map(|l| [&l.wq, &l.wk, &l.wv, &l.wo, &l.w_gate, &l.w_up, &l.w_down]);
            let matrices: usize = matrices.chain([&w.embedding]).map(|m| m.bytes.len()).sum();
            let norms = w.layers.iter().flat_map(|l| [&l.attn_norm, &l.ffn_norm]).chain([&w.final_norm]);
            let norms: usize = norms.map(|n| n.len() * 4).sum();
            assert_eq!(bytes(&geometry(), profile, block), matrices + norms, "{profile:?} {block:?}");
        }
    }

    #[test]
    fn the_seed_decides_every_byte_and_tensors_differ() {
        let bytes = |seed| {
            let w = weights(&geometry(), Profile::Q8, MatrixFormat::Q8_0, seed);
            (w.layers[0].wk.bytes.to_vec(), w.layers[0].wv.bytes.to_vec(), w.layers[1].wk.bytes.to_vec())
        };
        let (first, again, other) = (bytes(1), bytes(1), bytes(2));
        assert_eq!(first, again);
        assert_ne!(first.0, other.0);
        assert_ne!(first.0, first.1);
        assert_ne!(first.0, first.2);
    }

    #[test]
    fn profiles_other_than_q8_have_f32_matrices_whatever_the_block_format() {
        for profile in [Profile::F32, Profile::Int8] {
            assert_eq!(weights(&geometry(), profile, MatrixFormat::Q4_1, 1).embedding.format, MatrixFormat::F32);
        }
    }

    #[test]
    fn a_seed_names_the_same_weights_on_every_machine() {
        let w = weights(&geometry(), Profile::F32, MatrixFormat::Q8_0, 42);
        let first = dequant::matrix(&w.layers[0].wq)[0];
        let last = *dequant::matrix(&w.embedding).last().unwrap();
        assert_eq!([first.to_bits(), last.to_bits()], [1_032_507_713, 3_173_716_450]);
    }
}
