//! What a model is before a backend takes it: geometry, weights as stored, tokenizer and chat template.

#[forbid(unsafe_code)]
pub mod chat_template;
#[forbid(unsafe_code)]
pub mod conversation;
#[forbid(unsafe_code)]
pub mod dequant;
#[forbid(unsafe_code)]
pub mod detokenizer;
#[forbid(unsafe_code)]
pub mod geometry;
pub mod gguf;
#[forbid(unsafe_code)]
pub mod load;
#[forbid(unsafe_code)]
pub mod pull;
#[forbid(unsafe_code)]
pub mod synthetic;
#[forbid(unsafe_code)]
pub mod tokenizer;
#[forbid(unsafe_code)]
pub mod weights;

pub use chat_template::{ChatMessage, ChatTemplate, GenerationPrompt, TemplateError};
pub use detokenizer::Detokenizer;
pub use geometry::{Geometry, Profile, RopePairing};
pub use load::{LoadedModel, ModelError, ModelSource, load};
pub use tokenizer::{SpecialText, SpecialTokens, Tokenizer, TokenizerError};
pub use weights::{LayerWeights, Matrix, MatrixFormat, ModelWeights, TensorBytes};
