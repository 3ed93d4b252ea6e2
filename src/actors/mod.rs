//! Thin actix shells over the pure cores. Each receiver owns its messages; only `topology` knows every address.

pub mod admission;
pub mod session;
pub mod topology;
