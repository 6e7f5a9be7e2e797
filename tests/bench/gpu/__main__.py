"""All measurements on a GPU, with one table at the end: `python -m tests.bench.gpu`, or `make bench-gpu`.

Each part and model has a process of its own, so that a failure leaves the rest alone; what is missing on this machine
is a row with its reason.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.bench.gpu.rows import Row, from_line, report, table

MODELS = ("Llama-3.1-8B", "Llama-3.2-1B", "SmolLM2-135M")
PARTS = ("steps", "prefill", "http", "attention", "skinny", "layers", "sampling")
KERNELS = {
    "attention": ("tests.bench.gpu_attention", "--default"),
    "skinny": ("tests.bench.gpu_skinny",),
    "layers": ("tests.bench.gpu_layers",),
    "sampling": ("tests.bench.gpu_sampling",),
}
"""Measurements of kernels, which print tables of their own: module and options."""
DEFAULT = ("steps", "prefill", "http")
NEEDED = {
    "steps": ("torch", "tokenizers", "dpu_service.transport.native", "gpu_runtime.scheduler.host"),
    "http": ("httptools", "cryptography", "gpu_runtime.main", "dpu_service.worker", "blink_deploy.main"),
}
MOST_SECONDS = {"steps": 150.0, "http": 170.0, "kernels": 90.0}
PACKAGES = ("torch", "triton", "numpy", "httptools", "h2", "grpcio")


@dataclass(frozen=True)
class Job:
    """A process that prints rows (or, for kernels, a table of its own)."""

    part: str
    model: str
    command: list[str]
    seconds: float
    prints_rows: bool = True


def jobs(parts: Sequence[str], models: Sequence[str], device: str) -> list[Job]:
    """In order: steps first, since everything else rests on them."""
    made = []
    steps = [part for part in ("steps", "prefill") if part in parts]
    for model in models if steps else ():
        options = ["--model", model, "--device", device, "--only", ",".join(steps)]
        made.append(Job("steps", model, ["tests.bench.gpu.steps", *options], MOST_SECONDS["steps"]))
    for model in models if "http" in parts else ():
        command = ["tests.bench.gpu.http", "--model", model, "--device", device]
        made.append(Job("http", model, command, MOST_SECONDS["http"]))
    made += [Job(p, "", list(KERNELS[p]), MOST_SECONDS["kernels"], False) for p in parts if p in KERNELS]
    return made


def gpu() -> str:
    """Name and driver of the CUDA device; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True)
    return asked.stdout.strip().splitlines()[0] if asked.returncode == 0 and asked.stdout.strip() else ""


def missing(job: Job, device: str) -> str:
    """Why a job cannot run here, or an empty string."""
    if device != "cpu" and not gpu():
        return "there is no CUDA device"
    for name in NEEDED.get(job.part, (job.command[0],) if not job.prints_rows else ()):
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"{name} cannot be imported: {type(error).__name__}: {error}"
    return ""


def run(job: Job, seconds: float) -> list[Row]:
    """Rows of one job, with an error row when it did not end well."""
    print(f"==> {job.part} {job.model}", flush=True)
    began, rows = time.monotonic(), []
    with tempfile.TemporaryFile("w+") as errors:
        output = subprocess.PIPE if job.prints_rows else None
        command = [sys.executable, "-m", *job.command]
        process = subprocess.Popen(command, stdout=output, stderr=errors, text=True, start_new_session=True)
        try:
            said, _ = process.communicate(timeout=seconds)
            problem = f"ended with status {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            said, problem = _kill(process), f"killed after {seconds:.0f} s"
        rows = [from_line(line) for line in (said or "").splitlines() if line.startswith("{")]
        if problem:
            rows.append(Row(job.part, job.model, "", error=f"{problem}: {_last_words(errors)}"))
        elif not job.prints_rows:
            rows.append(Row(job.part, "", "measured: see its table above", time.monotonic() - began, unit="s"))
    return rows


def _kill(process: subprocess.Popen[str]) -> str:
    """The job with everything that it has started: SIGINT first, so that servers are stopped in order."""
    for number, patience in ((signal.SIGINT, 15.0), (signal.SIGKILL, 5.0)):
        os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=patience)[0] or ""
        except subprocess.TimeoutExpired:
            continue
    return ""


def _last_words(errors: Any) -> str:
    errors.seek(0)
    said = errors.read().strip()
    print(said[-3000:], flush=True)
    return said.splitlines()[-1][:160] if said else "no message"


def facts(device: str) -> dict[str, Any]:
    """When, where and with what was measured."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": when, "device": device, "gpu": gpu(), "cores": os.cpu_count(), "versions": versions}


def main(argv: list[str] | None = None) -> int:
    """Status 1 when something failed (not: was skipped)."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__.splitlines()[0])
    split = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--only", type=split, default=list(DEFAULT), help=f"of {','.join(PARTS)}; default: {DEFAULT}")
    parser.add_argument("--model", type=split, default=list(MODELS), help=f"of {','.join(MODELS)}; default: all")
    parser.add_argument("--device", default="cuda", help="cpu measures the soft GPU with a tiny model, as a rehearsal")
    parser.add_argument("--seconds", type=float, default=460.0, help="for everything together")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    if unknown := [*(set(arguments.only) - set(PARTS)), *(set(arguments.model) - set(MODELS))]:
        parser.error(f"unknown: {', '.join(unknown)}")
    deadline, rows, failed = time.monotonic() + arguments.seconds, [], False
    found = facts(arguments.device)
    for job in jobs(arguments.only, arguments.model, arguments.device):
        left = deadline - time.monotonic()
        if reason := missing(job, arguments.device) or ("no time is left" if left < 5 else ""):
            rows.append(Row(job.part, job.model, "", error=f"skipped: {reason}"))
            continue
        rows += run(job, min(job.seconds, left))
        failed |= any(row.error for row in rows[-1:])
        if arguments.json:
            arguments.json.write_text(report(rows, found), encoding="utf-8")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    print(f"\n{found['gpu'] or 'no GPU'}; {versions}; {found['date']}\n\n{table(rows)}", flush=True)
    if arguments.json:
        arguments.json.write_text(report(rows, found), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
