//! Wire types and session formatting. Nothing here knows an actor; `actors::session` calls it with tokens and sends what it returns.

pub mod errors;
pub mod sse;
pub mod stop;
