//! Models and backends that the suites run on.

use std::path::PathBuf;
use std::sync::Arc;

use crate::backend::cpu::{CpuBackend, CpuConfig, Isa};
use crate::backend::cuda::{CudaBackend, CudaConfig, GraphLimits, PoolSize};
use crate::backend::{Backend, BackendError, Completion, DeviceCounts, Facts, SlotBinding, StepOutput, ValidStep};
use crate::model::load::{self, ModelError, ModelSource};
use crate::model::{Geometry, MatrixFormat, ModelWeights, Profile, RopePairing, synthetic};

/// A named geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Shape {
    /// The seed's: 12 layers, 768, 12/3 heads of 64, FFN 2048, vocabulary 50,304.
    Seed,
    /// Two layers, 256, 4/2 heads of 64: for the CPU and for many positions.
    Small,
    /// 9/3 heads of 64, adjacent rotary pairs.
    Nine,
    /// 32/8 heads of 128.
    Wide,
    /// Group 1.
    Single,
    /// Group 8.
    Eight,
}

impl Shape {
    /// Every shape.
    pub const ALL: [Shape; 6] = [Shape::Small, Shape::Nine, Shape::Wide, Shape::Single, Shape::Eight, Shape::Seed];

    /// The geometry.
    pub fn geometry(self) -> Geometry {
        let (layers, hidden, heads, kv_heads, head_dim, ffn, vocab) = match self {
            Shape::Seed => (12, 768, 12, 3, 64, 2048, 50_304),
            Shape::Small => (2, 256, 4, 2, 64, 512, 1000),
            Shape::Nine => (3, 576, 9, 3, 64, 1536, 2048),
            Shape::Wide => (2, 512, 32, 8, 128, 1024, 1024),
            Shape::Single => (2, 256, 4, 4, 64, 512, 1024),
            Shape::Eight => (2, 512, 8, 1, 64, 768, 1024),
        };
        let rope_pairing = if self == Shape::Nine { RopePairing::Adjacent } else { RopePairing::Halves };
        Geometry {
            layers,
            hidden,
            heads,
            kv_heads,
            head_dim,
            ffn,
            vocab,
            context: 1280,
            rope_base: 10_000.0,
            rms_eps: 1e-5,
            rope_pairing,
        }
    }
}

/// What a suite runs on: a synthetic model, or the model of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Seeded weights.
    Shape(Shape),
    /// A GGUF file.
    File(PathBuf),
}

impl Source {
    /// The name of a shape, or else the path of a GGUF file.
    ///
    /// # Errors
    /// Neither, with the names of the shapes.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Ok(shape) = <Shape as clap::ValueEnum>::from_str(text, true) {
            return Ok(Self::Shape(shape));
        }
        let path = PathBuf::from(text);
        if path.is_file() {
            return Ok(Self::File(path));
        }
        let names: Vec<String> = Shape::ALL.iter().map(|s| format!("{s:?}").to_lowercase()).collect();
        Err(format!("{text} is neither a file nor one of {}", names.join(", ")))
    }

    /// For people.
    pub fn name(&self) -> String {
        match self {
            Self::Shape(shape) => format!("{shape:?}"),
            Self::File(path) => path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
        }
    }

    /// The weights; a synthetic model has matrices of `block` in profile q8.
    ///
    /// # Errors
    /// A file that is no model.
    pub fn weights(&self, profile: Profile, block: MatrixFormat) -> Result<ModelWeights, ModelError> {
        match self {
            Self::Shape(shape) => Ok(weights(*shape, profile, block, 1)),
            Self::File(path) => Ok(load::load(&ModelSource::Gguf(path.clone()), profile)?.weights),
        }
    }
}

/// Which backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Which {
    /// The CPU.
    Cpu,
    /// The GPU.
    Cuda,
}

/// How a backend is opened.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Which.
    pub which: Which,
    /// KV pages.
    pub pages: usize,
    /// Slots.
    pub slots: usize,
    /// Token rows of a step.
    pub tokens: usize,
    /// Positions of a step whose logits the host reads (CUDA).
    pub logit_rows: usize,
    /// Graph classes (CUDA).
    pub graphs: GraphLimits,
    /// Folder to search first for the compiler (CUDA).
    pub libraries: Option<PathBuf>,
    /// Folder of kernel sources that replace embedded ones (CUDA).
    pub kernels: Option<PathBuf>,
    /// Folder of compiled kernels (CUDA).
    pub cache_dir: Option<PathBuf>,
}

/// No graph at all.
pub const EAGER: GraphLimits = GraphLimits { decode: 0, singleton: 0, packed: 0 };

/// Synthetic weights of a shape.
pub fn weights(shape: Shape, profile: Profile, block: MatrixFormat, seed: u64) -> ModelWeights {
    synthetic::weights(&shape.geometry(), profile, block, seed)
}

/// Either backend.
pub enum Subject {
    /// The CPU's.
    Cpu(Box<CpuBackend>),
    /// The GPU's.
    Cuda(Box<CudaBackend>),
}

impl Subject {
    /// Opens a backend over these weights.
    ///
    /// # Errors
    /// The backend's.
    pub fn open(weights: ModelWeights, profile: Profile, setup: &Setup) -> Result<Self, BackendError> {
        match setup.which {
            Which::Cpu => {
                let config = CpuConfig {
                    threads: 0,
                    isa: Isa::Auto,
                    pages: setup.pages,
                    page_tokens: 16,
                    slots: setup.slots,
                    max_step_tokens: setup.tokens,
                };
                CpuBackend::new(weights, profile, config).map(|b| Subject::Cpu(Box::new(b)))
            }
            Which::Cuda => {
                let config = CudaConfig {
                    device: 0,
                    pool: PoolSize::Pages(setup.pages),
                    slots: setup.slots,
                    max_step_tokens: setup.tokens,
                    host_logit_rows: setup.logit_rows,
                    graphs: setup.graphs,
                    cache_dir: setup.cache_dir.clone(),
                    libraries: setup.libraries.clone(),
                    kernels: setup.kernels.clone(),
                };
                CudaBackend::new(weights, profile, &config).map(|b| Subject::Cuda(Box::new(b)))
            }
        }
    }

    /// Fills with impossible values what the next step, which has these bindings, must not read.
    ///
    /// # Errors
    /// The device's.
    pub fn poison(&mut self, bindings: &[SlotBinding]) -> Result<bool, BackendError> {
        match self {
            Subject::Cpu(b) => b.poison_steps(),
            Subject::Cuda(b) => b.poison(bindings)?,
        }
        Ok(true)
    }

    /// The GPU's backend, to make it refuse graphs.
    pub fn cuda_mut(&mut self) -> Option<&mut CudaBackend> {
        match self {
            Subject::Cpu(_) => None,
            Subject::Cuda(b) => Some(b),
        }
    }

    fn inner(&mut self) -> &mut dyn Backend {
        match self {
            Subject::Cpu(b) => b.as_mut(),
            Subject::Cuda(b) => b.as_mut(),
        }
    }

    /// The GPU's backend, for profiles.
    pub fn cuda(&self) -> Option<&CudaBackend> {
        match self {
            Subject::Cpu(_) => None,
            Subject::Cuda(b) => Some(b),
        }
    }
}

impl Backend for Subject {
    fn counts(&self) -> DeviceCounts {
        match self {
            Subject::Cpu(b) => b.counts(),
            Subject::Cuda(b) => b.counts(),
        }
    }

    fn facts(&self) -> &Facts {
        match self {
            Subject::Cpu(b) => b.facts(),
            Subject::Cuda(b) => b.facts(),
        }
    }

    fn completion(&self) -> Completion {
        match self {
            Subject::Cpu(b) => b.completion(),
            Subject::Cuda(b) => b.completion(),
        }
    }

    fn on_completion(&mut self, notify: Arc<dyn Fn() + Send + Sync>) {
        self.inner().on_completion(notify);
    }

    fn submit(&mut self, step: ValidStep) -> Result<(), BackendError> {
        self.inner().submit(step)
    }

    fn poll(&mut self) -> Result<Option<StepOutput>, BackendError> {
        self.inner().poll()
    }
}
