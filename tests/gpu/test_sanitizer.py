"""compute-sanitizer over some steps of a small model: memcheck on everything, racecheck on the kernels in CUDA C++."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(110)]
SECONDS = 90
FOUND = 99
OUR_KERNELS = ("blink_", "skinny_")


def sanitize(tool: str, folder: Path, *options: str, dtype: str, steps: int) -> str:
    """Output of the tool; fails when it found something, skips when it cannot run here or takes too long."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no", *options]
    command += [sys.executable, "-m", "tests.gpu.bounded_steps", str(folder), "--dtype", dtype, "--steps", str(steps)]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor its own memory: no hidden overrun
    began = time.monotonic()
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        pytest.skip(f"compute-sanitizer --tool {tool} did not end within {SECONDS} s")
    said = ran.stdout + ran.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support this device here")
    assert ran.returncode == 0, f"status {ran.returncode} after {time.monotonic() - began:.0f} s:\n{said[-6000:]}"
    return said


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memcheck(device: str, small_model: Path, dtype: str) -> None:
    """No access outside of what belongs to a kernel, in any kernel of the steps."""
    if device == "cpu":
        pytest.skip("there is no CUDA device")
    said = sanitize("memcheck", small_model, dtype=dtype, steps=24)
    assert "ERROR SUMMARY: 0 errors" in said
    assert "all sequences ended as they should" in said


def test_racecheck(device: str, small_model: Path) -> None:
    """No hazard in shared memory in the scheduler, the sampler and the other kernels written in CUDA C++."""
    if device == "cpu":
        pytest.skip("there is no CUDA device")
    chosen = [option for name in OUR_KERNELS for option in ("--kernel-name", f"kernel_substring={name}")]
    said = sanitize("racecheck", small_model, *chosen, dtype="bfloat16", steps=16)
    assert "RACECHECK SUMMARY: 0 hazards" in said
    assert "all sequences ended as they should" in said
