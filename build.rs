//! Tells the program which commit it is built from: `CRUCIBLE_COMMIT` where that is given (an archive has no history), git otherwise, and
//! nothing where there is neither. `+changes` follows when what is compiled is not what was committed.

use std::process::Command;

/// What goes into the program.
const SOURCES: [&str; 5] = ["src", "kernels", "Cargo.toml", "Cargo.lock", "build.rs"];

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn commit() -> Option<String> {
    // An archive inside someone else's repository has no commit of that.
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    let head = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changes = git(&[&["status", "--porcelain", "--untracked-files=no", "--"], &SOURCES[..]].concat())?;
    Some(if changes.is_empty() { head } else { format!("{head}+changes") })
}

fn main() {
    println!("cargo::rerun-if-env-changed=CRUCIBLE_COMMIT");
    SOURCES.iter().for_each(|path| println!("cargo::rerun-if-changed={path}"));
    // Every commit, checkout and rebase of this working tree leaves a line there.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|p| std::path::Path::new(p).exists()) {
        println!("cargo::rerun-if-changed={log}");
    }
    let given = std::env::var("CRUCIBLE_COMMIT").ok().filter(|c| !c.is_empty());
    if let Some(commit) = given.or_else(commit) {
        println!("cargo::rustc-env=CRUCIBLE_COMMIT={commit}");
    }
}
