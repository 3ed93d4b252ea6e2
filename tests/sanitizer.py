#!/usr/bin/env python3
"""Runs checks under compute-sanitizer and prints, for each run, what it covered and the errors that the tool found. Needs a GPU.

    python3 tests/sanitizer.py BINARY [--tool memcheck|racecheck|initcheck|all] [--parts 1-4] [--libraries DIR] [--cache DIR] [--seconds N]

memcheck    `check packed` in profile int8: 16 steps, 24 fuzz sets, every other piece of the suite, split into 12 parts; a part takes minutes
            at most, and --parts plays some of them (the counts of all parts add up to those of the whole).
racecheck   every launcher on one shape of each kind and head dimension 64, then one piece of `check packed` in each profile.
initcheck   the same. (The suites fill what a step must not read with NaN before every step: a read of it changes bits. Initcheck sees the
            rest.)
"""

import argparse
import re
import subprocess
import sys
import time

PARTS = 12
# Sequences and packed steps that all parts together must have played: those that `check packed` asks of the whole suite.
LEAST = (1084, 878)


def corpus(tool, parts):
    if tool == "memcheck":
        whole = "packed --profile int8 --steps 16 --sets 24"
        return [f"{whole} --part {i}/{PARTS}" for i in parts]
    # With one fuzz set there are 14 pieces; the third has two prompts that end together, beside longer ones.
    pieces = [f"packed --profile {p} --sets 1 --part 3/14" for p in ("f32", "int8", "q8")]
    return ["kernels --shapes 1", *pieces]


def run(args, tool, check):
    binary = [args.binary, "check", *check.split(), "--backend", "cuda"]
    for name in ("libraries", "cache"):
        if getattr(args, name):
            binary += [f"--{name}", getattr(args, name)]
    command = [args.sanitizer, "--tool", tool, "--error-exitcode", "77", *binary]
    began = time.monotonic()
    try:
        result = subprocess.run(command, text=True, capture_output=True, timeout=args.seconds)
        output, code = result.stdout + result.stderr, result.returncode
    except subprocess.TimeoutExpired as error:
        output, code = (error.stdout or b"").decode(errors="replace"), None
    seconds = time.monotonic() - began
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", output)
    lines = output.splitlines()
    print(f"{tool}: check {check}: {seconds:.0f} s, exit {code}, {summary[-1] if summary else 'NO SUMMARY: no coverage'}")
    wanted = ("sequences", "packed", "survivors", "poisoned", "cases", "check:")
    for line in lines:
        if not line.startswith("=========") and any(word in line for word in wanted):
            print(f"    {line.strip()}")
    if code != 0:
        tail = [line for line in lines if line.startswith("=========") or line.startswith("FAIL")]
        print("\n".join(f"    {line[:170]}" for line in tail[:20]))
    sys.stdout.flush()
    played = re.search(r"(\d+) sequences in packed plays, (\d+) packed steps", output)
    return code == 0 and bool(summary), tuple(map(int, played.groups())) if played else (0, 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--tool", choices=["memcheck", "racecheck", "initcheck", "all"], default="all")
    parser.add_argument("--parts", default=f"1-{PARTS}", help="of memcheck, from-to")
    parser.add_argument("--libraries")
    parser.add_argument("--cache")
    parser.add_argument("--seconds", type=int, default=200, help="most that a run may take")
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    args = parser.parse_args()
    first, _, last = args.parts.partition("-")
    parts = range(int(first), int(last or first) + 1)
    tools = ["memcheck", "racecheck", "initcheck"] if args.tool == "all" else [args.tool]
    bad = 0
    for tool in tools:
        results = [run(args, tool, check) for check in corpus(tool, parts)]
        bad += sum(not clean for clean, _ in results)
        if tool == "memcheck" and len(parts) == PARTS:
            whole = tuple(map(sum, zip(*(played for _, played in results))))
            print(f"all parts: {whole[0]} sequences, {whole[1]} packed steps, of at least {LEAST[0]} and {LEAST[1]}")
            bad += any(got < least for got, least in zip(whole, LEAST))
    print(f"{bad} runs that found something or did not end")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
