//! Writes small GGUF version 3 files in memory: for tests, fuzzing and broken files on purpose. It checks nothing.

use super::{Array, Value};
use crate::model::weights::MatrixFormat;

/// A file under construction.
#[derive(Clone, Debug, Default)]
pub struct GgufFile {
    /// Keys and values in order; a key may be there twice.
    pub metadata: Vec<(String, Value)>,
    /// Tensors in order.
    pub tensors: Vec<Tensor>,
}

/// A tensor to write.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name.
    pub name: String,
    /// Dimensions, fastest first.
    pub shape: Vec<u64>,
    /// Type number in GGUF; `kind_of` gives it for a format.
    pub kind: u32,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// Alignment of the tensors' bytes.
const ALIGNMENT: usize = 32;

impl GgufFile {
    /// Adds a metadata entry.
    pub fn set(&mut self, key: &str, value: Value) -> &mut Self {
        self.metadata.push((key.to_owned(), value));
        self
    }

    /// Adds a tensor.
    pub fn tensor(&mut self, name: &str, shape: &[u64], format: MatrixFormat, bytes: Vec<u8>) -> &mut Self {
        self.tensors.push(Tensor { name: name.to_owned(), shape: shape.to_vec(), kind: kind_of(format), bytes });
        self
    }

    /// The file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut out, key);
            out.extend(value.kind().to_le_bytes());
            write_value(&mut out, value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            string(&mut out, &tensor.name);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + tensor.bytes.len()).next_multiple_of(ALIGNMENT);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
            out.extend(&tensor.bytes);
        }
        out
    }
}

/// The type number of a format.
pub const fn kind_of(format: MatrixFormat) -> u32 {
    match format {
        MatrixFormat::F32 => 0,
        MatrixFormat::F16 => 1,
        MatrixFormat::Q4_0 => 2,
        MatrixFormat::Q4_1 => 3,
        MatrixFormat::Q8_0 => 8,
        MatrixFormat::Bf16 => 30,
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(v) => string(out, v),
        Value::Array(v) => write_array(out, v),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
    }
}

fn write_array(out: &mut Vec<u8>, array: &Array) {
    out.extend(array.kind().to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    match array {
        Array::U8(v) | Array::Bool(v) => out.extend(v),
        Array::I8(v) => out.extend(v.iter().flat_map(|n| n.to_le_bytes())),
        Array::U16(v) => out.extend(v.iter().flat_map(|n| n.to_le_bytes())),
        Array::I16(v) => out.extend(v.iter().flat_map(|n| n.to_le_bytes())),
        Array::U32(v) => out.extend(v.iter().flat_map(|n| n.to_le_bytes())),
        Array::I32(v) => out.extend(v.iter().flat_map(|n| n.to_le_bytes())),
        Array::F32(v) => out.extend(v.iter().flat_map(|n| n.to_le_bytes())),
        Array::String(v) => v.iter().for_each(|text| string(out, text)),
        Array::Array(v) => v.iter().for_each(|inner| write_array(out, inner)),
        Array::U64(v) => out.extend(v.iter().flat_map(|n| n.to_le_bytes())),
        Array::I64(v) => out.extend(v.iter().flat_map(|n| n.to_le_bytes())),
        Array::F64(v) => out.extend(v.iter().flat_map(|n| n.to_le_bytes())),
    }
}
