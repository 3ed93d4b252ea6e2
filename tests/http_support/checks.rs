//! A suite of many small checks of one surface: each has a sentence of its own, all of them run, and their number is printed past the
//! capture of the test harness.
#![allow(dead_code)]

use std::collections::HashSet;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The checks of one surface so far.
pub struct Checks {
    surface: &'static str,
    sentences: HashSet<String>,
    failed: Vec<String>,
}

impl Checks {
    /// No checks yet.
    pub fn of(surface: &'static str) -> Self {
        Self { surface, sentences: HashSet::new(), failed: Vec::new() }
    }

    /// Runs one check; it fails by a panic.
    pub fn check(&mut self, sentence: &str, body: impl FnOnce()) {
        assert!(self.sentences.insert(sentence.to_owned()), "two checks say: {sentence}");
        if catch_unwind(AssertUnwindSafe(body)).is_err() {
            self.failed.push(sentence.to_owned());
        }
    }

    /// Prints the count and fails when a check did, or when there are fewer than `least`.
    pub fn finish(self, least: usize) {
        let (count, failed) = (self.sentences.len(), self.failed.len());
        let _ = writeln!(std::io::stderr(), "{}: {} of {count} checks hold", self.surface, count - failed);
        assert!(self.failed.is_empty(), "{failed} checks of {} fail:\n{}", self.surface, self.failed.join("\n"));
        assert!(count >= least, "{} has {count} checks, at least {least} are promised", self.surface);
    }
}
