#!/usr/bin/env python3
"""Breaks kernels on purpose, one patch at a time, and expects the check that guards them to fail. Needs a GPU, no compiler but NVRTC.

    python3 tests/mutations/kernels/run.py BINARY [--libraries DIR] [--cache DIR] [--only WORD] [--seconds N] [--jobs N]

Every patch names what it breaks and the check that must notice (`check:`, arguments of `crucible check`). The patched copy of kernels/ goes
to the binary with `--kernels`, so nothing is built. First each of these checks must pass on the unpatched copy. The program exits with 0
when every check passed unpatched and failed on every patch.
"""

import argparse
import concurrent.futures
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
KERNELS = HERE.parents[2] / "kernels"


def header(patch, key):
    match = re.search(rf"^{key}:\s*(.+)$", patch.read_text(), re.MULTILINE)
    if not match:
        sys.exit(f"{patch.name}: no line `{key}: …`")
    return match.group(1).strip()


def hunks(text):
    """(file, old lines, new lines) of each hunk."""
    file, old, new = None, [], []
    for line in text.splitlines():
        if line.startswith("+++ b/kernels/"):
            file = line.removeprefix("+++ b/kernels/")
        elif line.startswith("--- ") or line.startswith("@@"):
            if old:
                yield file, old, new
            old, new = [], []
        elif file and line[:1] in (" ", "-", "+"):
            if line[0] != "+":
                old.append(line[1:])
            if line[0] != "-":
                new.append(line[1:])
    if old:
        yield file, old, new


def copy_of_kernels(folder, patch=None):
    shutil.copytree(KERNELS, folder)
    for file, old, new in hunks(patch.read_text()) if patch else []:
        path = folder / file
        text, before, after = path.read_text(), "\n".join(old) + "\n", "\n".join(new) + "\n"
        if text.count(before) != 1:
            sys.exit(f"{patch.name} does not apply to {file}")
        path.write_text(text.replace(before, after))
    return folder


def check(args, arguments, kernels):
    command = [args.binary, "check", *shlex.split(arguments), "--backend", "cuda", "--kernels", str(kernels)]
    for name in ("libraries", "cache"):
        if getattr(args, name):
            command += [f"--{name}", getattr(args, name)]
    try:
        result = subprocess.run(command, text=True, capture_output=True, timeout=args.seconds)
        return result.returncode, result.stdout + result.stderr
    except subprocess.TimeoutExpired:
        return None, f"did not end in {args.seconds} s"


def reason(output):
    lines = [line for line in output.splitlines() if line.startswith("FAIL") or "failed:" in line or line.startswith("error")]
    return lines[0][:150] if lines else output.strip()[-150:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--libraries")
    parser.add_argument("--cache")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=int, default=240, help="that a check gets")
    parser.add_argument("--jobs", type=int, default=4, help="checks side by side")
    args = parser.parse_args()
    patches = [p for p in sorted(HERE.glob("*.patch")) if args.only in p.name]
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        scratch = pathlib.Path(scratch)
        plain = copy_of_kernels(scratch / "plain")

        def unbroken(arguments):
            code, output = check(args, arguments, plain)
            word = "passes" if code == 0 else "FAILS ON GOOD KERNELS"
            print(f"{word:9}  {arguments:24} {output.strip().splitlines()[-1]}", flush=True)
            return code != 0

        def broken(patch):
            began, arguments = time.monotonic(), header(patch, "check")
            code, output = check(args, arguments, copy_of_kernels(scratch / patch.stem, patch))
            killed = code not in (0, None)
            word = "killed" if killed else "SURVIVED"
            print(f"{word:9} {time.monotonic() - began:4.0f} s  {arguments:24} {patch.stem}: {reason(output)}", flush=True)
            return not killed

        bad = sum(pool.map(unbroken, sorted({header(p, "check") for p in patches})))
        bad += sum(pool.map(broken, patches))
    print(f"{len(patches)} broken kernels, {bad} checks that did not do as they should")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
