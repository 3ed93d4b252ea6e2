//! A model in the layout of this backend: every matrix packed in tiles, held once.

use super::memory::Arena;
use super::pack::Packed;
use crate::model::{Geometry, Matrix, ModelWeights, Profile};

/// One layer.
pub struct Layer {
    pub attn_norm: Vec<f32>,
    pub wq: Packed,
    pub wk: Packed,
    pub wv: Packed,
    pub wo: Packed,
    pub ffn_norm: Vec<f32>,
    pub w_gate: Packed,
    pub w_up: Packed,
    pub w_down: Packed,
}

/// The whole model.
pub struct Model {
    pub geometry: Geometry,
    pub profile: Profile,
    pub embedding: Packed,
    pub layers: Vec<Layer>,
    pub final_norm: Vec<f32>,
    head: Option<Packed>,
}

impl Model {
    /// Packs the weights, dropping each matrix as its packed form is made.
    ///
    /// # Errors
    /// In words: which tensor has a wrong shape, or that memory is short.
    pub fn new(weights: ModelWeights, profile: Profile) -> Result<Self, String> {
        let ModelWeights { geometry, embedding, layers, final_norm, head } = weights;
        geometry.validate().map_err(|e| e.to_string())?;
        let (hidden, ffn) = (geometry.hidden, geometry.ffn);
        let (q_dim, kv_dim) = (geometry.q_dim(), geometry.kv_dim());
        if layers.len() != geometry.layers {
            return Err(format!("the geometry has {} layers, the weights have {}", geometry.layers, layers.len()));
        }
        let mut total = Some(0usize);
        let matrices = layers.iter().flat_map(|l| [&l.wq, &l.wk, &l.wv, &l.wo, &l.w_gate, &l.w_up, &l.w_down]);
        for matrix in matrices.chain([&embedding]).chain(&head) {
            total = total.and_then(|sum| sum.checked_add(Packed::size(matrix, profile)?));
        }
        let total = total.ok_or("the weights are too large")?;
        let mut arena = Arena::new(total).ok_or_else(|| format!("no memory for {total} bytes of weights"))?;
        let mut pack = |name: &str, matrix: Matrix, rows: usize, cols: usize| {
            if (matrix.rows, matrix.cols) != (rows, cols) {
                return Err(format!("{name} is {}×{}, it must be {rows}×{cols}", matrix.rows, matrix.cols));
            }
            Packed::new(&matrix, profile, &mut arena).map_err(|e| format!("{name}: {e}"))
        };
        let norm = |name: &str, w: Vec<f32>| match w.len() {
            n if n == hidden => Ok(w),
            n => Err(format!("{name} has {n} weights, it must have {hidden}")),
        };
        let mut packed = Vec::with_capacity(layers.len());
        for l in layers {
            packed.push(Layer {
                attn_norm: norm("attn_norm", l.attn_norm)?,
                wq: pack("wq", l.wq, q_dim, hidden)?,
                wk: pack("wk", l.wk, kv_dim, hidden)?,
                wv: pack("wv", l.wv, kv_dim, hidden)?,
                wo: pack("wo", l.wo, hidden, q_dim)?,
                ffn_norm: norm("ffn_norm", l.ffn_norm)?,
                w_gate: pack("w_gate", l.w_gate, ffn, hidden)?,
                w_up: pack("w_up", l.w_up, ffn, hidden)?,
                w_down: pack("w_down", l.w_down, hidden, ffn)?,
            });
        }
        let embedding = pack("embedding", embedding, geometry.vocab, hidden)?;
        let head = head.map(|m| pack("head", m, geometry.vocab, hidden)).transpose()?;
        let final_norm = norm("final_norm", final_norm)?;
        Ok(Self { geometry, profile, embedding, layers: packed, final_norm, head })
    }

    /// The vocabulary projection.
    pub fn head(&self) -> &Packed {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// Every matrix that a pass multiplies, with the embedding.
    pub fn matrices(&self) -> impl Iterator<Item = &Packed> {
        let layers = self.layers.iter().flat_map(|l| [&l.wq, &l.wk, &l.wv, &l.wo, &l.w_gate, &l.w_up, &l.w_down]);
        layers.chain([&self.embedding]).chain(&self.head)
    }

    /// Bytes of all weights.
    pub fn bytes(&self) -> usize {
        let norms = (2 * self.layers.len() + 1) * self.geometry.hidden * 4;
        self.matrices().map(Packed::bytes).sum::<usize>() + norms
    }
}
