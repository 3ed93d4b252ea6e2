//! Instruction sets: what is asked for, what the machine has, and the one way to call a kernel compiled for it.

use crate::backend::BackendError;

/// Which path the configuration asks for (`executor.isa`). All paths give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Isa {
    /// The best one that the machine has.
    #[default]
    Auto,
    /// AVX-512 with VNNI.
    Avx512,
    /// AVX2 with FMA.
    Avx2,
    /// Plain Rust.
    Scalar,
}

/// An instruction set that was detected; only `Level::detect` makes one, so that a kernel never meets a foreign machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(pub(super) InstructionSet);

/// What a level stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InstructionSet {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Plain Rust, compiled with the fused multiply-add of the machine.
    #[cfg(target_arch = "x86_64")]
    ScalarFma,
    Scalar,
}

impl Level {
    /// Picks the path.
    ///
    /// # Errors
    /// The machine lacks what `isa` forces.
    pub fn detect(isa: Isa) -> Result<Self, BackendError> {
        let kinds: &[InstructionSet] = &available();
        let wanted = kinds.iter().copied().find(|kind| match isa {
            Isa::Auto => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => *kind == InstructionSet::Avx512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => *kind == InstructionSet::Avx2,
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx512 | Isa::Avx2 => false,
            Isa::Scalar => Level(*kind).name() == "scalar",
        });
        wanted.map(Level).ok_or_else(|| BackendError::Unavailable {
            backend: "cpu",
            reason: format!("this machine has no {isa:?}, set executor.isa to auto"),
        })
    }

    /// For people.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            InstructionSet::ScalarFma => "scalar",
            InstructionSet::Scalar => "scalar",
        }
    }
}

/// What this machine has, best first.
fn available() -> Vec<InstructionSet> {
    let mut kinds = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        if avx512 {
            kinds.push(InstructionSet::Avx512);
        }
        if avx2 {
            kinds.extend([InstructionSet::Avx2, InstructionSet::ScalarFma]);
        }
    }
    kinds.push(InstructionSet::Scalar);
    kinds
}

/// Defines `fn name(level, args…)` that runs `body::<S>(args…)` compiled for the level's instruction set.
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis unsafe fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name(level: $crate::backend::cpu::level::Level, $($arg: $ty),*) $(-> $ret)? {
            use $crate::backend::cpu::level::InstructionSet;
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: this function has the features; the rest is the caller's grant.
                unsafe { $body::<$crate::backend::cpu::avx512::Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: this function has the features; the rest is the caller's grant.
                unsafe { $body::<$crate::backend::cpu::avx2::Avx2>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn scalar_fma($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the scalar path needs no feature; the rest is the caller's grant.
                unsafe { $body::<$crate::backend::cpu::simd::Scalar>($($arg),*) }
            }
            // SAFETY: a level exists only where its features were detected; the rest is the caller's grant.
            unsafe {
                match level.0 {
                    #[cfg(target_arch = "x86_64")]
                    InstructionSet::Avx512 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    InstructionSet::Avx2 => avx2($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    InstructionSet::ScalarFma => scalar_fma($($arg),*),
                    InstructionSet::Scalar => $body::<$crate::backend::cpu::simd::Scalar>($($arg),*),
                }
            }
        }
    };
}
pub(super) use dispatch;
