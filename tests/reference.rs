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

use crucible::admission::RequestId;
use crucible::backend::cpu::{CpuBackend, CpuConfig, Isa};
use crucible::backend::{
    Backend, HostLogits, Input, Row, Rule, SamplingRow, SlotBinding, Start, Step, StepValidator, Want,
};
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

/// Logits `[positions][vocab]` of every text, by name, on the CPU backend in this profile.
fn engine_logits(profile: Profile, ids: &Ids) -> BTreeMap<String, Vec<Vec<f32>>> {
    let longest = ids.logits.values().map(Vec::len).max().expect("there are texts");
    let pages = longest.div_ceil(16);
    let config = CpuConfig { threads: 0, isa: Isa::Auto, pages, page_tokens: 16, slots: 1, max_step_tokens: longest };
    let mut backend = CpuBackend::new(model(profile).weights, profile, config).expect("the backend starts");
    let facts = backend.facts().clone();
    let mut validator = StepValidator::new(facts.step_limits());
    let mut logits = BTreeMap::new();
    for (id, (name, tokens)) in (1..).zip(&ids.logits) {
        let request = RequestId(id);
        let row = Row {
            request,
            slot: 0,
            start: Start::Host(0),
            len: tokens.len() as u32,
            input: Input::Tokens,
            want: Want::All,
            sampling: SamplingRow { rule: Rule::Greedy, seed: 0, token_index: 0, choice: 0 },
            logprobs: None,
            host_logits: HostLogits::Yes,
        };
        let binding =
            SlotBinding { slot: 0, request, pages: (0..tokens.len().div_ceil(16) as u32).collect(), adjust: None };
        let step = Step { id, bindings: vec![binding], rows: vec![row], tokens: tokens.clone() };
        backend.submit(validator.check(step).expect("the step is valid")).expect("the backend takes it");
        let mut output = loop {
            match backend.poll().expect("the step succeeds") {
                Some(output) => break output,
                None => std::thread::sleep(std::time::Duration::from_millis(1)),
            }
        };
        logits.insert(name.clone(), output.rows.swap_remove(0).logits);
    }
    logits
}

/// The reference's logits of one text, `[positions][vocab]`.
fn reference_logits(dir: &Path, name: &str, positions: usize) -> Vec<Vec<f32>> {
    let bytes = fs::read(dir.join(format!("{name}.f32"))).expect("the reference wrote its logits");
    let row = bytes.len() / positions;
    let floats = |row: &[u8]| row.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
    bytes.chunks_exact(row).map(floats).collect()
}

fn argmax(row: &[f32]) -> usize {
    (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best })
}

/// ln of the softmax, in f64.
fn log_softmax(row: &[f32]) -> Vec<f64> {
    let max = f64::from(row[argmax(row)]);
    let sum: f64 = row.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    row.iter().map(|&x| f64::from(x) - max - sum.ln()).collect()
}

/// Kullback-Leibler divergence of the engine's distribution from the reference's, in nats.
fn divergence(reference: &[f32], engine: &[f32]) -> f64 {
    let (p, q) = (log_softmax(reference), log_softmax(engine));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}

/// How far the engine is from the reference over every position of every text.
#[derive(Debug, Default)]
struct Distance {
    positions: usize,
    abs_max: f32,
    same_top: usize,
    divergence_sum: f64,
}

fn distance(profile: Profile, dir: &Path, ids: &Ids) -> Distance {
    let mut total = Distance::default();
    for (name, engine) in engine_logits(profile, ids) {
        let reference = reference_logits(dir, &name, ids.logits[&name].len());
        assert_eq!((engine.len(), engine[0].len()), (reference.len(), reference[0].len()), "{name}");
        for (ours, theirs) in engine.iter().zip(&reference) {
            let differences = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs());
            total.abs_max = differences.fold(total.abs_max, f32::max);
            total.same_top += usize::from(argmax(ours) == argmax(theirs));
            total.divergence_sum += divergence(theirs, ours);
            total.positions += 1;
        }
    }
    eprintln!("{profile:?} against the reference: {total:?}");
    assert!(total.positions >= 256, "{total:?}");
    total
}

#[test]
fn profile_f32_has_the_logits_of_an_independent_implementation() {
    let Some((dir, ids)) = reference_or_skip("profile_f32_has_the_logits") else { return };
    let d = distance(Profile::F32, dir, &ids);
    assert!(d.abs_max <= 2e-3, "{d:?}");
    assert!(d.same_top * 100 >= d.positions * 99, "{d:?}");
}

#[test]
fn profile_q8_is_close_to_the_unquantised_arithmetic() {
    let Some((dir, ids)) = reference_or_skip("profile_q8_is_close") else { return };
    let d = distance(Profile::Q8, dir, &ids);
    assert!(d.divergence_sum / (d.positions as f64) < 0.01, "{d:?}");
}
