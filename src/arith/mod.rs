//! The canonical arithmetic: one readable scalar function for every formula of docs/arithmetic.md.
//!
//! These functions are the definition. A backend may compute in any way that gives the same bits; every kernel, on either kind of
//! device, is tested against this module on bits. Everything is IEEE-754 single precision in the order written here: Rust never
//! contracts, `mul_add` is one fused operation. Values are assumed finite; a non-finite logit fails its request later on.

pub mod adjust;
pub mod attention;
pub mod exp;
pub mod linear;
pub mod norm;
pub mod philox;
pub mod pointwise;
pub mod quant;
pub mod reduce;
pub mod rope;
pub mod rule;
pub mod select;

pub use adjust::{MAX_BIAS, adjusted_logit, adjusted_logits};
pub use attention::attend;
pub use exp::exp_c;
pub use linear::{linear_f32, linear_int8, linear_q8};
pub use norm::rms_norm;
pub use philox::philox4x32_10;
pub use pointwise::swiglu;
pub use quant::{ACT_BLOCK, ActBlock, Int8Row, WeightBlock, quantise_activations, quantise_int8_row};
pub use rope::{RopeTable, rotate_head};
pub use select::{Selection, log_probability, select};
