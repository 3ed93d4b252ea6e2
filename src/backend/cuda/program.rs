//! The list of programs: one per source file and set of macros.

use sha2::{Digest, Sha256};

use super::sources::Sources;

/// Architectures that `crucible check compile --arch all` covers.
pub const ARCHITECTURES: [&str; 6] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"];

/// Options of every program: IEEE single precision in the written order.
pub const OPTIONS: [&str; 6] =
    ["--std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "--ptxas-options=-v"];

/// How a matrix lies on the device (docs/arithmetic.md: the order follows from it).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// f32 `[n][k]`.
    F32 = 0,
    /// i8 `[n][k]`, one f32 scale a row.
    Int8 = 1,
    /// i8 `[n][k]`, one f16 scale a block of 32.
    Block = 2,
    /// As `Block`, with an f16 minimum a block.
    BlockMin = 3,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 4] = [Kind::F32, Kind::Int8, Kind::Block, Kind::BlockMin];

    /// Whether activations are quantised for it.
    pub const fn is_block(self) -> bool {
        matches!(self, Kind::Block | Kind::BlockMin)
    }
}

/// One program to compile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Program {
    /// rows.cu.
    Rows,
    /// select.cu.
    Select,
    /// linear_rows_q8.cu or linear_rows_f32.cu.
    LinearRows(Kind),
    /// linear_tile_q8.cu or linear_tile_f32.cu.
    LinearTile(Kind),
    /// attention_decode.cu for a head dimension; `fused` rotates and stores too.
    AttendDecode {
        /// Components of a head.
        head_dim: usize,
        /// Whether rotation and KV store are part of it.
        fused: bool,
    },
    /// attention_prefill.cu for a head dimension.
    AttendPrefill {
        /// Components of a head.
        head_dim: usize,
    },
}

impl Program {
    /// Every program that a model with these matrix kinds and head dimension uses.
    pub fn of_model(kinds: &[Kind], head_dim: usize) -> Vec<Program> {
        let mut programs = vec![Program::Rows, Program::Select];
        programs.extend(kinds.iter().flat_map(|&k| [Program::LinearRows(k), Program::LinearTile(k)]));
        programs.extend([true, false].map(|fused| Program::AttendDecode { head_dim, fused }));
        programs.push(Program::AttendPrefill { head_dim });
        programs
    }

    /// Programs of the shipped geometries (head dimension 64, kinds of the three profiles).
    pub fn shipped() -> Vec<Program> {
        Self::of_model(&Kind::ALL, 64)
    }

    /// Every instantiation.
    pub fn all() -> Vec<Program> {
        let mut programs: Vec<Program> =
            [32, 64, 96, 128].iter().flat_map(|&d| Self::of_model(&Kind::ALL, d)).collect();
        programs.sort();
        programs.dedup();
        programs
    }

    /// File name of the source.
    pub const fn file(self) -> &'static str {
        match self {
            Program::Rows => "rows.cu",
            Program::Select => "select.cu",
            Program::LinearRows(Kind::F32 | Kind::Int8) => "linear_rows_f32.cu",
            Program::LinearRows(_) => "linear_rows_q8.cu",
            Program::LinearTile(Kind::F32 | Kind::Int8) => "linear_tile_f32.cu",
            Program::LinearTile(_) => "linear_tile_q8.cu",
            Program::AttendDecode { .. } => "attention_decode.cu",
            Program::AttendPrefill { .. } => "attention_prefill.cu",
        }
    }

    /// Macro definitions, as options.
    pub fn defines(self) -> Vec<String> {
        match self {
            Program::Rows | Program::Select => vec![],
            Program::LinearRows(kind) | Program::LinearTile(kind @ (Kind::F32 | Kind::Int8)) => {
                vec![format!("-DKIND={}", kind as u32)]
            }
            Program::LinearTile(kind) => vec![format!("-DMINIMUM={}", u32::from(kind == Kind::BlockMin))],
            Program::AttendDecode { head_dim, fused } => {
                vec![format!("-DHEAD_DIM={head_dim}"), format!("-DFUSED={}", u32::from(fused))]
            }
            Program::AttendPrefill { head_dim } => vec![format!("-DHEAD_DIM={head_dim}")],
        }
    }

    /// Everything on the compiler's command line.
    pub fn options(self, architecture: &str) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={architecture}")];
        options.extend(OPTIONS.iter().map(|o| (*o).to_string()));
        options.extend(self.defines());
        options
    }

    /// Hash of source, headers, options, architecture and compiler version: the name of the compiled program.
    pub fn key(self, sources: &Sources, architecture: &str, compiler: (i32, i32)) -> String {
        let mut hash = Sha256::new();
        let mut part = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        };
        part(sources.text(self.file()));
        for (name, text) in sources.headers() {
            part(name);
            part(text);
        }
        for option in self.options(architecture) {
            part(&option);
        }
        part(&format!("{}.{}", compiler.0, compiler.1));
        hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
    }
}

impl std::fmt::Display for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.file(), self.defines().join(" "))
    }
}
