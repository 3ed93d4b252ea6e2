//! Sessions and the hub of each HTTP worker. Placeholder: its owner replaces this file and keeps `messages`.

pub mod messages;
