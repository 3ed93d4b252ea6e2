//! Every mutant of tests/mutations still applies to the code it was made for. Running them takes minutes: tests/mutations/run.py.

use std::io::Write;
use std::path::Path;
use std::process::Command;

#[test]
fn every_mutant_still_applies_and_names_its_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if Command::new("git").arg("--version").output().is_err() {
        // Past the capture of the test harness: a skip must be seen.
        let _ = writeln!(std::io::stderr(), "skipped 1 check: no git to apply mutants with");
        return;
    }
    let mut patches = 0;
    for entry in std::fs::read_dir(root.join("tests/mutations")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "patch") {
            continue;
        }
        patches += 1;
        let text = std::fs::read_to_string(&path).unwrap();
        for key in ["invariant: ", "test: "] {
            assert!(text.lines().any(|l| l.starts_with(key)), "{}: no line `{key}…`", path.display());
        }
        let applies = Command::new("git").current_dir(root).args(["apply", "--check"]).arg(&path).output().unwrap();
        assert!(applies.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&applies.stderr));
    }
    assert!(patches >= 20, "{patches} mutants, at least 20 are promised");
}
