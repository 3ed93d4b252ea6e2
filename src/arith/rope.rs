//! Rotary position embedding: tables in f64 from `libm`, rotation in f32.

use crate::model::RopePairing;

/// cos and sin of every pair at one position.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// cos(p·base^(−2i/D)), `[head_dim / 2]`.
    pub cos: Vec<f32>,
    /// sin of the same angles.
    pub sin: Vec<f32>,
}

impl RopeTable {
    /// The table of one position: angle = p·pow(base, −2i/D), all in f64, rounded once to f32.
    pub fn at(position: usize, head_dim: usize, base: f64) -> Self {
        let angle = |i: usize| position as f64 * libm::pow(base, -2.0 * i as f64 / head_dim as f64);
        let pairs = head_dim / 2;
        Self {
            cos: (0..pairs).map(|i| libm::cos(angle(i)) as f32).collect(),
            sin: (0..pairs).map(|i| libm::sin(angle(i)) as f32).collect(),
        }
    }
}

/// Rotates one head `[head_dim]` in place: x0' = fma(x0, c, −(x1·s)), x1' = fma(x1, c, x0·s).
pub fn rotate_head(x: &mut [f32], table: &RopeTable, pairing: RopePairing) {
    let half = x.len() / 2;
    for i in 0..half {
        let (a, b) = match pairing {
            RopePairing::Adjacent => (2 * i, 2 * i + 1),
            RopePairing::Halves => (i, i + half),
        };
        let (x0, x1, c, s) = (x[a], x[b], table.cos[i], table.sin[i]);
        x[a] = x0.mul_add(c, -(x1 * s));
        x[b] = x1.mul_add(c, x0 * s);
    }
}
