//! What a model is before a backend takes it: geometry, weights as stored, tokenizer and chat template.

pub mod chat_template;
pub mod dequant;
pub mod detokenizer;
pub mod geometry;
pub mod gguf;
pub mod load;
pub mod pull;
pub mod synthetic;
pub mod tokenizer;
pub mod weights;

pub use chat_template::{ChatMessage, ChatTemplate, GenerationPrompt, TemplateError};
pub use detokenizer::Detokenizer;
pub use geometry::{Geometry, Profile, RopePairing};
pub use load::{LoadedModel, ModelError, ModelSource, load};
pub use tokenizer::{SpecialText, SpecialTokens, Tokenizer, TokenizerError};
pub use weights::{LayerWeights, Matrix, MatrixFormat, ModelWeights, TensorBytes};
