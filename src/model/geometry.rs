//! The shape of a decoder model and the numerics profile it runs in. Pure data with checks; no I/O.

use serde::{Deserialize, Serialize};

/// How rotary embedding pairs the components of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopePairing {
    /// Pairs (2i, 2i+1): GGUF architecture `llama`, whose converter permuted Q and K.
    Adjacent,
    /// Pairs (i, i + D/2): safetensors, qwen and synthetic models.
    Halves,
}

/// Largest rotary base: models go up to about 1e8.
pub const ROPE_BASE_MAX: f64 = 1e12;

/// Epsilons of RMSNorm that a model may have; models have 1e-6 or 1e-5.
pub const RMS_EPS: std::ops::RangeInclusive<f32> = 1e-12..=1.0;

/// A numerics profile: which bits the model has. docs/arithmetic.md defines each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// f32 weights, activations and KV.
    F32,
    /// int8 weights with one scale per output row, f32 activations and KV.
    Int8,
    /// GGUF block weights, activations quantised per 32-block for matrix products, f32 KV.
    Q8,
}

impl Profile {
    /// S: positions per attention segment (docs/arithmetic.md).
    pub const fn attention_segment(self) -> usize {
        match self {
            Profile::F32 | Profile::Int8 => 1024,
            Profile::Q8 => 256,
        }
    }

    /// The name used in the configuration and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Profile::F32 => "f32",
            Profile::Int8 => "int8",
            Profile::Q8 => "q8",
        }
    }
}

/// The shape of a llama-family decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Geometry {
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Components per head; a multiple of 32.
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Longest sequence in tokens.
    pub context: usize,
    /// Rotary base.
    pub rope_base: f64,
    /// Epsilon of RMSNorm.
    pub rms_eps: f32,
    /// How rotary pairs components.
    pub rope_pairing: RopePairing,
}

/// Why a geometry cannot be served.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum GeometryError {
    /// A dimension is zero or above its bound.
    #[error("{name} is {value}, it must lie in 1..={max}")]
    OutOfRange {
        /// The dimension's name.
        name: &'static str,
        /// What was given.
        value: usize,
        /// Largest value accepted.
        max: usize,
    },
    /// Two dimensions do not fit each other.
    #[error("{0}")]
    Mismatch(String),
}

impl Geometry {
    /// Width of all query heads together.
    pub const fn q_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub const fn kv_dim(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Query heads that share one KV head.
    pub const fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Checks every bound; errors name the first dimension that is wrong.
    pub fn validate(&self) -> Result<(), GeometryError> {
        let bounds = [
            ("layers", self.layers, 512),
            ("hidden", self.hidden, 65_536),
            ("heads", self.heads, 1_024),
            ("kv_heads", self.kv_heads, 1_024),
            ("head_dim", self.head_dim, 512),
            ("ffn", self.ffn, 262_144),
            ("vocab", self.vocab, 1 << 20),
            ("context", self.context, 1 << 20),
        ];
        for (name, value, max) in bounds {
            if value == 0 || value > max {
                return Err(GeometryError::OutOfRange { name, value, max });
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let text = format!("heads ({}) must be a multiple of kv_heads ({})", self.heads, self.kv_heads);
            return Err(GeometryError::Mismatch(text));
        }
        if !self.head_dim.is_multiple_of(32) {
            return Err(GeometryError::Mismatch(format!("head_dim ({}) must be a multiple of 32", self.head_dim)));
        }
        if !(self.rope_base > 1.0 && self.rope_base <= ROPE_BASE_MAX) {
            let text = format!("rope_base ({:e}) must be above 1 and at most {ROPE_BASE_MAX:e}", self.rope_base);
            return Err(GeometryError::Mismatch(text));
        }
        if !RMS_EPS.contains(&self.rms_eps) {
            let (least, most) = (RMS_EPS.start(), RMS_EPS.end());
            let text = format!("rms_eps ({:e}) must lie in {least:e}..={most}", self.rms_eps);
            return Err(GeometryError::Mismatch(text));
        }
        Ok(())
    }
}
