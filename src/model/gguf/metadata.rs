//! The metadata of a GGUF file: keys with typed values, read within bounds and asked for by type.

use std::collections::HashMap;
use std::fmt;

use super::cursor::Cursor;
use super::{GgufError, MAX_ELEMENTS, MAX_NESTING};

/// Bytes of the smallest entry: key length, value type, one byte of value.
pub(super) const ENTRY_BYTES_MIN: usize = 8 + 4 + 1;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Unsigned, 8 bits.
    U8(u8),
    /// Signed, 8 bits.
    I8(i8),
    /// Unsigned, 16 bits.
    U16(u16),
    /// Signed, 16 bits.
    I16(i16),
    /// Unsigned, 32 bits.
    U32(u32),
    /// Signed, 32 bits.
    I32(i32),
    /// Single precision.
    F32(f32),
    /// One byte, 0 or 1.
    Bool(bool),
    /// UTF-8.
    String(String),
    /// Many values of one type.
    Array(Array),
    /// Unsigned, 64 bits.
    U64(u64),
    /// Signed, 64 bits.
    I64(i64),
    /// Double precision.
    F64(f64),
}

/// An array, stored at the width of its elements.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    /// Of u8.
    U8(Vec<u8>),
    /// Of i8.
    I8(Vec<i8>),
    /// Of u16.
    U16(Vec<u16>),
    /// Of i16.
    I16(Vec<i16>),
    /// Of u32.
    U32(Vec<u32>),
    /// Of i32.
    I32(Vec<i32>),
    /// Of f32.
    F32(Vec<f32>),
    /// Of bytes that should be 0 or 1.
    Bool(Vec<u8>),
    /// Of strings.
    String(Vec<String>),
    /// Of arrays.
    Array(Vec<Array>),
    /// Of u64.
    U64(Vec<u64>),
    /// Of i64.
    I64(Vec<i64>),
    /// Of f64.
    F64(Vec<f64>),
}

impl Value {
    /// The type's number in the format.
    pub(super) const fn kind(&self) -> u32 {
        match self {
            Value::U8(_) => 0,
            Value::I8(_) => 1,
            Value::U16(_) => 2,
            Value::I16(_) => 3,
            Value::U32(_) => 4,
            Value::I32(_) => 5,
            Value::F32(_) => 6,
            Value::Bool(_) => 7,
            Value::String(_) => 8,
            Value::Array(_) => 9,
            Value::U64(_) => 10,
            Value::I64(_) => 11,
            Value::F64(_) => 12,
        }
    }
}

impl Array {
    /// The element type's number in the format.
    pub(super) const fn kind(&self) -> u32 {
        match self {
            Array::U8(_) => 0,
            Array::I8(_) => 1,
            Array::U16(_) => 2,
            Array::I16(_) => 3,
            Array::U32(_) => 4,
            Array::I32(_) => 5,
            Array::F32(_) => 6,
            Array::Bool(_) => 7,
            Array::String(_) => 8,
            Array::Array(_) => 9,
            Array::U64(_) => 10,
            Array::I64(_) => 11,
            Array::F64(_) => 12,
        }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) | Array::Bool(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::String(v) => v.len(),
            Array::Array(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
        }
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl fmt::Display for Value {
    /// As a person reads it; an array as its length, with its strings' beginning.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(v) => write!(f, "{v}"),
            Value::I8(v) => write!(f, "{v}"),
            Value::U16(v) => write!(f, "{v}"),
            Value::I16(v) => write!(f, "{v}"),
            Value::U32(v) => write!(f, "{v}"),
            Value::I32(v) => write!(f, "{v}"),
            Value::F32(v) => write!(f, "{v}"),
            Value::Bool(v) => write!(f, "{v}"),
            Value::String(v) => write!(f, "{v:?}"),
            Value::Array(Array::String(v)) if v.len() > 4 => write!(f, "[{} strings: {:?} …]", v.len(), &v[..4]),
            Value::Array(Array::String(v)) => write!(f, "{v:?}"),
            Value::Array(v) => write!(f, "[{} values]", v.len()),
            Value::U64(v) => write!(f, "{v}"),
            Value::I64(v) => write!(f, "{v}"),
            Value::F64(v) => write!(f, "{v}"),
        }
    }
}

/// Keys and values in file order, unique by key.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

impl Metadata {
    pub(super) fn read(cursor: &mut Cursor, count: usize) -> Result<Self, GgufError> {
        let mut metadata = Self::default();
        let mut elements_left = MAX_ELEMENTS;
        for _ in 0..count {
            let key = cursor.string("a metadata key")?;
            let kind = cursor.u32("a metadata type")?;
            let value = ValueReader { cursor, key: &key, elements_left: &mut elements_left }.value(kind)?;
            if metadata.index.insert(key.clone(), metadata.entries.len()).is_some() {
                return Err(GgufError::Duplicate { name: key });
            }
            metadata.entries.push((key, value));
        }
        Ok(metadata)
    }

    /// Entries in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&i| &self.entries[i].1)
    }

    /// A string, if the key is there.
    ///
    /// # Errors
    /// `WrongType`.
    pub fn string(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.typed(key, "a string", |value| match value {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// An integer of any width that is not negative, if the key is there.
    ///
    /// # Errors
    /// `WrongType`, also for a negative integer.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.typed(key, "an integer of at least 0", |value| match *value {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            Value::I8(v) => v.try_into().ok(),
            Value::I16(v) => v.try_into().ok(),
            Value::I32(v) => v.try_into().ok(),
            Value::I64(v) => v.try_into().ok(),
            _ => None,
        })
    }

    /// A float of either width, if the key is there.
    ///
    /// # Errors
    /// `WrongType`.
    pub fn float(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.typed(key, "a float", |value| match *value {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        })
    }

    /// A bool, if the key is there.
    ///
    /// # Errors
    /// `WrongType`.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.typed(key, "a bool", |value| match *value {
            Value::Bool(v) => Some(v),
            _ => None,
        })
    }

    /// An array of strings, if the key is there.
    ///
    /// # Errors
    /// `WrongType`.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>, GgufError> {
        self.typed(key, "an array of strings", |value| match value {
            Value::Array(Array::String(v)) => Some(v.as_slice()),
            _ => None,
        })
    }

    /// An array of i32, if the key is there.
    ///
    /// # Errors
    /// `WrongType`.
    pub fn i32s(&self, key: &str) -> Result<Option<&[i32]>, GgufError> {
        self.typed(key, "an array of i32", |value| match value {
            Value::Array(Array::I32(v)) => Some(v.as_slice()),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &'static str,
        as_type: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        as_type(value).map(Some).ok_or_else(|| GgufError::WrongType { key: key.to_owned(), wanted })
    }
}

/// Reads one value; `elements_left` is what arrays of the file may still hold together.
struct ValueReader<'a, 'b> {
    cursor: &'a mut Cursor<'b>,
    key: &'a str,
    elements_left: &'a mut u64,
}

impl ValueReader<'_, '_> {
    fn bad(&self, fault: String) -> GgufError {
        GgufError::BadValue { key: self.key.to_owned(), fault }
    }

    fn value(&mut self, kind: u32) -> Result<Value, GgufError> {
        let what = "a metadata value";
        let c = &mut *self.cursor;
        Ok(match kind {
            0 => Value::U8(c.array(what).map(u8::from_le_bytes)?),
            1 => Value::I8(c.array(what).map(i8::from_le_bytes)?),
            2 => Value::U16(c.array(what).map(u16::from_le_bytes)?),
            3 => Value::I16(c.array(what).map(i16::from_le_bytes)?),
            4 => Value::U32(c.u32(what)?),
            5 => Value::I32(c.array(what).map(i32::from_le_bytes)?),
            6 => Value::F32(c.array(what).map(f32::from_le_bytes)?),
            7 => match c.array(what)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(self.bad(format!("the byte {other} for a bool"))),
            },
            8 => Value::String(c.string("a metadata string")?),
            9 => Value::Array(self.array(1)?),
            10 => Value::U64(c.u64(what)?),
            11 => Value::I64(c.array(what).map(i64::from_le_bytes)?),
            12 => Value::F64(c.array(what).map(f64::from_le_bytes)?),
            _ => return Err(self.bad(format!("the unknown type {kind}"))),
        })
    }

    fn array(&mut self, depth: usize) -> Result<Array, GgufError> {
        if depth > MAX_NESTING {
            return Err(self.bad(format!("arrays nested deeper than {MAX_NESTING}")));
        }
        let kind = self.cursor.u32("an array's type")?;
        let bytes_each = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => 12,
            _ => return Err(self.bad(format!("the unknown element type {kind}"))),
        };
        let n = self.cursor.count("array elements", *self.elements_left, bytes_each)?;
        *self.elements_left -= n as u64;
        let c = &mut *self.cursor;
        Ok(match kind {
            0 => Array::U8(c.values(n, u8::from_le_bytes)?),
            1 => Array::I8(c.values(n, i8::from_le_bytes)?),
            2 => Array::U16(c.values(n, u16::from_le_bytes)?),
            3 => Array::I16(c.values(n, i16::from_le_bytes)?),
            4 => Array::U32(c.values(n, u32::from_le_bytes)?),
            5 => Array::I32(c.values(n, i32::from_le_bytes)?),
            6 => Array::F32(c.values(n, f32::from_le_bytes)?),
            7 => Array::Bool(c.values(n, u8::from_le_bytes)?),
            8 => Array::String((0..n).map(|_| c.string("a string of an array")).collect::<Result<_, _>>()?),
            9 => Array::Array((0..n).map(|_| self.array(depth + 1)).collect::<Result<_, _>>()?),
            10 => Array::U64(c.values(n, u64::from_le_bytes)?),
            11 => Array::I64(c.values(n, i64::from_le_bytes)?),
            _ => Array::F64(c.values(n, f64::from_le_bytes)?),
        })
    }
}
