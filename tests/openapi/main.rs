//! The document at /openapi.json against the server: every route in it answers, every bound in it is the server's to the last value,
//! no field beside it is taken, and no request that a fuzzer makes from it ends in a 500.

mod bounds;
mod fuzz;
#[path = "../http_support/mod.rs"]
mod http_support;
