//! From a configuration to a loaded model and a running engine; the commands that compute share it.

use std::error::Error;
use std::path::PathBuf;

use crate::actors::topology::{Engine, EngineError};
use crate::backend::cpu::{CpuBackend, CpuConfig, Isa};
use crate::backend::cuda::{self, CudaBackend, CudaConfig, GraphLimits, PoolSize};
use crate::backend::{AttentionVariant, Backend, BackendError, BackendFactory};
use crate::config::{BackendChoice, Config, IsaChoice, ModelPath};
use crate::model::load::{self, LoadedModel, ModelSource};
use crate::model::pull::{self, Progress};
use crate::model::tokenizer::Tokenizer;
use crate::model::{ModelWeights, chat_template::ChatTemplate};

/// Positions of scored prompts per step that have room in page-locked memory, 4 · vocabulary bytes each, twice.
const SCORED_POSITIONS: usize = 64;

/// A running engine and what turns text into its tokens and back.
pub struct Assembled {
    /// The engine.
    pub engine: Engine,
    /// The model's tokenizer.
    pub tokenizer: Tokenizer,
    /// The model's chat template.
    pub template: ChatTemplate,
}

/// Where the configured model lies; the default one is fetched when the cache has none.
///
/// # Errors
/// It cannot be fetched.
pub fn source(config: &Config, progress: Progress) -> Result<ModelSource, Box<dyn Error>> {
    Ok(match &config.model.source {
        ModelPath::File(path) => ModelSource::Gguf(path.clone()),
        ModelPath::Synthetic => ModelSource::Synthetic {
            geometry: config.model.geometry.clone(),
            block: config.model.block,
            seed: config.model.seed,
        },
        ModelPath::Default => ModelSource::Gguf(default_model(config, progress)?),
    })
}

fn default_model(config: &Config, progress: Progress) -> Result<PathBuf, Box<dyn Error>> {
    let cache = config.cache_dir.clone().or_else(pull::default_cache_dir);
    let cache = cache.ok_or("there is no home folder for the model cache: set cache.dir")?;
    Ok(pull::default_model(&cache, progress)?)
}

/// Loads the configured model and starts an engine over it.
///
/// # Errors
/// The model cannot be fetched or loaded, or the backend refuses.
pub fn assemble(config: &Config, progress: Progress) -> Result<Assembled, Box<dyn Error>> {
    check_trace(config)?;
    let source = source(config, progress)?;
    let LoadedModel { weights, tokenizer, chat_template, name } = load::load(&source, config.model.profile)?;
    let context = weights.geometry.context;
    tracing::info!(
        name,
        layers = weights.geometry.layers,
        context,
        profile = config.model.profile.name(),
        "model loaded"
    );
    let engine = Engine::start(config.engine(context), backend(config, weights))?;
    let handle = engine.handle();
    let facts = handle.facts();
    tracing::info!(
        device = facts.device,
        attention = config.attention.name(),
        weight_mb = facts.weight_bytes / 1_000_000,
        kv_mb = facts.kv_bytes / 1_000_000,
        "engine started"
    );
    Ok(Assembled { engine, tokenizer, template: chat_template })
}

/// Whether the engine will be able to write `telemetry.step_trace`, asked before the model is loaded. A pipe or a device is left alone: to
/// open it may be seen.
fn check_trace(config: &Config) -> Result<(), EngineError> {
    let Some(path) = &config.telemetry.step_trace else { return Ok(()) };
    if std::fs::metadata(path).is_ok_and(|meta| !meta.is_file() && !meta.is_dir()) {
        return Ok(());
    }
    let opened = std::fs::OpenOptions::new().create(true).append(true).open(path);
    opened.map(drop).map_err(|source| EngineError::Trace { path: path.clone(), source })
}

/// The configured backend over these weights.
pub fn backend(config: &Config, weights: ModelWeights) -> BackendFactory {
    let libraries = config.executor.libraries.as_deref();
    match config.executor.backend {
        BackendChoice::Cpu => cpu(config, weights),
        BackendChoice::Cuda => cuda(config, weights),
        BackendChoice::Auto => match cuda::probe(config.executor.device, libraries) {
            Ok(report) => {
                tracing::info!(gpu = report.name, "a GPU was found");
                cuda(config, weights)
            }
            Err(reason) => without_gpu(config, weights, &reason),
        },
    }
}

/// What `auto` falls back to when no GPU can be used for this `reason`: the CPU, unless the configuration asks for what only a GPU has.
fn without_gpu(config: &Config, weights: ModelWeights, reason: &str) -> BackendFactory {
    if config.kv.memory_fraction.is_some() {
        let reason =
            format!("kv.memory_fraction needs a GPU; write 0.0 and set kv.pages. No GPU can be used: {reason}");
        return Box::new(move || Err(BackendError::Unavailable { backend: "cpu", reason }));
    }
    tracing::info!(reason, "no GPU: serving on the CPU");
    cpu(config, weights)
}

/// The CPU backend's settings.
pub fn cpu_settings(config: &Config) -> CpuConfig {
    CpuConfig {
        threads: config.executor.threads.unwrap_or(0),
        isa: match config.executor.isa {
            IsaChoice::Auto => Isa::Auto,
            IsaChoice::Scalar => Isa::Scalar,
            IsaChoice::Avx2 => Isa::Avx2,
            IsaChoice::Avx512 => Isa::Avx512,
        },
        pages: config.kv.pages,
        page_tokens: config.kv.page_tokens,
        slots: config.limits.max_batch,
        max_step_tokens: config.max_step_tokens(),
    }
}

fn cpu(config: &Config, weights: ModelWeights) -> BackendFactory {
    let settings = cpu_settings(config);
    let (variant, profile) = (config.attention, config.model.profile);
    Box::new(move || {
        let backend = CpuBackend::with_attention(variant, weights, profile, settings)?;
        Ok(Box::new(backend) as Box<dyn Backend>)
    })
}

fn cuda(config: &Config, weights: ModelWeights) -> BackendFactory {
    if config.attention == AttentionVariant::Reference {
        let reason =
            "attention.variant \"reference\" exists on the CPU only: write \"auto\", or executor.backend = \"cpu\"";
        return Box::new(move || Err(BackendError::Unavailable { backend: "cuda", reason: reason.to_owned() }));
    }
    let graphs = &config.graphs;
    let settings = CudaConfig {
        device: config.executor.device,
        pool: config.kv.memory_fraction.map_or(PoolSize::Pages(config.kv.pages), PoolSize::MemoryFraction),
        slots: config.limits.max_batch,
        max_step_tokens: config.max_step_tokens(),
        host_logit_rows: config.limits.max_batch + SCORED_POSITIONS,
        graphs: GraphLimits {
            decode: if graphs.decode { config.limits.max_batch } else { 0 },
            singleton: if graphs.prefill { graphs.max_entries } else { 0 },
            packed: if graphs.packed { graphs.max_entries } else { 0 },
        },
        cache_dir: config.cache_dir.clone().or_else(pull::default_cache_dir).map(|dir| dir.join("kernels")),
        libraries: config.executor.libraries.clone(),
        kernels: None,
    };
    let profile = config.model.profile;
    Box::new(move || Ok(Box::new(CudaBackend::new(weights, profile, &settings)?) as Box<dyn Backend>))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_gpu_memory_is_refused_when_auto_finds_no_gpu_and_pages_are_not() {
        let refusal = |set: &str| {
            let overrides = ["model.path=synthetic", "executor.backend=auto", "kv.pages=64", set];
            let config = Config::load(None, &overrides.map(String::from)).expect("a configuration");
            let source = source(&config, Progress::Hidden).expect("a recipe");
            let model = load::load(&source, config.model.profile).expect("a synthetic model");
            without_gpu(&config, model.weights, "no driver")().err().map(|e| e.to_string())
        };
        let error = refusal("kv.memory_fraction=0.5").expect("refused");
        assert!(error.contains("kv.memory_fraction needs a GPU") && error.contains("no driver"), "{error}");
        assert_eq!(refusal("kv.memory_fraction=0.0"), None);
    }

    #[test]
    fn an_attention_variant_that_a_backend_does_not_have_is_refused_with_what_to_write() {
        let overrides = ["model.path=synthetic", "attention.variant=reference", "executor.backend=cuda"];
        let config = Config::load(None, &overrides.map(String::from)).expect("a configuration");
        let source = source(&config, Progress::Hidden).expect("a recipe");
        let model = load::load(&source, config.model.profile).expect("a synthetic model");
        let error = backend(&config, model.weights)().err().expect("refused").to_string();
        assert!(error.contains("attention.variant \"reference\" exists on the CPU only"), "{error}");
    }
}
