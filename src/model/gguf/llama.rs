//! From a read GGUF file of architecture `llama` to `ModelWeights`: geometry from the metadata, every tensor by name and shape.
//!
//! Nothing is ignored: a tensor that has no place in the model, an expert count, a rope scaling or a bias is refused by name.
//! Q and K were permuted by the converter for adjacent rotary pairs, hence `RopePairing::Adjacent`.

use std::collections::HashSet;

use super::{Gguf, GgufError, Storage, TensorInfo};
use crate::model::dequant;
use crate::model::geometry::{Geometry, RopePairing};
use crate::model::weights::{LayerWeights, Matrix, ModelWeights};

/// The geometry that the metadata describe, checked.
///
/// # Errors
/// A missing or impossible key, another architecture, or a feature that is not supported.
pub fn geometry(gguf: &Gguf) -> Result<Geometry, GgufError> {
    let meta = &gguf.metadata;
    let architecture = meta.string("general.architecture")?;
    if architecture != Some("llama") {
        let name = architecture.unwrap_or("(absent)");
        return Err(GgufError::Unsupported { feature: format!("architecture {name}") });
    }
    let number = |key: &str| {
        let value = meta.unsigned(&format!("llama.{key}"))?;
        // A value above usize is above every bound of `Geometry::validate` too.
        Ok::<_, GgufError>(value.map(|v| usize::try_from(v).unwrap_or(usize::MAX)))
    };
    let needed = |key: &str| number(key)?.ok_or_else(|| GgufError::MissingKey { key: format!("llama.{key}") });
    let heads = needed("attention.head_count")?;
    let hidden = needed("embedding_length")?;
    let head_dim = match number("attention.key_length")? {
        Some(n) => n,
        None => hidden.checked_div(heads).unwrap_or(0),
    };
    let epsilon = "llama.attention.layer_norm_rms_epsilon";
    let epsilon = meta.float(epsilon)?.ok_or_else(|| GgufError::MissingKey { key: epsilon.to_owned() })?;
    let geometry = Geometry {
        layers: needed("block_count")?,
        hidden,
        heads,
        kv_heads: number("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        ffn: needed("feed_forward_length")?,
        vocab: gguf.tensor("token_embd.weight").and_then(|t| t.shape.get(1).copied()).unwrap_or(0),
        context: needed("context_length")?,
        rope_base: meta.float("llama.rope.freq_base")?.unwrap_or(10_000.0),
        rms_eps: epsilon as f32,
        rope_pairing: RopePairing::Adjacent,
    };
    for (key, plain) in [
        ("expert_count", 0),
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("attention.sliding_window", 0),
    ] {
        if let Some(value) = number(key)?.filter(|&value| value != plain) {
            return Err(GgufError::Unsupported { feature: format!("llama.{key} = {value}") });
        }
    }
    if let Some(kind) = meta.string("llama.rope.scaling.type")?.filter(|&kind| kind != "none") {
        return Err(GgufError::Unsupported { feature: format!("rope scaling {kind}") });
    }
    geometry.validate()?;
    Ok(geometry)
}

/// All weights of the model; the tensors share `storage`, from whose bytes `gguf` was read.
///
/// # Errors
/// As `geometry`, and a missing, misshapen or superfluous tensor.
pub fn weights(gguf: &Gguf, storage: Storage) -> Result<ModelWeights, GgufError> {
    let geometry = geometry(gguf)?;
    let g = &geometry;
    let mut taker = Taker { gguf, storage, taken: HashSet::new() };
    let layers = (0..g.layers).map(|i| layer(&mut taker, g, i)).collect::<Result<_, _>>()?;
    let head = match gguf.tensor("output.weight") {
        Some(_) => Some(taker.matrix("output.weight", g.vocab, g.hidden)?),
        None => None,
    };
    let model = ModelWeights {
        embedding: taker.matrix("token_embd.weight", g.vocab, g.hidden)?,
        layers,
        final_norm: taker.norm("output_norm.weight", g.hidden)?,
        head,
        geometry,
    };
    match gguf.tensors.iter().find(|tensor| !taker.taken.contains(tensor.name.as_str())) {
        Some(tensor) => Err(GgufError::Unsupported { feature: format!("tensor {}", tensor.name) }),
        None => Ok(model),
    }
}

fn layer(taker: &mut Taker, g: &Geometry, i: usize) -> Result<LayerWeights, GgufError> {
    let name = |tensor: &str| format!("blk.{i}.{tensor}.weight");
    Ok(LayerWeights {
        attn_norm: taker.norm(&name("attn_norm"), g.hidden)?,
        wq: taker.matrix(&name("attn_q"), g.q_dim(), g.hidden)?,
        wk: taker.matrix(&name("attn_k"), g.kv_dim(), g.hidden)?,
        wv: taker.matrix(&name("attn_v"), g.kv_dim(), g.hidden)?,
        wo: taker.matrix(&name("attn_output"), g.hidden, g.q_dim())?,
        ffn_norm: taker.norm(&name("ffn_norm"), g.hidden)?,
        w_gate: taker.matrix(&name("ffn_gate"), g.ffn, g.hidden)?,
        w_up: taker.matrix(&name("ffn_up"), g.ffn, g.hidden)?,
        w_down: taker.matrix(&name("ffn_down"), g.hidden, g.ffn)?,
    })
}

/// Takes tensors by name and remembers which.
struct Taker<'a> {
    gguf: &'a Gguf,
    storage: Storage<'a>,
    taken: HashSet<&'a str>,
}

impl<'a> Taker<'a> {
    /// The tensor `name`, which must have this shape (fastest dimension first).
    fn take(&mut self, name: &str, shape: &[usize]) -> Result<&'a TensorInfo, GgufError> {
        let tensor = self.gguf.tensor(name).ok_or_else(|| GgufError::MissingTensor { name: name.to_owned() })?;
        if tensor.shape != shape {
            let fault = format!("has shape {:?}, the metadata ask for {shape:?}", tensor.shape);
            return Err(GgufError::Tensor { name: name.to_owned(), fault });
        }
        self.taken.insert(&tensor.name);
        Ok(tensor)
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix, GgufError> {
        let tensor = self.take(name, &[cols, rows])?;
        Ok(Matrix { format: tensor.format, rows, cols, bytes: self.storage.tensor(tensor.range.clone()) })
    }

    fn norm(&mut self, name: &str, n: usize) -> Result<Vec<f32>, GgufError> {
        let tensor = self.take(name, &[n])?;
        let bytes = self.storage.tensor(tensor.range.clone());
        Ok(dequant::matrix(&Matrix { format: tensor.format, rows: 1, cols: n, bytes }))
    }
}
