//! A whole model from the scalar definitions alone: one sequence, K and V in contiguous lists, attention as `arith` writes it. No page,
//! no batch, no graph, no vector: what every backend must equal on bits. Slow.

use crate::arith::attention::attend;
use crate::arith::quant::{Int8Row, WeightBlock, dequantise_row, weight_blocks};
use crate::arith::{
    RopeTable, linear_f32, linear_int8, linear_q8, quantise_activations, quantise_int8_row, rms_norm, rotate_head,
    swiglu,
};
use crate::model::{Geometry, Matrix, ModelWeights, Profile};

/// A matrix in the form in which its order reads it.
enum Rows {
    Dense(Vec<Vec<f32>>),
    Int8(Vec<Int8Row>),
    Blocks(Vec<Vec<WeightBlock>>),
}

impl Rows {
    fn new(matrix: &Matrix, profile: Profile) -> Self {
        let dense = |r: usize| {
            let mut row = vec![0.0; matrix.cols];
            dequantise_row(matrix, r, &mut row);
            row
        };
        match profile {
            Profile::Q8 if matrix.format.is_block() => {
                Self::Blocks((0..matrix.rows).map(|r| weight_blocks(matrix, r)).collect())
            }
            Profile::Int8 => Self::Int8((0..matrix.rows).map(|r| quantise_int8_row(&dense(r))).collect()),
            Profile::F32 | Profile::Q8 => Self::Dense((0..matrix.rows).map(dense).collect()),
        }
    }

    fn times(&self, x: &[f32]) -> Vec<f32> {
        match self {
            Self::Dense(rows) => rows.iter().map(|w| linear_f32(w, x)).collect(),
            Self::Int8(rows) => rows.iter().map(|w| linear_int8(w, x)).collect(),
            Self::Blocks(rows) => {
                let x = quantise_activations(x);
                rows.iter().map(|w| linear_q8(w, &x)).collect()
            }
        }
    }
}

struct Layer {
    attn_norm: Vec<f32>,
    ffn_norm: Vec<f32>,
    /// q, k, v, output, gate, up, down.
    matrices: [Rows; 7],
}

/// A model by definition.
pub struct Reference {
    geometry: Geometry,
    profile: Profile,
    embedding: Matrix,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    head: Rows,
}

impl Reference {
    /// Reads the weights in the form that the profile's orders take.
    pub fn new(weights: &ModelWeights, profile: Profile) -> Self {
        let rows = |m: &Matrix| Rows::new(m, profile);
        let layers = weights.layers.iter().map(|l| Layer {
            attn_norm: l.attn_norm.clone(),
            ffn_norm: l.ffn_norm.clone(),
            matrices: [&l.wq, &l.wk, &l.wv, &l.wo, &l.w_gate, &l.w_up, &l.w_down].map(rows),
        });
        Self {
            geometry: weights.geometry.clone(),
            profile,
            embedding: weights.embedding.clone(),
            layers: layers.collect(),
            final_norm: weights.final_norm.clone(),
            head: rows(weights.head.as_ref().unwrap_or(&weights.embedding)),
        }
    }

    fn norm(&self, x: &[f32], w: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        rms_norm(x, w, self.geometry.rms_eps, &mut out);
        out
    }

    fn embed(&self, token: u32) -> Vec<f32> {
        let mut x = vec![0.0; self.geometry.hidden];
        dequantise_row(&self.embedding, token as usize, &mut x);
        if self.profile == Profile::Int8 {
            let row = quantise_int8_row(&x);
            x = row.q.iter().map(|&q| f32::from(q) * row.s).collect();
        }
        x
    }

    /// Logits `[vocab]` of every position of `tokens` from `from` on.
    pub fn logits(&self, tokens: &[u32], from: usize) -> Vec<Vec<f32>> {
        let g = &self.geometry;
        let (d, group) = (g.head_dim, g.heads / g.kv_heads);
        let mut cache = vec![(Vec::<Vec<f32>>::new(), Vec::<Vec<f32>>::new()); g.layers];
        let mut logits = Vec::new();
        for (p, &token) in tokens.iter().enumerate() {
            let table = RopeTable::at(p, d, g.rope_base);
            let rotated = |mut x: Vec<f32>| {
                x.chunks_exact_mut(d).for_each(|head| rotate_head(head, &table, g.rope_pairing));
                x
            };
            let mut x = self.embed(token);
            for (layer, (keys, values)) in self.layers.iter().zip(&mut cache) {
                let [wq, wk, wv, wo, gate, up, down] = &layer.matrices;
                let h = self.norm(&x, &layer.attn_norm);
                let q = rotated(wq.times(&h));
                keys.push(rotated(wk.times(&h)));
                values.push(wv.times(&h));
                let mut attended = Vec::with_capacity(g.heads * d);
                for head in 0..g.heads {
                    let at = head / group * d;
                    let keys: Vec<&[f32]> = keys.iter().map(|k| &k[at..at + d]).collect();
                    let values: Vec<&[f32]> = values.iter().map(|v| &v[at..at + d]).collect();
                    let segment = self.profile.attention_segment();
                    attended.extend(attend(&q[head * d..][..d], &keys, &values, p, 0, segment));
                }
                x.iter_mut().zip(wo.times(&attended)).for_each(|(x, o)| *x += o);
                let h = self.norm(&x, &layer.ffn_norm);
                let gated: Vec<f32> = gate.times(&h).iter().zip(up.times(&h)).map(|(&g, u)| swiglu(g, u)).collect();
                x.iter_mut().zip(down.times(&gated)).for_each(|(x, o)| *x += o);
            }
            if p >= from {
                logits.push(self.head.times(&self.norm(&x, &self.final_norm)));
            }
        }
        logits
    }
}
