//! What a model is before a backend takes it: geometry, weights as stored, tokenizer and chat template.

pub mod dequant;
pub mod geometry;
pub mod pull;
pub mod synthetic;
pub mod weights;

pub use geometry::{Geometry, Profile, RopePairing};
pub use weights::{LayerWeights, Matrix, MatrixFormat, ModelWeights, TensorBytes};
