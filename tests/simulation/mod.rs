//! The whole server below its sockets, in one thread and by a seed: the pure cores with a mailbox each, the real sessions with their
//! clients, and the CPU backend with a small synthetic model.

pub mod catalogue;
pub mod client;
pub mod device;
pub mod mail;
#[path = "../../src/planner/seeded.rs"]
#[allow(dead_code)]
pub mod seeded;
pub mod world;
