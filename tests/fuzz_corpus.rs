//! Replays the fuzz corpus on stable: every file as it is, cut short, and with seeded changes. Fuzzing itself needs a nightly
//! toolchain and is not part of this run.

#[path = "../fuzz/entry.rs"]
mod entry;

use std::path::Path;

/// Changed copies made of each corpus file.
const CHANGES: u64 = 400;

/// SplitMix64: the changes are the same on every run.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn changed(bytes: &[u8], seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut copy = bytes.to_vec();
    for _ in 0..=next(&mut state) % 4 {
        if copy.is_empty() {
            break;
        }
        let at = (next(&mut state) % copy.len() as u64) as usize;
        match next(&mut state) % 4 {
            0 => copy[at] = next(&mut state) as u8,
            1 => copy[at] = [0, 0xff, 0x7f, b'{'][(next(&mut state) % 4) as usize],
            2 => copy.insert(at, next(&mut state) as u8),
            _ => {
                copy.remove(at);
            }
        }
    }
    copy
}

fn replay(target: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 5, "{} holds only {} files", folder.display(), files.len());
    let mut runs = 0;
    for file in &files {
        let bytes = std::fs::read(file).unwrap();
        run(&bytes);
        let cuts = bytes.len().min(256);
        (0..cuts).for_each(|n| run(&bytes[..n * bytes.len() / cuts]));
        (0..CHANGES).for_each(|seed| run(&changed(&bytes, seed)));
        runs += 1 + cuts as u64 + CHANGES;
    }
    println!("{target}: {} corpus files, {runs} runs", files.len());
}

#[test]
fn no_model_file_makes_the_reader_panic() {
    replay("gguf", entry::gguf);
}

#[test]
fn no_template_makes_the_renderer_panic_or_run_for_ever() {
    replay("template", entry::template);
}

#[test]
fn no_body_makes_a_dialect_panic() {
    replay("body", entry::body);
    println!("1 skipped: coverage-guided fuzzing (cargo +nightly fuzz run gguf|template|body)");
}
