//! GPU figures stay fresh: docs/evidence.json names the sources that its figures were made with, and goes stale with them.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Every file under `dir`, sorted by path.
fn files_under(dir: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> = fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            files_under(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// SHA-256 over `path NUL sha256(contents) LF` of every file of kernels/ and src/backend/cuda, in path order.
fn sources_sha256(root: &Path) -> String {
    let mut files = Vec::new();
    for dir in ["kernels", "src/backend/cuda"] {
        files_under(&root.join(dir), &mut files);
    }
    let mut all = Sha256::new();
    for file in &files {
        let name = file.strip_prefix(root).unwrap().to_string_lossy().replace('\\', "/");
        let contents = Sha256::digest(fs::read(file).unwrap());
        all.update(format!("{name}\0{contents:x}\n"));
    }
    format!("{:x}", all.finalize())
}

#[test]
fn gpu_evidence_belongs_to_these_kernels_or_says_that_it_does_not() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("docs/evidence.json")).expect("docs/evidence.json");
    let evidence: serde_json::Value = serde_json::from_str(&text).expect("docs/evidence.json is JSON");
    let now = sources_sha256(root);
    let recorded = evidence["sources_sha256"].as_str().unwrap_or_default();
    let reason = evidence["unverified"].as_str().unwrap_or_default();
    if recorded == now {
        assert!(reason.is_empty(), "the evidence matches the sources, so `unverified` must go");
        return;
    }
    assert!(
        reason.len() >= 20,
        "kernels/ or src/backend/cuda changed (now {now}, evidence of {recorded:?}): measure again, or set `unverified` in \
         docs/evidence.json to the reason"
    );
    println!("1 skipped: GPU evidence is unverified: {reason}");
}

#[test]
fn a_changed_kernel_changes_the_hash() {
    let dir = std::env::temp_dir().join(format!("crucible-evidence-{}", std::process::id()));
    let (kernels, cuda) = (dir.join("kernels"), dir.join("src/backend/cuda"));
    fs::create_dir_all(&kernels).unwrap();
    fs::create_dir_all(&cuda).unwrap();
    fs::write(kernels.join("a.cu"), "one").unwrap();
    fs::write(cuda.join("b.rs"), "two").unwrap();
    let before = sources_sha256(&dir);
    fs::write(kernels.join("a.cu"), "onf").unwrap();
    let after = sources_sha256(&dir);
    fs::remove_dir_all(&dir).unwrap();
    assert_ne!(before, after);
}
