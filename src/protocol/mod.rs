//! Wire types and session formatting. Nothing here knows an actor; `actors::session` calls it with tokens and sends what it returns.

pub mod adjust;
pub mod anthropic;
pub mod body;
pub mod choice;
pub mod content;
pub mod errors;
pub mod events;
pub mod format;
pub mod native;
pub mod openai;
pub mod sampling;
pub mod sse;
pub mod stop;
