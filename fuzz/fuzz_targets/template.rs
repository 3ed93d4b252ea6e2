//! Fuzzes the `template` entry; what it may do stands in ../entry.rs.
#![no_main]

#[path = "../entry.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::template(bytes));
