//! What is rounded once when sampling parameters are compiled into a `Rule`; `protocol::sampling` does the rest.

/// round(p·2^32), half away from zero, at least 1 so that one token is kept.
pub fn top_p_fixed(top_p: f64) -> u64 {
    (libm::round(top_p * 4_294_967_296.0) as u64).max(1)
}
