//! A checked reader of GGUF versions 2 and 3 (little-endian): header, metadata, tensor table. It trusts nothing in the file.
//!
//! What holds: every count and length is compared with the bytes that are left before anything is allocated, so memory stays
//! within a small multiple of the file; offsets are added with overflow checks; a tensor that was accepted lies inside the file.
//! Any bytes at all give a `Gguf` or a `GgufError`, never a panic. Layout: the GGUF specification of the ggml project.
//!
//! `llama` maps a read file to `ModelWeights`; `write` makes small files for tests and fuzzing.

#[forbid(unsafe_code)]
mod cursor;
#[forbid(unsafe_code)]
pub mod llama;
#[forbid(unsafe_code)]
mod metadata;
#[forbid(unsafe_code)]
pub mod write;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cursor::Cursor;
pub use metadata::{Array, Metadata, Value};

use super::geometry::GeometryError;
use super::weights::{MatrixFormat, TensorBytes};

/// Most metadata entries, and most tensors, of a file.
pub const MAX_ENTRIES: u64 = 1 << 16;
/// Longest string in bytes.
pub const MAX_STRING_BYTES: u64 = 1 << 24;
/// Most elements of all arrays of a file together.
pub const MAX_ELEMENTS: u64 = 1 << 24;
/// Deepest nesting of arrays.
pub const MAX_NESTING: usize = 4;
/// Most dimensions of a tensor.
pub const MAX_RANK: u32 = 4;

const MAGIC: [u8; 4] = *b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;

/// Why a file is not a model that can be served.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The file cannot be opened or mapped.
    #[error("cannot open the model {path}: {source}")]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A folder where a file should be.
    #[error("{path} is a folder: name the .gguf file in it")]
    Folder {
        /// The folder.
        path: PathBuf,
    },
    /// What is wrong with a file that was opened by its name.
    #[error("{path}: {source}")]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<GgufError>,
    },
    /// Another kind of file.
    #[error("this is not a GGUF file (it does not begin with GGUF): name a .gguf model")]
    Magic,
    /// A version this reader does not know.
    #[error("GGUF version {0} is not supported, only little-endian 2 and 3: convert the model again")]
    Version(u32),
    /// The file ends too early, or a length in it is a lie.
    #[error("the GGUF file ends inside {what} at byte {offset}: it is truncated or corrupt, fetch it again")]
    Truncated {
        /// What was being read.
        what: &'static str,
        /// Where the read began.
        offset: usize,
    },
    /// A count or length above this reader's bound.
    #[error("the GGUF file declares {count} for {what}, the limit is {max}: it is corrupt or hostile")]
    TooMany {
        /// What is counted.
        what: &'static str,
        /// The declared number.
        count: u64,
        /// The bound.
        max: u64,
    },
    /// A string is not UTF-8.
    #[error("{what} at byte {offset} is not UTF-8: the file is corrupt")]
    NotUtf8 {
        /// Which string.
        what: &'static str,
        /// Where it begins.
        offset: usize,
    },
    /// A metadata value's type is unknown, or a bool is neither 0 nor 1.
    #[error("the metadata value {key} has {fault}: the file is corrupt or newer than this reader")]
    BadValue {
        /// The key.
        key: String,
        /// What is wrong.
        fault: String,
    },
    /// A name appears twice.
    #[error("{name} appears twice in the GGUF file: it is corrupt")]
    Duplicate {
        /// The metadata key or tensor name.
        name: String,
    },
    /// A tensor's description is impossible.
    #[error("tensor {name} {fault}: the file is corrupt or not supported")]
    Tensor {
        /// The tensor.
        name: String,
        /// What is wrong.
        fault: String,
    },
    /// A tensor is stored in a type that has no kernel.
    #[error(
        "tensor {name} has type {kind}, supported are F32, F16, BF16, Q8_0, Q4_0 and Q4_1: convert the model to one of them"
    )]
    TensorType {
        /// The tensor.
        name: String,
        /// The type's name in GGUF.
        kind: String,
    },
    /// A needed metadata key is absent.
    #[error("the GGUF file has no {key}: it is not a complete language model")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A metadata value has another type than the format asks for.
    #[error("the metadata value {key} is not {wanted}: the file is corrupt")]
    WrongType {
        /// The key.
        key: String,
        /// The expected type.
        wanted: &'static str,
    },
    /// A needed tensor is absent.
    #[error("the GGUF file has no tensor {name}: it is not a complete llama model")]
    MissingTensor {
        /// The tensor.
        name: String,
    },
    /// The model needs something that is not implemented.
    #[error(
        "{feature} is not supported: use a plain llama model (architecture llama, no experts, no rope scaling, no biases)"
    )]
    Unsupported {
        /// What the file asks for.
        feature: String,
    },
    /// The dimensions do not make a model.
    #[error("the model's geometry is impossible: {0}")]
    Geometry(#[from] GeometryError),
}

/// One entry of the tensor table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, unique in the file.
    pub name: String,
    /// Dimensions, fastest first: a matrix is `[cols, rows]`.
    pub shape: Vec<usize>,
    /// Storage format.
    pub format: MatrixFormat,
    /// Its bytes in the file; lies inside it.
    pub range: Range<usize>,
}

/// A read file: everything but the tensors' bytes.
#[derive(Clone, Debug)]
pub struct Gguf {
    /// 2 or 3.
    pub version: u32,
    /// Metadata in file order.
    pub metadata: Metadata,
    /// Tensors in file order.
    pub tensors: Vec<TensorInfo>,
    index: HashMap<String, usize>,
}

/// Where the bytes of tensors come from.
#[derive(Clone, Copy, Debug)]
pub enum Storage<'a> {
    /// A mapped file: tensors share the map.
    Map(&'a Arc<memmap2::Mmap>),
    /// Memory: tensors are copied out of it.
    Memory(&'a [u8]),
}

impl Storage<'_> {
    /// The bytes of one tensor. `range` comes from a `Gguf` read from the same bytes.
    fn tensor(&self, range: Range<usize>) -> TensorBytes {
        match self {
            Storage::Map(map) => TensorBytes::Mapped(Arc::clone(map), range),
            Storage::Memory(bytes) => TensorBytes::Owned(Arc::new(bytes[range].to_vec())),
        }
    }
}

/// Maps a file for reading. A file that another process cuts short while it is mapped ends this process by a signal; models are
/// replaced by renaming, never rewritten in place.
///
/// # Errors
/// `Open` with the system's reason, `Folder`.
pub fn map(path: &Path) -> Result<Arc<memmap2::Mmap>, GgufError> {
    let open = |source| GgufError::Open { path: path.to_owned(), source };
    let file = File::open(path).map_err(open)?;
    if file.metadata().map_err(open)?.is_dir() {
        return Err(GgufError::Folder { path: path.to_owned() });
    }
    // SAFETY: the map is private to reads; that nobody truncates the file meanwhile cannot be checked and is documented above.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(open)?;
    Ok(Arc::new(map))
}

/// Maps a file and reads its header, metadata and tensor table.
///
/// # Errors
/// As `map`, and `InFile` with the first fault found.
pub fn open(path: &Path) -> Result<(Arc<memmap2::Mmap>, Gguf), GgufError> {
    let map = map(path)?;
    let in_file = |source| GgufError::InFile { path: path.to_owned(), source: Box::new(source) };
    let gguf = Gguf::parse(&map).map_err(in_file)?;
    Ok((map, gguf))
}

impl Gguf {
    /// Reads a whole file's header, metadata and tensor table.
    ///
    /// # Errors
    /// The first fault found, by name and place.
    pub fn parse(bytes: &[u8]) -> Result<Self, GgufError> {
        let mut cursor = Cursor::new(bytes);
        if bytes.get(..4) != Some(&MAGIC) {
            return Err(GgufError::Magic);
        }
        cursor.skip(4, "the magic")?;
        let version = cursor.u32("the version")?;
        if !(2..=3).contains(&version) {
            return Err(GgufError::Version(version));
        }
        let tensor_count = cursor.count("tensors", MAX_ENTRIES, TENSOR_BYTES_MIN)?;
        let entry_count = cursor.count("metadata entries", MAX_ENTRIES, metadata::ENTRY_BYTES_MIN)?;
        let metadata = Metadata::read(&mut cursor, entry_count)?;
        let alignment = alignment(&metadata)?;
        let mut table = Vec::with_capacity(tensor_count);
        for _ in 0..tensor_count {
            table.push(TensorEntry::read(&mut cursor)?);
        }
        let data = (cursor.offset() as u64).next_multiple_of(alignment);
        let mut gguf = Self { version, metadata, tensors: Vec::with_capacity(table.len()), index: HashMap::new() };
        for entry in table {
            let tensor = entry.place(data, alignment, bytes.len())?;
            if gguf.index.insert(tensor.name.clone(), gguf.tensors.len()).is_some() {
                return Err(GgufError::Duplicate { name: tensor.name });
            }
            gguf.tensors.push(tensor);
        }
        apart(&gguf.tensors)?;
        Ok(gguf)
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|&i| &self.tensors[i])
    }
}

/// No byte belongs to two tensors.
fn apart(tensors: &[TensorInfo]) -> Result<(), GgufError> {
    let mut placed: Vec<&TensorInfo> = tensors.iter().collect();
    placed.sort_by_key(|tensor| tensor.range.start);
    match placed.windows(2).find(|pair| pair[0].range.end > pair[1].range.start) {
        Some(pair) => {
            let fault = format!("shares bytes with tensor {}", pair[0].name);
            Err(GgufError::Tensor { name: pair[1].name.clone(), fault })
        }
        None => Ok(()),
    }
}

fn alignment(metadata: &Metadata) -> Result<u64, GgufError> {
    let key = "general.alignment";
    let Some(value) = metadata.get(key) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match value {
        Value::U32(n) if n.is_power_of_two() && *n >= 8 && u64::from(*n) <= MAX_ALIGNMENT => Ok(u64::from(*n)),
        _ => Err(GgufError::BadValue {
            key: key.to_owned(),
            fault: format!("the value {value}, wanted is a power of two from 8 to {MAX_ALIGNMENT} of type u32"),
        }),
    }
}

/// Bytes of the smallest tensor entry: name length, rank, type, offset.
const TENSOR_BYTES_MIN: usize = 8 + 4 + 4 + 8;

/// One entry of the tensor table as it is written.
struct TensorEntry {
    name: String,
    shape: Vec<u64>,
    kind: u32,
    offset: u64,
}

impl TensorEntry {
    fn read(cursor: &mut Cursor) -> Result<Self, GgufError> {
        let name = cursor.string("a tensor name")?;
        let rank = cursor.u32("a tensor's rank")?;
        if !(1..=MAX_RANK).contains(&rank) {
            return Err(GgufError::Tensor {
                name,
                fault: format!("has {rank} dimensions, 1 to {MAX_RANK} are possible"),
            });
        }
        let shape = (0..rank).map(|_| cursor.u64("a tensor's shape")).collect::<Result<_, _>>()?;
        let kind = cursor.u32("a tensor's type")?;
        let offset = cursor.u64("a tensor's offset")?;
        Ok(Self { name, shape, kind, offset })
    }

    /// Checks type, size and place; `data` is where the tensors' bytes begin in a file of `file_bytes`.
    fn place(self, data: u64, alignment: u64, file_bytes: usize) -> Result<TensorInfo, GgufError> {
        let Some(format) = format_of(self.kind) else {
            return Err(GgufError::TensorType { name: self.name, kind: kind_name(self.kind) });
        };
        let bytes = match byte_size(&self.shape, format) {
            Ok(bytes) => bytes,
            Err(fault) => return Err(GgufError::Tensor { name: self.name, fault }),
        };
        if !self.offset.is_multiple_of(alignment) {
            let fault = format!("lies at offset {}, not a multiple of the alignment {alignment}", self.offset);
            return Err(GgufError::Tensor { name: self.name, fault });
        }
        let start = data.checked_add(self.offset);
        let end = start.and_then(|start| start.checked_add(bytes));
        let (Some(start), Some(end)) = (start, end.filter(|&end| end <= file_bytes as u64)) else {
            let fault = format!("needs {bytes} bytes at offset {}, past the end of the file", self.offset);
            return Err(GgufError::Tensor { name: self.name, fault });
        };
        // Both fit: they are at most `file_bytes`, a usize, and so is every dimension of a tensor that is not empty.
        let shape = self.shape.iter().map(|&n| n as usize).collect();
        Ok(TensorInfo { name: self.name, shape, format, range: start as usize..end as usize })
    }
}

/// Bytes of a tensor, or what is wrong with its shape.
fn byte_size(shape: &[u64], format: MatrixFormat) -> Result<u64, String> {
    let (weights, bytes) = format.block();
    if shape.contains(&0) {
        return Err(format!("has an empty dimension: {shape:?}"));
    }
    if !shape[0].is_multiple_of(weights as u64) {
        return Err(format!("has rows of {} weights, not a multiple of {format:?}'s block of {weights}", shape[0]));
    }
    let elements = shape.iter().try_fold(1u64, |product, &n| product.checked_mul(n));
    let size = elements.and_then(|n| (n / weights as u64).checked_mul(bytes as u64));
    size.ok_or_else(|| format!("has an impossible shape: {shape:?}"))
}

fn format_of(kind: u32) -> Option<MatrixFormat> {
    Some(match kind {
        0 => MatrixFormat::F32,
        1 => MatrixFormat::F16,
        2 => MatrixFormat::Q4_0,
        3 => MatrixFormat::Q4_1,
        8 => MatrixFormat::Q8_0,
        30 => MatrixFormat::Bf16,
        _ => return None,
    })
}

/// The name of a tensor type that has no `MatrixFormat`, for the error that refuses it.
fn kind_name(kind: u32) -> String {
    const NAMES: [(u32, &str); 27] = [
        (6, "Q5_0"),
        (7, "Q5_1"),
        (9, "Q8_1"),
        (10, "Q2_K"),
        (11, "Q3_K"),
        (12, "Q4_K"),
        (13, "Q5_K"),
        (14, "Q6_K"),
        (15, "Q8_K"),
        (16, "IQ2_XXS"),
        (17, "IQ2_XS"),
        (18, "IQ3_XXS"),
        (19, "IQ1_S"),
        (20, "IQ4_NL"),
        (21, "IQ3_S"),
        (22, "IQ2_S"),
        (23, "IQ4_XS"),
        (24, "I8"),
        (25, "I16"),
        (26, "I32"),
        (27, "I64"),
        (28, "F64"),
        (29, "IQ1_M"),
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (39, "MXFP4"),
        (40, "NVFP4"),
    ];
    NAMES.iter().find(|(id, _)| *id == kind).map_or_else(|| format!("number {kind}"), |(_, name)| (*name).to_owned())
}

#[cfg(test)]
mod tests;
