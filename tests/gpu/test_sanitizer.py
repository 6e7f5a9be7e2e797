"""compute-sanitizer: memcheck over some steps of a small model, racecheck over the scheduler.

Racecheck of a process that runs a model ends, whatever kernels it is told to look at, in "Internal Sanitizer Error: The
Sanitizer failed to handle a hardware exception" (compute-sanitizer of CUDA 13.0, H200, driver 580.159; bfloat16, with
and without programmatic launches and the few-token kernels). So it sees the scheduler's step alone, in a process
without torch; races of the sampler and the relay are looked for on emulated threads (`tests/emulation`).
"""

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


def sanitize(tool: str, *arguments: str) -> str:
    """Output of the tool over `python ARGUMENTS`; fails when it found something, skips when it takes too long."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no"]
    command += [sys.executable, *arguments]
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
    said = sanitize("memcheck", "-m", "tests.gpu.bounded_steps", str(small_model), "--dtype", dtype, "--steps", "24")
    assert "ERROR SUMMARY: 0 errors" in said
    assert "all sequences ended as they should" in said


def test_racecheck(device_scheduler: Path) -> None:
    """No hazard in shared memory in the scheduler's step, over random histories."""
    said = sanitize("racecheck", "-m", "tests.gpu.device_histories", str(device_scheduler), "8")
    assert "RACECHECK SUMMARY: 0 hazards" in said
    assert "8 histories agree with the twin" in said
