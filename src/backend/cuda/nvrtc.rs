//! Compiles a program to a cubin, with the PTX it came from and the assembler's resource report. Needs no GPU and no driver.

use std::ffi::{CStr, CString, c_char};
use std::path::Path;

use cudarc::nvrtc::sys;

use super::library::{self, LibraryError};
use super::program::Program;
use super::sources::{SourceError, Sources};

/// What the compiler gives.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Machine code for one architecture.
    pub cubin: Vec<u8>,
    /// The intermediate text that the gate reads.
    pub ptx: String,
    /// Warnings, and the assembler's report of registers and spills.
    pub log: String,
}

/// Why a program could not be compiled.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// No compiler.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// No sources.
    #[error(transparent)]
    Sources(#[from] SourceError),
    /// The compiler refused.
    #[error("{program} for {architecture} does not compile: {log}")]
    Refused {
        /// Which program.
        program: String,
        /// For what.
        architecture: String,
        /// The compiler's words.
        log: String,
    },
    /// A call of the compiler's interface failed.
    #[error("the kernel compiler failed in {call} ({code})")]
    Interface {
        /// The call.
        call: &'static str,
        /// Its result.
        code: String,
    },
}

fn check(call: &'static str, result: sys::nvrtcResult) -> Result<(), CompileError> {
    match result {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        other => Err(CompileError::Interface { call, code: format!("{other:?}") }),
    }
}

/// An opened compiler.
#[derive(Clone, Debug)]
pub struct Compiler {
    /// Where it was found.
    pub found: library::Found,
    /// Its version.
    pub version: (i32, i32),
    /// What it compiles.
    pub sources: Sources,
}

/// Destroys the program when it goes.
struct Handle(sys::nvrtcProgram);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: a program that this handle alone owns.
        unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

type Size = unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
type Fetch = unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult;

impl Handle {
    fn fetch(&self, call: &'static str, size: Size, fetch: Fetch) -> Result<Vec<u8>, CompileError> {
        let mut bytes = 0;
        // SAFETY: a live program; `bytes` is a valid place for the size.
        check(call, unsafe { size(self.0, &mut bytes) })?;
        let mut buffer = vec![0u8; bytes];
        if bytes > 0 {
            // SAFETY: the buffer has the size that the compiler asked for.
            check(call, unsafe { fetch(self.0, buffer.as_mut_ptr().cast()) })?;
        }
        Ok(buffer)
    }

    fn text(&self, call: &'static str, size: Size, fetch: Fetch) -> Result<String, CompileError> {
        let bytes = self.fetch(call, size, fetch)?;
        Ok(CStr::from_bytes_until_nul(&bytes).map(|t| t.to_string_lossy().into_owned()).unwrap_or_default())
    }
}

impl Compiler {
    /// Opens the compiler library; `folder` is searched first. `kernels` overlays the embedded sources.
    ///
    /// # Errors
    /// `Library` when there is none, `Sources` when `kernels` cannot be used.
    pub fn open(folder: Option<&Path>, kernels: Option<&Path>) -> Result<Self, CompileError> {
        let found = library::nvrtc(folder)?;
        let sources = Sources::overlaid(kernels)?;
        if !sources.replaced.is_empty() {
            tracing::warn!(files = sources.replaced.join(" "), "these kernels are not the embedded ones");
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is present; both places are valid.
        check("nvrtcVersion", unsafe { sys::nvrtcVersion(&mut major, &mut minor) })?;
        Ok(Self { found, version: (major, minor), sources })
    }

    /// Compiles one program for one architecture ("sm_90a").
    ///
    /// # Errors
    /// `Refused` with the compiler's log.
    pub fn compile(&self, program: Program, architecture: &str) -> Result<Compiled, CompileError> {
        let interface =
            |_| CompileError::Interface { call: "nvrtcCreateProgram", code: "a NUL byte in a source".into() };
        let source = CString::new(self.sources.text(program.file())).map_err(interface)?;
        let name = CString::new(program.file()).map_err(interface)?;
        let texts: Vec<(CString, CString)> = self
            .sources
            .headers()
            .map(|(n, t)| Ok((CString::new(n)?, CString::new(t)?)))
            .collect::<Result<_, std::ffi::NulError>>()
            .map_err(interface)?;
        let names: Vec<*const c_char> = texts.iter().map(|(n, _)| n.as_ptr()).collect();
        let bodies: Vec<*const c_char> = texts.iter().map(|(_, t)| t.as_ptr()).collect();
        let mut raw = std::ptr::null_mut();
        // SAFETY: NUL-terminated strings and arrays of `texts.len()` of them, alive through the call.
        check("nvrtcCreateProgram", unsafe {
            sys::nvrtcCreateProgram(
                &mut raw,
                source.as_ptr(),
                name.as_ptr(),
                texts.len() as i32,
                bodies.as_ptr(),
                names.as_ptr(),
            )
        })?;
        let handle = Handle(raw);
        let options: Vec<CString> =
            program.options(architecture).into_iter().map(CString::new).collect::<Result<_, _>>().map_err(interface)?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: a live program and an array of NUL-terminated options.
        let result = unsafe { sys::nvrtcCompileProgram(handle.0, pointers.len() as i32, pointers.as_ptr()) };
        let log = handle.text("nvrtcGetProgramLog", sys::nvrtcGetProgramLogSize, sys::nvrtcGetProgramLog)?;
        if result != sys::nvrtcResult::NVRTC_SUCCESS {
            let (program, architecture) = (program.to_string(), architecture.to_string());
            return Err(CompileError::Refused { program, architecture, log });
        }
        let cubin = handle.fetch("nvrtcGetCUBIN", sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN)?;
        let ptx = handle.text("nvrtcGetPTX", sys::nvrtcGetPTXSize, sys::nvrtcGetPTX)?;
        Ok(Compiled { cubin, ptx, log })
    }
}
