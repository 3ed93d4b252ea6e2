//! Right, not only reproducible: ids and logits against an independent implementation of the same file (tests/reference/).
//!
//! The reference runs in a Python virtual environment that this test makes under target/. Without Python the tests that need it
//! are skipped visibly, with a count.

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crucible::model::pull::sha256;
use crucible::model::{LoadedModel, ModelSource, Profile, SpecialTokens, load};
use serde::Deserialize;

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reference");

/// What tests/reference/texts.json holds.
#[derive(Deserialize)]
struct Texts {
    logits: BTreeMap<String, String>,
    tokens: Vec<String>,
}

/// What the reference writes as ids.json.
#[derive(Deserialize)]
struct Ids {
    logits: BTreeMap<String, Vec<u32>>,
    tokens: Vec<Vec<u32>>,
    special: Vec<Vec<u32>>,
}

fn texts() -> Texts {
    let file = File::open(Path::new(SOURCE).join("texts.json")).expect("the texts are in the repository");
    serde_json::from_reader(file).expect("the texts are JSON")
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{command:?}: {text}")) }
}

/// A hash of everything that the reference's output depends on.
fn key() -> String {
    let names = ["reference.py", "requirements.txt", "texts.json"];
    let hashes = names.map(|name| sha256(&Path::new(SOURCE).join(name)).expect("the file is in the repository"));
    hashes.map(|hash| hash[..12].to_owned()).join("-")
}

/// The folder with the reference's output, made once; `None` where Python or its packages cannot be had.
fn reference() -> Option<&'static PathBuf> {
    static OUTPUT: OnceLock<Option<PathBuf>> = OnceLock::new();
    OUTPUT.get_or_init(|| make_reference().map_err(|error| eprintln!("{error}")).ok()).as_ref()
}

fn make_reference() -> Result<PathBuf, String> {
    let base = Path::new(env!("CARGO_TARGET_TMPDIR")).join("reference");
    fs::create_dir_all(&base).expect("the target folder is writable");
    let lock = File::create(base.join("lock")).expect("the target folder is writable");
    lock.lock().expect("the lock can be taken");
    let done = base.join(key());
    if done.join("ids.json").exists() {
        return Ok(done);
    }
    let venv = base.join("venv");
    let python = venv.join("bin").join("python");
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
    let requirements = Path::new(SOURCE).join("requirements.txt");
    let quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"];
    run(Command::new(&python).args(quiet).arg(&requirements))?;
    let (script, texts) = (Path::new(SOURCE).join("reference.py"), Path::new(SOURCE).join("texts.json"));
    let made = run(Command::new(&python).arg(script).arg(common::default_model()).arg(texts).arg(&done));
    // The environment is here: a script that fails is a failing test, not a missing Python.
    made.unwrap_or_else(|error| panic!("the reference failed: {error}"));
    Ok(done)
}

/// The reference's output, or a visible skip.
fn reference_or_skip(test: &str) -> Option<(&'static PathBuf, Ids)> {
    let Some(dir) = reference() else {
        eprintln!("SKIPPED 1 test: {test} needs python3 with venv, pip and a package index");
        return None;
    };
    let ids = serde_json::from_reader(File::open(dir.join("ids.json")).expect("the reference wrote its ids"));
    Some((dir, ids.expect("the ids are JSON")))
}

fn model(profile: Profile) -> LoadedModel {
    load(&ModelSource::Gguf(common::default_model()), profile).expect("the default model loads")
}

#[test]
fn ids_are_those_of_the_reference_tokenizer() {
    let Some((_, ids)) = reference_or_skip("ids_are_those_of_the_reference_tokenizer") else { return };
    let (texts, tokenizer) = (texts(), model(Profile::Q8).tokenizer);
    let encode = |text: &str, special| tokenizer.encode(text, special).expect("the text has ids");
    assert!(texts.tokens.len() >= 25 && texts.tokens.len() == ids.tokens.len());
    for ((text, plain), special) in texts.tokens.iter().zip(&ids.tokens).zip(&ids.special) {
        assert_eq!(&encode(text, SpecialTokens::Parse), special, "{text:?} with special tokens");
        assert_eq!(&encode(text, SpecialTokens::AsText), plain, "{text:?} as text");
    }
    for (name, text) in &texts.logits {
        assert_eq!(encode(text, SpecialTokens::AsText), ids.logits[name], "{name}");
    }
}
