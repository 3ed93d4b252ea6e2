//! The pure core of the sampler: what the selected tokens mean. It numbers them, finds the end-of-sequence token and the length
//! end, takes each request's times, groups news by session hub, and hands the logits of scored prompts on with the tokens that they
//! predict. Selection itself is arithmetic and happens in the backend.

mod core;
mod stopwatch;
#[cfg(test)]
mod tests;

pub use core::{Digest, Sampler, Tracked};
