//! The admission actor. Placeholder: its owner replaces this file and keeps `messages`.

pub mod messages;
