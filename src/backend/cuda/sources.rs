//! The texts of the kernels: embedded, or overlaid by a folder so that a kernel can be tried (or broken on purpose) without a new build.
//!
//! The folder is a tool of `crucible check` and `crucible bench`; a server always runs the embedded texts.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Every kernel file by the name that programs and sources include.
const EMBEDDED: [(&str, &str); 11] = [
    ("common.cuh", include_str!("../../../kernels/common.cuh")),
    ("linear.cuh", include_str!("../../../kernels/linear.cuh")),
    ("attention.cuh", include_str!("../../../kernels/attention.cuh")),
    ("rows.cu", include_str!("../../../kernels/rows.cu")),
    ("select.cu", include_str!("../../../kernels/select.cu")),
    ("linear_rows_f32.cu", include_str!("../../../kernels/linear_rows_f32.cu")),
    ("linear_rows_q8.cu", include_str!("../../../kernels/linear_rows_q8.cu")),
    ("linear_tile_f32.cu", include_str!("../../../kernels/linear_tile_f32.cu")),
    ("linear_tile_q8.cu", include_str!("../../../kernels/linear_tile_q8.cu")),
    ("attention_decode.cu", include_str!("../../../kernels/attention_decode.cu")),
    ("attention_prefill.cu", include_str!("../../../kernels/attention_prefill.cu")),
];

/// A folder that cannot replace kernels.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// It or a file in it cannot be read.
    #[error("kernel sources cannot be read from {path}: {reason}")]
    Unreadable {
        /// Which path.
        path: PathBuf,
        /// The system's words.
        reason: std::io::Error,
    },
    /// A kernel file that no program uses: most likely a wrong name.
    #[error("{path} is no kernel of this build, name it as one in kernels/")]
    Unknown {
        /// Which file.
        path: PathBuf,
    },
    /// Nothing to replace.
    #[error("{path} holds no .cu and no .cuh file")]
    Empty {
        /// Which folder.
        path: PathBuf,
    },
}

/// The texts that programs are compiled from.
#[derive(Clone, Debug)]
pub struct Sources {
    texts: BTreeMap<&'static str, Cow<'static, str>>,
    /// Files that the folder replaced.
    pub replaced: Vec<&'static str>,
}

impl Sources {
    /// The embedded texts.
    pub fn embedded() -> Self {
        Self { texts: EMBEDDED.iter().map(|&(n, t)| (n, Cow::Borrowed(t))).collect(), replaced: Vec::new() }
    }

    /// The embedded texts, except the files that `folder` holds; `None` replaces nothing.
    ///
    /// # Errors
    /// A folder or file that cannot be read, a kernel file that this build does not know, or none at all.
    pub fn overlaid(folder: Option<&Path>) -> Result<Self, SourceError> {
        let mut sources = Self::embedded();
        let Some(folder) = folder else { return Ok(sources) };
        let unreadable = |path: &Path| {
            let path = path.to_path_buf();
            move |reason| SourceError::Unreadable { path, reason }
        };
        for entry in std::fs::read_dir(folder).map_err(unreadable(folder))? {
            let path = entry.map_err(unreadable(folder))?.path();
            if !path.extension().is_some_and(|e| e == "cu" || e == "cuh") {
                continue;
            }
            let Some(&(name, _)) = EMBEDDED.iter().find(|(n, _)| path.file_name().is_some_and(|f| f == *n)) else {
                return Err(SourceError::Unknown { path });
            };
            let text = std::fs::read_to_string(&path).map_err(unreadable(&path))?;
            sources.texts.insert(name, Cow::Owned(text));
            sources.replaced.push(name);
        }
        if sources.replaced.is_empty() {
            return Err(SourceError::Empty { path: folder.to_path_buf() });
        }
        sources.replaced.sort_unstable();
        Ok(sources)
    }

    /// The text of a file; empty for a name that is none.
    pub fn text(&self, file: &str) -> &str {
        self.texts.get(file).map_or("", |t| t.as_ref())
    }

    /// Headers by the name that sources include.
    pub fn headers(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.texts.iter().filter(|(n, _)| n.ends_with(".cuh")).map(|(n, t)| (*n, t.as_ref()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::program::{Kind, Program};

    fn folder(name: &str, files: &[&str]) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("crucible-sources-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        files.iter().for_each(|f| std::fs::write(dir.join(f), "// another text\n").unwrap());
        dir
    }

    #[test]
    fn every_program_has_a_text() {
        let sources = Sources::embedded();
        assert!(Program::all().iter().all(|p| sources.text(p.file()).contains("__global__")));
    }

    /// A constant restricted pointer is read through the read-only path, which the compiler moves ahead of the wait for the predecessor
    /// that writes what it points to: whole models came out wrong while every kernel alone was right.
    #[test]
    fn no_kernel_parameter_is_restricted() {
        let sources = Sources::embedded();
        for (file, text) in &sources.texts {
            for kernel in text.split("__global__").skip(1) {
                let signature = kernel.split('{').next().unwrap_or_default();
                assert!(!signature.contains("__restrict__"), "{file}: {}", signature.trim());
            }
        }
    }

    #[test]
    fn a_folder_replaces_the_files_that_it_holds_and_renames_the_programs_that_use_them() {
        let dir = folder("one", &["select.cu", "notes.txt"]);
        let (plain, overlaid) = (Sources::embedded(), Sources::overlaid(Some(&dir)).unwrap());
        assert_eq!(overlaid.replaced, ["select.cu"]);
        let key = |p: Program, s: &Sources| p.key(s, "sm_90a", (13, 0));
        assert_ne!(key(Program::Select, &plain), key(Program::Select, &overlaid));
        assert_eq!(key(Program::Rows, &plain), key(Program::Rows, &overlaid));
        let header = folder("header", &["common.cuh"]);
        let overlaid = Sources::overlaid(Some(&header)).unwrap();
        let rows = Program::LinearRows(Kind::Block);
        assert_ne!(key(rows, &plain), key(rows, &overlaid));
        [dir, header].iter().for_each(|d| std::fs::remove_dir_all(d).unwrap());
    }

    #[test]
    fn a_misnamed_kernel_or_an_empty_folder_is_refused() {
        let (odd, empty) = (folder("odd", &["selekt.cu"]), folder("empty", &[]));
        assert!(matches!(Sources::overlaid(Some(&odd)), Err(SourceError::Unknown { .. })));
        assert!(matches!(Sources::overlaid(Some(&empty)), Err(SourceError::Empty { .. })));
        [odd, empty].iter().for_each(|d| std::fs::remove_dir_all(d).unwrap());
        assert!(matches!(Sources::overlaid(Some(Path::new("/nowhere/at/all"))), Err(SourceError::Unreadable { .. })));
    }
}
