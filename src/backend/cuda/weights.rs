//! The model on the device: each matrix in the layout its numerics profile computes with, projections of one input side by side.
//!
//! Profile f32 holds f32; int8 quantises every matrix per output row at load; q8 expands block formats to one byte a weight (the
//! exact integers that the block sums are made of) with their f16 scales, and holds dense matrices as f32.

use std::rc::Rc;

use crate::arith::quant::{quantise_int8_row, weight_block};
use crate::arith::rope::RopeTable;
use crate::model::{Matrix, MatrixFormat, ModelWeights, Profile, dequant};

use super::driver::{Device, DeviceError};
use super::memory::DeviceBuffer;
use super::program::Kind;

/// One matrix, `n` outputs of `k` inputs.
#[derive(Debug)]
pub struct DeviceMatrix {
    /// Layout.
    pub kind: Kind,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    w: DeviceBuffer<u8>,
    scale: Option<DeviceBuffer<u8>>,
    minimum: Option<DeviceBuffer<u8>>,
}

impl DeviceMatrix {
    /// Addresses of weights, scales and minima; 0 where the kind has none.
    pub fn parts(&self) -> [u64; 3] {
        let address = |b: &Option<DeviceBuffer<u8>>| b.as_ref().map_or(0, DeviceBuffer::address);
        [self.w.address(), address(&self.scale), address(&self.minimum)]
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        let of = |b: &Option<DeviceBuffer<u8>>| b.as_ref().map_or(0, DeviceBuffer::len);
        (self.w.len() + of(&self.scale) + of(&self.minimum)) as u64
    }
}

/// The layout of a stored format under a profile.
pub fn kind_of(profile: Profile, format: MatrixFormat) -> Kind {
    match (profile, format) {
        (Profile::F32, _) => Kind::F32,
        (Profile::Int8, _) => Kind::Int8,
        (Profile::Q8, MatrixFormat::Q4_1) => Kind::BlockMin,
        (Profile::Q8, MatrixFormat::Q8_0 | MatrixFormat::Q4_0) => Kind::Block,
        (Profile::Q8, _) => Kind::F32,
    }
}

/// Kinds that a model's matrices have under a profile, in order and once each.
pub fn kinds_of(profile: Profile, weights: &ModelWeights) -> Vec<Kind> {
    let layers = weights.layers.iter().flat_map(|l| [&l.wq, &l.wk, &l.wv, &l.wo, &l.w_gate, &l.w_up, &l.w_down]);
    let mut kinds: Vec<Kind> =
        layers.chain([&weights.embedding]).chain(weights.head.as_ref()).map(|m| kind_of(profile, m.format)).collect();
    kinds.sort();
    kinds.dedup();
    kinds
}

/// Rows gathered on the host before they are copied.
struct Staging {
    kind: Kind,
    k: usize,
    n: usize,
    w: Vec<u8>,
    scale: Vec<u8>,
    minimum: Vec<u8>,
    row: Vec<f32>,
}

impl Staging {
    fn new(kind: Kind, n: usize, k: usize) -> Self {
        let bytes = if kind == Kind::F32 { 4 } else { 1 };
        let w = Vec::with_capacity(n * k * bytes);
        Self { kind, k, n: 0, w, scale: vec![], minimum: vec![], row: vec![0.0; k] }
    }

    fn push(&mut self, matrix: &Matrix, r: usize) {
        self.n += 1;
        if self.kind.is_block() {
            for bytes in matrix.row(r).chunks_exact(matrix.format.block().1) {
                let Some(block) = weight_block(matrix.format, bytes) else { continue };
                self.w.extend(block.q.map(|q| q as u8));
                self.scale.extend_from_slice(&bytes[..2]);
                if block.m.is_some() {
                    self.minimum.extend_from_slice(&bytes[2..4]);
                }
            }
            return;
        }
        dequant::row(matrix, r, &mut self.row);
        if self.kind == Kind::F32 {
            self.w.extend_from_slice(bytemuck::cast_slice(&self.row));
        } else {
            let quantised = quantise_int8_row(&self.row);
            self.w.extend_from_slice(bytemuck::cast_slice(&quantised.q));
            self.scale.extend_from_slice(&quantised.s.to_le_bytes());
        }
    }

    fn upload(self, device: &Rc<Device>, what: &str) -> Result<DeviceMatrix, DeviceError> {
        let part = |bytes: &[u8]| {
            if bytes.is_empty() { Ok(None) } else { DeviceBuffer::from_slice(device, what, bytes).map(Some) }
        };
        Ok(DeviceMatrix {
            kind: self.kind,
            n: self.n,
            k: self.k,
            w: DeviceBuffer::from_slice(device, what, &self.w)?,
            scale: part(&self.scale)?,
            minimum: part(&self.minimum)?,
        })
    }
}

/// Matrices of one input width, one after the other.
fn stacked(device: &Rc<Device>, what: &str, profile: Profile, parts: &[&Matrix]) -> Result<DeviceMatrix, DeviceError> {
    let kind = kind_of(profile, parts[0].format);
    let mut staging = Staging::new(kind, parts.iter().map(|m| m.rows).sum(), parts[0].cols);
    for matrix in parts {
        for r in 0..matrix.rows {
            staging.push(matrix, r);
        }
    }
    staging.upload(device, what)
}

/// Two matrices of one shape, output by output.
fn interleaved(
    device: &Rc<Device>,
    what: &str,
    profile: Profile,
    a: &Matrix,
    b: &Matrix,
) -> Result<DeviceMatrix, DeviceError> {
    let mut staging = Staging::new(kind_of(profile, a.format), 2 * a.rows, a.cols);
    for r in 0..a.rows {
        staging.push(a, r);
        staging.push(b, r);
    }
    staging.upload(device, what)
}

/// One matrix on the device.
///
/// # Errors
/// Out of memory.
pub fn matrix(device: &Rc<Device>, what: &str, profile: Profile, matrix: &Matrix) -> Result<DeviceMatrix, DeviceError> {
    stacked(device, what, profile, &[matrix])
}

/// Gate and up on the device, interleaved.
///
/// # Errors
/// Out of memory.
pub fn pair(device: &Rc<Device>, profile: Profile, gate: &Matrix, up: &Matrix) -> Result<DeviceMatrix, DeviceError> {
    interleaved(device, "gate and up", profile, gate, up)
}

/// Projections of one input: fused when they share a kind.
#[derive(Debug)]
pub enum Projections {
    /// One matrix that holds them all.
    Fused(DeviceMatrix),
    /// One matrix each.
    Split(Vec<DeviceMatrix>),
}

impl Projections {
    fn all(&self) -> &[DeviceMatrix] {
        match self {
            Projections::Fused(m) => std::slice::from_ref(m),
            Projections::Split(all) => all,
        }
    }
}

/// One layer.
#[derive(Debug)]
pub struct DeviceLayer {
    /// `[hidden]`.
    pub attn_norm: DeviceBuffer<f32>,
    /// q, k, v one after the other.
    pub qkv: Projections,
    /// `[hidden, q_dim]`.
    pub wo: DeviceMatrix,
    /// `[hidden]`.
    pub ffn_norm: DeviceBuffer<f32>,
    /// gate and up: fused they are interleaved.
    pub gate_up: Projections,
    /// `[hidden, ffn]`.
    pub w_down: DeviceMatrix,
}

/// The whole model.
#[derive(Debug)]
pub struct DeviceModel {
    /// `[vocab, hidden]`.
    pub embedding: DeviceMatrix,
    /// `[vocab, hidden]`; absent when tied to the embedding.
    pub head: Option<DeviceMatrix>,
    /// Layers in order.
    pub layers: Vec<DeviceLayer>,
    /// `[hidden]`.
    pub final_norm: DeviceBuffer<f32>,
    /// (cos, sin) `[context][head_dim / 2]`.
    pub angles: DeviceBuffer<[f32; 2]>,
    /// Bytes of all matrices.
    pub bytes: u64,
}

impl DeviceModel {
    /// Converts and copies the weights.
    ///
    /// # Errors
    /// Out of memory, naming the tensor.
    pub fn upload(device: &Rc<Device>, profile: Profile, weights: &ModelWeights) -> Result<Self, DeviceError> {
        let mut layers = Vec::with_capacity(weights.layers.len());
        for layer in &weights.layers {
            let one = |what: &str, m: &Matrix| matrix(device, what, profile, m);
            let same =
                |all: &[&Matrix]| all.iter().all(|m| kind_of(profile, m.format) == kind_of(profile, all[0].format));
            let attention = [&layer.wq, &layer.wk, &layer.wv];
            let qkv = if same(&attention) {
                Projections::Fused(stacked(device, "q, k and v", profile, &attention)?)
            } else {
                Projections::Split(attention.iter().map(|m| one("q, k and v", m)).collect::<Result<_, _>>()?)
            };
            let gate_up = if same(&[&layer.w_gate, &layer.w_up]) {
                Projections::Fused(pair(device, profile, &layer.w_gate, &layer.w_up)?)
            } else {
                Projections::Split(vec![one("gate", &layer.w_gate)?, one("up", &layer.w_up)?])
            };
            layers.push(DeviceLayer {
                attn_norm: DeviceBuffer::from_slice(device, "norms", &layer.attn_norm)?,
                qkv,
                wo: one("attention output", &layer.wo)?,
                ffn_norm: DeviceBuffer::from_slice(device, "norms", &layer.ffn_norm)?,
                gate_up,
                w_down: one("down", &layer.w_down)?,
            });
        }
        let embedding = matrix(device, "the embedding", profile, &weights.embedding)?;
        let head =
            weights.head.as_ref().map(|m| matrix(device, "the vocabulary projection", profile, m)).transpose()?;
        let in_layers: u64 = layers
            .iter()
            .flat_map(|l| l.qkv.all().iter().chain(l.gate_up.all()).chain([&l.wo, &l.w_down]))
            .map(DeviceMatrix::bytes)
            .sum();
        let bytes = in_layers + embedding.bytes() + head.as_ref().map_or(0, DeviceMatrix::bytes);
        Ok(Self {
            final_norm: DeviceBuffer::from_slice(device, "norms", &weights.final_norm)?,
            angles: angles(device, weights)?,
            embedding,
            head,
            layers,
            bytes,
        })
    }
}

fn angles(device: &Rc<Device>, weights: &ModelWeights) -> Result<DeviceBuffer<[f32; 2]>, DeviceError> {
    let g = &weights.geometry;
    let mut angles = Vec::with_capacity(g.context * g.head_dim / 2);
    for position in 0..g.context {
        let table = RopeTable::at(position, g.head_dim, g.rope_base);
        angles.extend(table.cos.iter().zip(&table.sin).map(|(&c, &s)| [c, s]));
    }
    DeviceBuffer::from_slice(device, "rotary angles", &angles)
}
