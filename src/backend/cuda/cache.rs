//! Compiled programs on disk. An entry is trusted only when its header names its own key and the hash of its content.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::nvrtc::{CompileError, Compiler};
use super::program::Program;

const MAGIC: &str = "crucible cubin 1";

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// The content of an entry, when it is whole and belongs to `key`.
fn open_entry<'a>(key: &str, bytes: &'a [u8]) -> Option<&'a [u8]> {
    let end = bytes.iter().position(|&b| b == b'\n')?;
    let (header, content) = (std::str::from_utf8(&bytes[..end]).ok()?, &bytes[end + 1..]);
    (header == format!("{MAGIC} {key} {}", digest(content))).then_some(content)
}

fn seal_entry(key: &str, content: &[u8]) -> Vec<u8> {
    let mut bytes = format!("{MAGIC} {key} {}\n", digest(content)).into_bytes();
    bytes.extend_from_slice(content);
    bytes
}

/// A folder of cubins, or none.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    folder: Option<PathBuf>,
}

/// Where a cubin came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Compiled now.
    Compiled,
    /// Read from the folder.
    Cached,
}

impl Cache {
    /// A cache in `folder`; without one every program is compiled.
    pub fn new(folder: Option<PathBuf>) -> Self {
        Self { folder }
    }

    fn path(&self, key: &str) -> Option<PathBuf> {
        self.folder.as_ref().map(|f| f.join(format!("{key}.cubin")))
    }

    /// The cubin of a program, compiled when the folder has no valid entry. A folder that cannot be written is no error.
    ///
    /// # Errors
    /// The compiler's.
    pub fn cubin(
        &self,
        compiler: &Compiler,
        program: Program,
        architecture: &str,
    ) -> Result<(Vec<u8>, Source), CompileError> {
        let key = program.key(&compiler.sources, architecture, compiler.version);
        let path = self.path(&key);
        if let Some(bytes) = path.as_deref().and_then(|p| std::fs::read(p).ok()) {
            if let Some(content) = open_entry(&key, &bytes) {
                return Ok((content.to_vec(), Source::Cached));
            }
            tracing::warn!(program = %program, "the cached kernel is damaged or foreign, compiling it again");
        }
        let cubin = compiler.compile(program, architecture)?.cubin;
        if let Some(path) = path {
            store(&path, &key, &cubin);
        }
        Ok((cubin, Source::Compiled))
    }
}

/// Keeps a cubin for the next start. A full disk costs that start a compilation and nothing else.
fn store(path: &Path, key: &str, cubin: &[u8]) {
    if let Err(error) = write_whole(path, &seal_entry(key, cubin)) {
        tracing::warn!(%error, path = %path.display(), "the compiled kernel was not cached");
    }
}

/// Writes beside the target, then renames: a reader sees the whole entry or none. What a failed write left is removed.
fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let part = path.with_extension(format!("part{}", std::process::id()));
    let written = std::fs::write(&part, bytes).and_then(|()| std::fs::rename(&part, path));
    if written.is_err() {
        // Half an entry would take room on a disk that has none.
        let _ = std::fs::remove_file(&part);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_opens_only_under_its_own_key_and_whole() {
        let sealed = seal_entry("k1", b"machine code");
        assert_eq!(open_entry("k1", &sealed), Some(b"machine code".as_slice()));
        assert_eq!(open_entry("k2", &sealed), None);
        assert_eq!(open_entry("k1", &sealed[..sealed.len() - 1]), None);
        let mut damaged = sealed.clone();
        *damaged.last_mut().unwrap() ^= 1;
        assert_eq!(open_entry("k1", &damaged), None);
        assert_eq!(open_entry("k1", b""), None);
        assert_eq!(open_entry("k1", b"crucible cubin 1 k1"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_loses_the_entry_and_leaves_no_rest_of_it() {
        let folder = std::env::temp_dir().join(format!("crucible-full-cache-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("k1.cubin");
        let part = path.with_extension(format!("part{}", std::process::id()));
        std::os::unix::fs::symlink("/dev/full", part).unwrap();
        let error = write_whole(&path, &seal_entry("k1", b"machine code")).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "nothing is left of the entry");
        store(&path, "k1", b"machine code");
        assert_eq!(open_entry("k1", &std::fs::read(&path).unwrap()), Some(b"machine code".as_slice()));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn source_macros_architecture_and_compiler_all_name_the_entry() {
        use super::super::program::Kind;
        let sources = super::super::sources::Sources::embedded();
        let base = Program::LinearRows(Kind::Int8).key(&sources, "sm_90a", (13, 0));
        assert_ne!(base, Program::LinearRows(Kind::F32).key(&sources, "sm_90a", (13, 0)));
        assert_ne!(base, Program::LinearRows(Kind::Int8).key(&sources, "sm_80", (13, 0)));
        assert_ne!(base, Program::LinearRows(Kind::Int8).key(&sources, "sm_90a", (13, 1)));
        assert_eq!(base, Program::LinearRows(Kind::Int8).key(&sources, "sm_90a", (13, 0)));
    }
}
