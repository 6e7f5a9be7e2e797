"""The scheduler under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INCLUDES = ["-I", str(ROOT / "proto"), "-I", str(ROOT / "gpu_runtime")]


def build(source: str, sanitizer: str, target: Path) -> Path:
    """Compiles a driver and the scheduler with a sanitizer; skips where the compiler lacks it."""
    probe = target.with_name("probe.cpp")
    probe.write_text("int main() { return 0; }\n")
    flags = ["g++", "-std=c++20", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    tried = subprocess.run([*flags, str(probe), "-o", str(target)], capture_output=True, text=True)
    if tried.returncode or subprocess.run([str(target)]).returncode:
        pytest.skip(f"this machine's compiler cannot build or run with -fsanitize={sanitizer}")
    sources = [str(ROOT / "tests" / "fuzz" / source), str(ROOT / "gpu_runtime" / "scheduler" / "host.cpp")]
    subprocess.run([*flags, *INCLUDES, *sources, "-o", str(target)], check=True)
    return target


def test_random_bytes_in_the_inbound_region(tmp_path: Path) -> None:
    program = build("scheduler_fuzz.cpp", "address,undefined", tmp_path / "fuzz")
    ran = subprocess.run([str(program), "1", "1500"], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout == "1500 inputs\n"


def test_front_end_and_scheduler_do_not_race(tmp_path: Path) -> None:
    program = build("scheduler_race.cpp", "thread", tmp_path / "race")
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout == "600 sequences\n"
