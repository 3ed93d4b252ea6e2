//! Finds and opens the CUDA libraries before the bindings look for them by name, and says where each was found.
//!
//! The bindings panic when a library is absent, so nothing of theirs is called before `driver` or `nvrtc` here has succeeded. A
//! library once opened stays open for the life of the process; the bindings' later look-up by name finds the loaded one.

use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Where an opened library came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// "libcuda", "libnvrtc".
    pub name: &'static str,
    /// Its path, or the bare name when the system's loader resolved it.
    pub path: PathBuf,
}

/// Why a library cannot be used.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum LibraryError {
    /// Not found anywhere.
    #[error(
        "{name} was not found in {searched}; install the NVIDIA driver and CUDA 13 libraries, or name their folder"
    )]
    Absent {
        /// The library.
        name: &'static str,
        /// Folders and names tried.
        searched: String,
    },
    /// Found, but the bindings cannot use it.
    #[error(
        "{name} at {path} cannot be used, it lacks {symbol}: install an NVIDIA driver and CUDA libraries of version 13"
    )]
    Unusable {
        /// The library.
        name: &'static str,
        /// Where it lies.
        path: String,
        /// A function that it should have.
        symbol: &'static str,
    },
}

/// Functions of the driver that are called; the bindings panic at the first call of one that is not there.
const DRIVER_SYMBOLS: [&CStr; 15] = [
    c"cuInit",
    c"cuGetErrorString",
    c"cuDeviceGet",
    c"cuDeviceGetName",
    c"cuDriverGetVersion",
    c"cuDeviceGetAttribute",
    c"cuDevicePrimaryCtxRetain",
    c"cuMemGetInfo_v2",
    c"cuMemAlloc_v2",
    c"cuMemHostAlloc",
    c"cuModuleLoadData",
    c"cuLaunchKernelEx",
    c"cuStreamBeginCapture_v2",
    c"cuGraphInstantiateWithFlags",
    c"cuGraphUpload",
];

/// Functions of the compiler that are called.
const COMPILER_SYMBOLS: [&CStr; 5] =
    [c"nvrtcVersion", c"nvrtcCreateProgram", c"nvrtcCompileProgram", c"nvrtcGetCUBIN", c"nvrtcGetPTX"];

/// Opens a library for the life of the process.
fn open(path: &Path) -> bool {
    let Some(text) = path.to_str().and_then(|p| CString::new(p).ok()) else { return false };
    // SAFETY: a NUL-terminated path; the initialisers of the CUDA libraries have no preconditions, and the handle is never closed.
    !unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) }.is_null()
}

/// Path of the loaded object that holds `symbol` of `library`.
fn origin(library: &CStr, symbol: &CStr) -> Option<PathBuf> {
    // SAFETY: NUL-terminated names; RTLD_NOLOAD only asks; `info` is written before it is read.
    unsafe {
        let handle = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if handle.is_null() {
            return None;
        }
        let address = libc::dlsym(handle, symbol.as_ptr());
        let mut info = std::mem::zeroed::<libc::Dl_info>();
        if address.is_null() || libc::dladdr(address, &mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        Some(PathBuf::from(CStr::from_ptr(info.dli_fname).to_string_lossy().into_owned()))
    }
}

/// Path of the loaded library that was opened as `name` and has `symbol`.
pub(super) fn origin_of(name: &str, symbol: &CStr) -> Option<String> {
    origin(&CString::new(name).ok()?, symbol).map(|path| path.display().to_string())
}

/// The first of `symbols` that the loaded `library` does not have.
fn lacking(library: &CStr, symbols: &[&'static CStr]) -> Option<&'static str> {
    // SAFETY: NUL-terminated names; RTLD_NOLOAD only asks, and the library stays open.
    let absent = |symbol: &&&CStr| unsafe {
        let handle = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        handle.is_null() || libc::dlsym(handle, symbol.as_ptr()).is_null()
    };
    symbols.iter().find(absent).and_then(|symbol| symbol.to_str().ok())
}

/// Folders that usually hold CUDA libraries, the given one first.
fn folders(given: Option<&Path>) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    if let Some(folder) = given {
        for below in ["", "lib", "lib64", "nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"] {
            folders.push(folder.join(below));
        }
    }
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(home) = std::env::var_os(variable) {
            folders.push(PathBuf::from(&home).join("lib64"));
            folders.push(PathBuf::from(home).join("lib"));
        }
    }
    let mut local: Vec<PathBuf> = std::fs::read_dir("/usr/local")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("cuda")))
        .collect();
    local.sort();
    folders.extend(local.into_iter().rev().map(|path| path.join("lib64")));
    folders
}

/// Opens `libcuda` once.
///
/// # Errors
/// `Absent` on a machine without the driver.
pub fn driver() -> Result<Found, LibraryError> {
    static DRIVER: OnceLock<Result<Found, LibraryError>> = OnceLock::new();
    DRIVER
        .get_or_init(|| {
            let name = "libcuda";
            let candidates =
                ["libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"];
            if !candidates.iter().any(|c| open(Path::new(c))) {
                return Err(LibraryError::Absent { name, searched: candidates.join(", ") });
            }
            let path = origin(c"libcuda.so.1", c"cuInit").unwrap_or_else(|| PathBuf::from("libcuda.so.1"));
            let unusable = |symbol| LibraryError::Unusable { name, path: path.display().to_string(), symbol };
            if let Some(symbol) = lacking(c"libcuda.so.1", &DRIVER_SYMBOLS) {
                return Err(unusable(symbol));
            }
            // SAFETY: asks whether the bindings can open the library that is already loaded.
            if !unsafe { cudarc::driver::sys::is_culib_present() } {
                return Err(unusable("a name that the loader knows"));
            }
            Ok(Found { name, path })
        })
        .clone()
}

/// Opens `libnvrtc` (its builtins first) once; `given` is searched before the usual folders.
///
/// # Errors
/// `Absent` when no folder holds it.
pub fn nvrtc(given: Option<&Path>) -> Result<Found, LibraryError> {
    static NVRTC: OnceLock<Found> = OnceLock::new();
    if let Some(found) = NVRTC.get() {
        return Ok(found.clone());
    }
    let name = "libnvrtc";
    let folders = folders(given);
    let opened = folders.iter().any(|folder| {
        let library = folder.join("libnvrtc.so.13");
        if !library.exists() {
            return false;
        }
        for minor in (0..=4).rev() {
            let builtins = folder.join(format!("libnvrtc-builtins.so.13.{minor}"));
            if builtins.exists() {
                open(&builtins);
            }
        }
        open(&library)
    });
    if !opened && !open(Path::new("libnvrtc.so.13")) {
        let searched: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
        return Err(LibraryError::Absent { name, searched: searched.join(", ") });
    }
    let path = origin(c"libnvrtc.so.13", c"nvrtcVersion").unwrap_or_else(|| PathBuf::from("libnvrtc.so.13"));
    let unusable = |symbol| LibraryError::Unusable { name, path: path.display().to_string(), symbol };
    if let Some(symbol) = lacking(c"libnvrtc.so.13", &COMPILER_SYMBOLS) {
        return Err(unusable(symbol));
    }
    // SAFETY: asks whether the bindings can open the library that is already loaded.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Err(unusable("a name that the loader knows"));
    }
    Ok(NVRTC.get_or_init(|| Found { name, path }).clone())
}
