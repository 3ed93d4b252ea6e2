//! Loading: from a file or a recipe to everything that serving needs of a model.

use std::path::{Path, PathBuf};

use super::chat_template::{CHATML, ChatTemplate, TemplateError};
use super::geometry::{Geometry, GeometryError, Profile};
use super::gguf::{self, Gguf, GgufError, Storage};
use super::synthetic;
use super::tokenizer::{Tokenizer, TokenizerError};
use super::weights::{MatrixFormat, ModelWeights};

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelSource {
    /// A GGUF file.
    Gguf(PathBuf),
    /// Seeded random weights.
    Synthetic {
        /// Shape.
        geometry: Geometry,
        /// Format of the matrices in profile q8; the other profiles have f32.
        block: MatrixFormat,
        /// Seed of the weights.
        seed: u64,
    },
}

/// A model that is ready for a backend and for text.
#[derive(Clone, Debug)]
pub struct LoadedModel {
    /// Weights as stored.
    pub weights: ModelWeights,
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
    /// Conversations to text.
    pub chat_template: ChatTemplate,
    /// For people: the file's own name, else the file name's stem, or `synthetic`.
    pub name: String,
}

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file is not a model that can be served.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Its tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Its chat template cannot be used.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A synthetic geometry is impossible.
    #[error("the synthetic model's geometry is impossible: {0}")]
    Geometry(#[from] GeometryError),
    /// What a file holds cannot be served.
    #[error("{path}: {source}")]
    InFile {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<ModelError>,
    },
    /// A synthetic model is larger than the memory.
    #[error(
        "there is no memory for the {bytes} bytes of the synthetic model's weights: lower model.geometry.layers, hidden, ffn or vocab, or choose profile q8 with model.block q4_0"
    )]
    Memory {
        /// Bytes of the weights.
        bytes: usize,
    },
    /// Weights, tokenizer and profile do not fit each other.
    #[error("{0}")]
    Mismatch(String),
}

/// Loads a model. A file is mapped, not read; the pages come in when a backend takes the weights.
///
/// # Errors
/// A file that is not a complete supported model, or a recipe that is impossible in this profile.
pub fn load(source: &ModelSource, profile: Profile) -> Result<LoadedModel, ModelError> {
    match source {
        ModelSource::Gguf(path) => from_file(path),
        ModelSource::Synthetic { geometry, block, seed } => from_recipe(geometry, profile, *block, *seed),
    }
}

/// Loads a GGUF file that lies in memory; tensors are copied. Total over any bytes: the entrance for fuzzing.
///
/// # Errors
/// As `load`.
pub fn from_bytes(bytes: &[u8]) -> Result<LoadedModel, ModelError> {
    assemble(&Gguf::parse(bytes)?, Storage::Memory(bytes), "model")
}

fn from_file(path: &Path) -> Result<LoadedModel, ModelError> {
    let (map, gguf) = gguf::open(path)?;
    let stem = path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy());
    let in_file = |source| ModelError::InFile { path: path.to_owned(), source: Box::new(source) };
    assemble(&gguf, Storage::Map(&map), &stem).map_err(in_file)
}

fn assemble(gguf: &Gguf, storage: Storage, fallback_name: &str) -> Result<LoadedModel, ModelError> {
    let weights = gguf::llama::weights(gguf, storage)?;
    let tokenizer = Tokenizer::from_gguf(&gguf.metadata)?;
    let (tokens, rows) = (tokenizer.vocab_size(), weights.geometry.vocab);
    if tokens > rows {
        let text = format!("the tokenizer has {tokens} tokens, the embedding only {rows} rows: the file is corrupt");
        return Err(ModelError::Mismatch(text));
    }
    let source = gguf.metadata.string("tokenizer.chat_template")?.unwrap_or(CHATML);
    let chat_template = ChatTemplate::compile(source, tokenizer.bos_text(), tokenizer.eos_text())?;
    let name = gguf.metadata.string("general.name")?.unwrap_or(fallback_name).to_owned();
    Ok(LoadedModel { weights, tokenizer, chat_template, name })
}

fn from_recipe(
    geometry: &Geometry,
    profile: Profile,
    block: MatrixFormat,
    seed: u64,
) -> Result<LoadedModel, ModelError> {
    geometry.validate()?;
    let unit = block.block().0;
    for (name, width) in [("hidden", geometry.hidden), ("ffn", geometry.ffn), ("heads · head_dim", geometry.q_dim())] {
        if profile == Profile::Q8 && !width.is_multiple_of(unit) {
            let text = format!("{name} is {width}, {block:?} needs a multiple of {unit}");
            return Err(ModelError::Geometry(GeometryError::Mismatch(text)));
        }
    }
    let bytes = synthetic::bytes(geometry, profile, block);
    // All of it at once: a system that promises more than it has refuses what is far beyond it.
    let mut all = Vec::<u8>::new();
    if all.try_reserve_exact(bytes).is_err() {
        return Err(ModelError::Memory { bytes });
    }
    // An allocation of which nobody sees anything may be left out.
    drop(std::hint::black_box(all));
    Ok(LoadedModel {
        weights: synthetic::weights(geometry, profile, block, seed),
        tokenizer: Tokenizer::bytes(geometry.vocab),
        chat_template: ChatTemplate::compile(CHATML, "", "")?,
        name: "synthetic".to_owned(),
    })
}
