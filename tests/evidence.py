#!/usr/bin/env python3
"""Gathers the evidence of a device: suites, speed, policy study, soak, memcheck. One program, one folder, one table.

    python3 tests/evidence.py BINARY --out DIR --stages checks,speed [--libraries DIR] [--cache DIR] [--within SECONDS]
    python3 tests/evidence.py --list                              # every stage with its jobs and time limits
    python3 tests/evidence.py BINARY --out DIR --backend cpu --quick --config config/cpu-test.toml --token-range 0..300

Nothing stops at a failure: a job that fails or does not end within its limit is written down as that, and the next one starts. `--within`
bounds the whole call (a lent machine gives ten minutes, say): jobs that no longer fit are written down as not run, and a later call with
their stages adds them to the same file. `--jobs` of the checks run side by side; what is timed runs alone.

DIR/evidence.json holds for every job the exact command, its seconds, exit code, last lines, figures, and the medians of clocks, power and
temperature while it ran; of every stage those second by second, and what `inspect --device` says before and after. DIR/STAGE holds outputs and
reports. The file is written anew after every job and keeps the jobs of earlier calls, but none of another program or other sources. The exit
code is 0 when every job of this call passed.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
FORMAT = "crucible-evidence/1"
PROFILES = ("f32", "int8", "q8")
SUITES = ("paged", "batch", "prefill", "pressure", "sampling", "invariance")
GPU_SUITES = ("graph", "prefill-graph")
SPEED = "isolated-1,isolated-941,short-4,short-16,mixed-8,long-8x512"
POLICY = "isolated-941,short-16,mixed-8,long-8x512,stall-941,hol-4"
BUDGETS, CAPS = "1024,256,512,2048", "off,256,128,64"
MEMCHECK_PARTS = 12
# A server has this long to become ready, its kernels compiled.
READY_S = 180
# A job that is past its limit has this long to write down what it has.
GRACE_S = 5
# Phases of a soak that are there for their checks.
SHORT = ["--calibrate-s", "5", "--stable-s", "10", "--overload-s", "5"]


class Job:
    """One command, its limit in seconds, and whether others may run beside it. `serve` is a server that runs meanwhile."""

    def __init__(self, name, command, limit, beside=False, serve=None, report=None):
        self.name, self.limit, self.beside, self.serve, self.report = name, limit, beside, serve, report
        self.command = [str(c) for c in command]


def found(args):
    """Where the kernel compiler and compiled kernels lie, as arguments."""
    return [w for name in ("libraries", "cache") if getattr(args, name) for w in (f"--{name}", getattr(args, name))]


def settings(args, *more):
    """Overrides of a server's configuration."""
    own = [f"executor.backend={args.backend}", *args.set, *more]
    if args.libraries:
        own.append(f"executor.libraries={json.dumps(str(pathlib.Path(args.libraries).resolve()))}")
    return [w for setting in own for w in ("--set", setting)]


def checks(args, _):
    gpu = args.backend == "cuda"
    common = ["--backend", args.backend, *found(args), *(["--quick"] if args.quick else [])]
    check = lambda name, *words, limit=300: Job(name, [args.binary, "check", *words, *common], limit, beside=True)
    # The longest come first.
    parts = 1 if args.quick else 4
    for profile in PROFILES:
        for i in range(1, parts + 1):
            name = f"packed {profile}" + (f" {i}/{parts}" if parts > 1 else "")
            yield check(name, "packed", "--profile", profile, "--part", f"{i}/{parts}", limit=500)
    if gpu:
        yield check("kernels", "kernels", "--seed", "1", "--shapes", "200")
        for profile in PROFILES:
            yield check(f"model {profile}", "model", "--profile", profile)
    for suite in SUITES + (GPU_SUITES if gpu else ()):
        for profile in PROFILES:
            yield check(f"{suite} {profile}", suite, "--profile", profile)
    # It breaks the device that it runs on, so it runs when the others have ended.
    failure = check("failure", "failure", limit=120)
    failure.beside = False
    yield failure


def speed(args, folder):
    trials = ["--warmups", "1", "--trials", "1"] if args.quick else ["--warmups", "3", "--trials", "3"]
    for profile in ("q8", "int8"):
        port = free_port()
        serve = [args.binary, "serve", "--config", args.config, *settings(args, f"model.profile={profile}", f"server.port={port}")]
        report = folder / f"speed-{profile}.json"
        run = [args.binary, "load", "run", "--workload", args.workloads or SPEED, "--target", f"http://127.0.0.1:{port}", *trials]
        run += ["--token-range", args.token_range, "--out", report, "--html", report.with_suffix(".html")]
        yield Job(f"HTTP {profile}", run, 300, serve=[str(s) for s in serve], report=report)


def steps(args, _):
    for profile in ("q8", "int8"):
        for what in ("step", "profile") if args.backend == "cuda" else ("step",):
            command = [args.binary, "bench", what, "--profile", profile, "--backend", args.backend, *found(args)]
            if args.quick:
                command += ["--model", "small"]
            yield Job(f"bench {what} {profile}", command, 120)


def policy(args, folder):
    report = folder / "policy.json"
    sweep = [args.binary, "load", "sweep", "--config", args.config, *settings(args)]
    sweep += ["--workload", args.workloads or POLICY, "--budgets", BUDGETS, "--caps", "off,64" if args.quick else CAPS]
    sweep += ["--pairs", "1", "--trials", "1", "--warmups", "0"] if args.quick else ["--pairs", "2", "--trials", "3", "--warmups", "2"]
    sweep += ["--token-range", args.token_range, "--logs", folder / "logs"]
    yield Job("sweep", [*sweep, "--out", report, "--html", report.with_suffix(".html")], 590, report=report)


def file_name(job):
    return re.sub(r"[^\w.]+", "-", job.replace("/", "-of-"))


def soaking(args, folder, name, words, limit):
    report = folder / f"{file_name(name)}.json"
    command = [args.binary, "load", "soak", "--config", args.config, *settings(args), *words]
    command += ["--token-range", args.token_range, "--logs", folder / "logs"]
    if args.quick:
        command += ["--cancelled", "100", "--output-tokens", "12", "--prompt-tokens", "8,24"]
    # Text of more words would not fit the 1,024 positions of the seed's geometry, whose tokens are bytes.
    else:
        command += ["--prompt-tokens", "16,64,128"]
    return Job(name, [*command, "--out", report, "--html", report.with_suffix(".html")], limit, report=report)


def soak(args, folder):
    run, around = args.soak_run, [*SHORT, *([] if args.quick else ["--cancelled", "1000"])]
    name = " ".join(["soak", str(run), *args.set])
    yield soaking(args, folder, name, ["--seed", run, "--mixed-s", args.soak_s, *around], args.soak_s + 115)


def phases(args, folder):
    """What lies around the mix of a soak, in full: 60 s stable, 30 s overloaded, 10,000 cancelled; the mix is short."""
    around = SHORT if args.quick else []
    yield soaking(args, folder, " ".join(["phases", *args.set]), ["--mixed-s", min(60, args.soak_s), *around], 300)


def memcheck(args, _):
    for part in range(1, MEMCHECK_PARTS + 1):
        command = [sys.executable, ROOT / "tests" / "sanitizer.py", args.binary, "--tool", "memcheck", "--parts", part, "--seconds", 550]
        yield Job(f"memcheck {part}/{MEMCHECK_PARTS}", [*command, *found(args)], 560, beside=True)


def mutants(args, _):
    command = [sys.executable, ROOT / "tests" / "mutations" / "kernels" / "run.py", args.binary, "--jobs", args.jobs, *found(args)]
    yield Job("broken kernels", command, 590)


STAGES = {"checks": checks, "speed": speed, "steps": steps, "policy": policy, "soak": soak, "phases": phases, "memcheck": memcheck, "mutants": mutants}
NEEDS_GPU = ("memcheck", "mutants")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sources_sha256():
    """The hash of kernels/ and src/backend/cuda that docs/evidence.json carries (tests/evidence.rs)."""
    everything = hashlib.sha256()
    for folder in ("kernels", "src/backend/cuda"):
        for path in sorted(p for p in (ROOT / folder).rglob("*") if p.is_file()):
            everything.update(f"{path.relative_to(ROOT).as_posix()}\0{sha256(path)}\n".encode())
    return everything.hexdigest()


def said(*command):
    """What a command prints; None when it cannot be had."""
    try:
        result = subprocess.run([str(c) for c in command], cwd=ROOT, text=True, capture_output=True, timeout=60)
        return result.stdout.strip() if result.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired):
        return None


class Clocks:
    """Reads clocks, power and temperature every second while a stage runs: GPUs by nvidia-smi, the cores' clock from the kernel."""

    QUERY = "index,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu"
    NAMES = ("index", "sm_mhz", "memory_mhz", "power_w", "celsius", "utilisation_percent")

    def __init__(self, program):
        self.samples, self.done, self.start = [], threading.Event(), time.monotonic()
        self.program = shutil.which(program)
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def gpus(self):
        lines = said(self.program, f"--query-gpu={self.QUERY}", "--format=csv,noheader,nounits") if self.program else None
        rows = [line.split(",") for line in (lines or "").splitlines()]
        return [dict(zip(self.NAMES, map(number, row))) for row in rows if len(row) == len(self.NAMES)]

    def watch(self):
        while True:
            self.samples.append({"t_s": round(time.monotonic() - self.start, 1), "cpu_mhz": cpu_mhz(), "gpus": self.gpus()})
            if self.done.wait(1.0):
                return

    def medians(self, since=0.0):
        """Medians of the first GPU and of the cores from a moment on; null where nothing is known."""
        samples = [s for s in list(self.samples) if s["t_s"] >= since]
        first = [s["gpus"][0] for s in samples if s["gpus"]]
        median = lambda values: statistics.median(values) if values else None
        of = lambda rows, name: median([row[name] for row in rows if row.get(name) is not None])
        return {"samples": len(samples), "cpu_mhz": of(samples, "cpu_mhz"), **{name: of(first, name) for name in self.NAMES[1:]}}

    def seconds(self):
        return time.monotonic() - self.start

    def end(self):
        self.done.set()
        self.thread.join()
        return {"medians": self.medians(), "samples": self.samples}


def number(text):
    """A figure, or None for [N/A] and the like."""
    try:
        return float(text)
    except ValueError:
        return None


def cpu_mhz():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    clocks = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    return sum(clocks) / len(clocks) if clocks else None


def start(command, log):
    """A process in a session of its own, so that it ends with everything that it started."""
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def stop(process, sign=signal.SIGKILL):
    try:
        os.killpg(process.pid, sign)
    except ProcessLookupError:
        pass


def ready(url, server, deadline):
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2) as answer:
                if answer.status == 200:
                    return True
        except OSError:
            time.sleep(0.2)
    return False


def with_server(job, log, deadline, server_log):
    """Runs a job beside its server; the exit code of the job, None past its limit, and what went wrong with the server."""
    with server_log.open("w") as output:
        server = start(job.serve, output)
    try:
        url = job.command[job.command.index("--target") + 1]
        if not ready(url, server, min(deadline, time.monotonic() + READY_S)):
            return None, "the server did not become ready"
        code = wait(start(job.command, log), deadline)
        stop(server, signal.SIGTERM)
        ended = wait(server, time.monotonic() + 60)
        return code, None if ended == 0 else f"the server ended with {ended}"
    finally:
        stop(server)


def wait(process, deadline):
    try:
        return process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        stop(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
        return None
    finally:
        stop(process)


def perform(job, folder, call_ends):
    """Runs one job and gives its record."""
    log_path = folder / f"{file_name(job.name)}.log"
    record = {"job": job.name, "command": shlex.join(job.command), "limit_s": job.limit, "log": log_path.name}
    if job.serve:
        record["server"] = shlex.join(job.serve)
    began = time.monotonic()
    deadline = min(began + job.limit, call_ends)
    if deadline - began < 1:
        return {**record, "verdict": "not run", "seconds": None, "exit": None, "lines": ["the time of this call was used up"]}
    with log_path.open("w") as log:
        try:
            if job.serve:
                code, trouble = with_server(job, log, deadline, log_path.with_suffix(".server.log"))
            else:
                code, trouble = wait(start(job.command, log), deadline), None
        except OSError as error:
            code, trouble = None, f"cannot start: {error}"
    cut = code is None and trouble is None
    verdict = "timed out" if cut else "passed" if code == 0 and trouble is None else "failed"
    lines = [line.rstrip() for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("FAIL", "error", "Error"))][:5] + lines[-3:]
    record |= {"verdict": verdict, "seconds": round(time.monotonic() - began, 1), "exit": code}
    record["lines"] = ([trouble] if trouble else []) + [line[:300] for line in dict.fromkeys(telling)]
    if job.report and job.report.exists():
        record["figures"] = figures(json.loads(job.report.read_text()))
    else:
        record["figures"] = counts(lines)
    return record


def counts(lines):
    """The sums of a check's own counts."""
    # `check kernels` ends with the sum of its own lines.
    lines = [line for line in lines if not line.startswith("kernels: ")]
    found = [re.search(r"(\d+) cases, (\d+) values, \d+ passed, (\d+) failed", line) for line in lines]
    found = [[int(n) for n in match.groups()] for match in found if match]
    return dict(zip(("cases", "values", "failed"), map(sum, zip(*found)))) if found else None


def figures(report):
    """What a report of the load generator says, short; the report itself lies beside the log."""
    kind = report.get("format", "").rsplit("/", 1)[0]
    medians = lambda s: {name: s[name]["median"] if s.get(name) else None for name in ("ttft_p50_ms", "gap_p50_ms", "output_tok_per_s")}
    if kind == "crucible-load-report":
        rows = {w["workload"]["name"]: medians(w["summary"]) for w in report["workloads"]}
        return {"workloads": rows, "loaded": report["observed"]["loaded"]}
    if kind == "crucible-load-comparison":
        changes = [{k: c[k] for k in ("workload", "figure", "variant", "percent")} for c in report["changes"]]
        doubtful = sum(1 for p in report["loaded"] if p["clocks_differ"])
        return {"control": report["variants"][0]["name"], "changes": changes, "pairs_with_other_clocks": doubtful}
    if kind == "crucible-soak":
        return {"capacity_per_s": report["capacity_per_s"], "checks": report["checks"], "loaded": report["observed"]["loaded"]}
    return None


def run_stage(name, args, write, call_ends):
    folder = args.out / name
    folder.mkdir(parents=True, exist_ok=True)
    jobs = list(STAGES[name](args, folder))
    if args.only:
        jobs = [job for job in jobs if args.only in job.name]
    if args.seconds:
        for job in jobs:
            job.limit = min(job.limit, args.seconds)
    stage = {"stage": name, "began": now(), "device_before": said(args.binary, "inspect", "--device"), "jobs": []}
    records, lock, clocks = {}, threading.Lock(), Clocks(args.nvidia_smi)

    def one(job):
        began = clocks.seconds()
        record = {**perform(job, folder, call_ends), "clocks": clocks.medians(began)}
        with lock:
            records[job.name] = record
            stage["jobs"] = [records[j.name] for j in jobs if j.name in records]
            write(stage)
            seconds = "-" if record["seconds"] is None else f"{record['seconds']:.0f} s"
            print(f"{record['verdict']:9} {seconds:>6}  {name}: {job.name}: {(record['lines'] or [''])[-1][:90]}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(max_workers=args.jobs) as pool:
        list(pool.map(one, [job for job in jobs if job.beside]))
    for job in jobs:
        if not job.beside:
            one(job)
    stage |= {"clocks": clocks.end(), "device_after": said(args.binary, "inspect", "--device"), "ended": now()}
    write(stage)
    return stage


def now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def opened(args):
    """The file of earlier calls with the same program and sources, or a new one."""
    same = {"format": FORMAT, "backend": args.backend, "binary_sha256": sha256(args.binary), "sources_sha256": sources_sha256()}
    path = args.out / "evidence.json"
    if path.exists():
        before = json.loads(path.read_text())
        if all(before.get(key) == value for key, value in same.items()):
            return before
        print("the earlier evidence in this folder is another program's and is dropped")
    return {**same, "commit": said("git", "rev-parse", "HEAD"), "host_cores": os.cpu_count(), "stages": []}


def table(stages):
    rows = [("stage", "passed", "failed", "timed out", "not run", "SM MHz", "W")]
    for stage in stages:
        count = lambda verdict: str(sum(job["verdict"] == verdict for job in stage["jobs"]))
        medians = stage.get("clocks", {}).get("medians", {})
        clock = lambda key: "-" if medians.get(key) is None else f"{medians[key]:.0f}"
        rows.append((stage["stage"], *map(count, ("passed", "failed", "timed out", "not run")), clock("sm_mhz"), clock("power_w")))
    for row in rows:
        print(f"{row[0]:10}" + "".join(f"{cell:>11}" for cell in row[1:]))
    for stage in stages:
        for job in stage["jobs"]:
            for workload, f in ((job.get("figures") or {}).get("workloads") or {}).items():
                shown = " / ".join("-" if v is None else f"{v:,.2f}" for v in f.values())
                print(f"{job['job']:10} {workload:14} {shown}   TTFT p50 ms / gap p50 ms / tok/s")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", nargs="?", type=pathlib.Path, default=ROOT / "target" / "release" / "crucible")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target" / "evidence")
    parser.add_argument("--stages", default="checks,speed", help=f"of {', '.join(STAGES)}, in the order given")
    parser.add_argument("--list", action="store_true", help="every stage with its jobs and time limits")
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--libraries", help="folder of the kernel compiler")
    parser.add_argument("--cache", help="folder of compiled kernels")
    parser.add_argument("--config", default="config/seed-120m.toml", help="of the servers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides a key of the servers")
    parser.add_argument("--token-range", default="300..30000")
    parser.add_argument("--workloads", help="of speed and policy, instead of the usual ones")
    parser.add_argument("--soak-s", type=int, default=480, help="seconds of the soak's mix")
    parser.add_argument("--soak-run", type=int, default=1, help="which soak this is, and its seed")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="that run side by side")
    parser.add_argument("--only", default="", help="jobs whose name holds this word")
    parser.add_argument("--seconds", type=float, help="no job gets longer")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds of the whole call")
    parser.add_argument("--quick", action="store_true", help="a part of everything, to try the program itself")
    parser.add_argument("--nvidia-smi", default="nvidia-smi")
    args = parser.parse_args()
    args.stages = [s.strip() for s in args.stages.split(",") if s.strip()]
    unknown = [s for s in args.stages if s not in STAGES]
    if unknown:
        parser.error(f"no stage {', '.join(unknown)}; they are {', '.join(STAGES)}")
    args.binary, args.out = args.binary.resolve(), args.out.resolve()
    return args


def main():
    args = arguments()
    if args.list:
        for name, stage in STAGES.items():
            for job in stage(args, args.out / name):
                beside = ", side by side" if job.beside else ""
                print(f"{name}: {job.name}: at most {job.limit:.0f} s{beside}: {shlex.join(job.command)}")
        return
    if not args.binary.is_file():
        sys.exit(f"{args.binary} is missing; run `cargo build --release` or name the program")
    args.out.mkdir(parents=True, exist_ok=True)
    call_ends = time.monotonic() + args.within
    evidence = opened(args)
    earlier = {stage["stage"]: stage["jobs"] for stage in evidence["stages"]}

    def write(stage):
        others = [s for s in evidence["stages"] if s["stage"] != stage["stage"]]
        mine = {job["job"] for job in stage["jobs"]}
        kept = [job for job in earlier.get(stage["stage"], []) if job["job"] not in mine]
        evidence["stages"] = [*others, {**stage, "jobs": kept + stage["jobs"]}]
        part = args.out / "evidence.json.part"
        part.write_text(json.dumps(evidence, indent=1) + "\n")
        part.rename(args.out / "evidence.json")

    done = []
    for name in args.stages:
        if name in NEEDS_GPU and args.backend != "cuda":
            print(f"{name} needs a GPU and is left out")
            continue
        done.append(run_stage(name, args, write, call_ends))
    table(done)
    sys.exit(any(job["verdict"] != "passed" for stage in done for job in stage["jobs"]))


if __name__ == "__main__":
    main()
