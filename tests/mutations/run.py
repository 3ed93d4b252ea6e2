#!/usr/bin/env python3
"""Breaks the code on purpose, one patch at a time, and expects the test that guards it to fail.

    python3 tests/mutations/run.py            # every mutant, in a scratch copy under target/mutants
    python3 tests/mutations/run.py planner    # those whose file name contains "planner"
    python3 tests/mutations/run.py --check    # only that every patch still applies

A mutant is a patch whose first lines say what it breaks and which test must notice:

    invariant: I6
    test: --lib planner::tests::an_ended_sequence_enters_no_further_plan

`test:` is handed to `cargo test` as it stands; `check:` in its place names suites of `crucible check --backend cpu --quick`. A mutant that
compiles and whose test passes has survived: the run fails.
"""

import argparse
import pathlib
import re
import shlex
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRATCH = ROOT / "target" / "mutants"


def git(*args, cwd=ROOT, **kwargs):
    return subprocess.run(["git", *args], cwd=cwd, text=True, capture_output=True, **kwargs)


def header(patch, key):
    match = re.search(rf"^{key}:\s*(.+)$", patch.read_text(), re.MULTILINE)
    if not match:
        sys.exit(f"{patch.name}: no line `{key}: …`")
    return match.group(1).strip()


def scratch_copy():
    """A clone of HEAD with its own build folder, reset to HEAD on every run."""
    tree = SCRATCH / "tree"
    if not tree.exists():
        SCRATCH.mkdir(parents=True, exist_ok=True)
        git("clone", "--quiet", "--local", str(ROOT), str(tree)).check_returncode()
    git("fetch", "--quiet", "origin", cwd=tree).check_returncode()
    head = git("rev-parse", "HEAD").stdout.strip()
    git("reset", "--quiet", "--hard", head, cwd=tree).check_returncode()
    return tree


def run_test(tree, patch):
    build = ["--target-dir", str(SCRATCH / "build")]
    if re.search(r"^check:", patch.read_text(), re.MULTILINE):
        suite = shlex.split(header(patch, "check"))
        options = ["--backend", "cpu", "--quick", "--profile", "q8"]
        command = ["cargo", "run", "--release", *build, "--bin", "crucible", "--", "check", *suite, *options]
    else:
        command = ["cargo", "test", *build, *shlex.split(header(patch, "test"))]
    return subprocess.run(command, cwd=tree, text=True, capture_output=True, timeout=1800)


def ran_a_test(output):
    return any(int(n) > 0 for n in re.findall(r"running (\d+) tests?", output)) or "\ncheck: seed" in output


def try_mutant(tree, patch):
    """One of killed, survived, broken (does not compile or names no test)."""
    git("apply", str(patch), cwd=tree).check_returncode()
    try:
        result = run_test(tree, patch)
    except subprocess.TimeoutExpired:
        return "killed", "timed out"
    finally:
        git("checkout", "--quiet", "--", ".", cwd=tree)
    output = result.stdout + result.stderr
    if not ran_a_test(output):
        return "broken", output[-1500:]
    return ("killed", "") if result.returncode != 0 else ("survived", output[-1500:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filter", nargs="?", default="")
    parser.add_argument("--check", action="store_true", help="only that every patch applies")
    args = parser.parse_args()
    patches = [p for p in sorted((ROOT / "tests/mutations").glob("*.patch")) if args.filter in p.name]
    if args.check:
        bad = [p.name for p in patches if git("apply", "--check", str(p)).returncode != 0]
        print(f"{len(patches) - len(bad)} patches apply, {len(bad)} do not", *bad, sep="\n  ")
        sys.exit(bool(bad))
    tree = scratch_copy()
    counts = {"killed": 0, "survived": 0, "broken": 0}
    for patch in patches:
        start = time.monotonic()
        verdict, detail = try_mutant(tree, patch)
        counts[verdict] += 1
        print(f"{verdict:9} {time.monotonic() - start:5.0f} s  {header(patch, 'invariant'):10} {patch.stem}", flush=True)
        if verdict != "killed":
            print(detail)
    print(", ".join(f"{n} {word}" for word, n in counts.items()))
    sys.exit(counts["survived"] + counts["broken"] > 0)


if __name__ == "__main__":
    main()
