//! Bounds-checked little-endian reads over the bytes of a GGUF file. Every read either yields a value or says where the file ends.

use super::{GgufError, MAX_STRING_BYTES};

/// A position in a file.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, offset: 0 }
    }

    /// Bytes read so far; at most the file's length.
    pub(super) fn offset(&self) -> usize {
        self.offset
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.offset
    }

    fn take(&mut self, n: usize, what: &'static str) -> Result<&'a [u8], GgufError> {
        if n > self.left() {
            return Err(GgufError::Truncated { what, offset: self.offset });
        }
        let taken = &self.bytes[self.offset..self.offset + n];
        self.offset += n;
        Ok(taken)
    }

    pub(super) fn skip(&mut self, n: usize, what: &'static str) -> Result<(), GgufError> {
        self.take(n, what).map(|_| ())
    }

    /// The next `N` bytes.
    pub(super) fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, what)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of things that take at least `bytes_each` bytes each: at most `max`, and no more than the file can hold.
    pub(super) fn count(&mut self, what: &'static str, max: u64, bytes_each: usize) -> Result<usize, GgufError> {
        let offset = self.offset;
        let count = self.u64(what)?;
        if count > max {
            return Err(GgufError::TooMany { what, count, max });
        }
        if count > (self.left() / bytes_each) as u64 {
            return Err(GgufError::Truncated { what, offset });
        }
        Ok(count as usize)
    }

    /// A string: its length in 8 bytes, then UTF-8.
    pub(super) fn string(&mut self, what: &'static str) -> Result<String, GgufError> {
        let offset = self.offset;
        let length = self.count(what, MAX_STRING_BYTES, 1)?;
        let text = std::str::from_utf8(self.take(length, what)?);
        text.map(str::to_owned).map_err(|_| GgufError::NotUtf8 { what, offset })
    }

    /// `count` values of `N` bytes each; the caller has compared `count` with the bytes left.
    pub(super) fn values<const N: usize, T>(
        &mut self,
        count: usize,
        value: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, GgufError> {
        let what = "an array";
        let bytes = count.checked_mul(N).ok_or(GgufError::Truncated { what, offset: self.offset })?;
        Ok(self.take(bytes, what)?.as_chunks::<N>().0.iter().map(|&chunk| value(chunk)).collect())
    }
}
