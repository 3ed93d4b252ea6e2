//! `crucible tui`: a terminal client of the native HTTP API. It talks to a server like any other client and shares nothing with
//! the engine of this process.
//!
//! [`state`] is a pure machine (events in, state and at most one effect out), [`view`] draws it, [`client`] speaks HTTP,
//! [`screen`] owns the terminal and always gives it back, and [`run`] ties the four together on one thread.

mod client;
mod editor;
mod meter;
mod run;
mod screen;
mod settings;
mod state;
mod view;
mod wire;
mod wrap;

pub use run::{Options, TuiError, run};
pub use screen::Screen;
