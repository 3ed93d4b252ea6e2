//! What a model is before a backend takes it: geometry, weights as stored, tokenizer and chat template.

pub mod geometry;
pub mod weights;

pub use geometry::{Geometry, Profile, RopePairing};
pub use weights::{LayerWeights, Matrix, MatrixFormat, ModelWeights, TensorBytes};
