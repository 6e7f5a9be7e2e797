"""Builds the scheduler for this machine's GPU: `python -m tests.gpu.build TARGET.so`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build_scheduler(target: Path) -> Path:
    """Compiles `device.cu` into a shared library."""
    source = ROOT / "gpu_runtime" / "scheduler" / "device.cu"
    flags = ["-std=c++20", "-O3", "-arch=native", "--extended-lambda", "-lineinfo", "-shared"]
    flags += ["-Xcompiler", "-fPIC,-fvisibility=hidden", f"-I{ROOT / 'proto'}", f"-I{ROOT / 'gpu_runtime'}"]
    subprocess.run(["nvcc", *flags, str(source), "-o", str(target)], check=True)
    return target


if __name__ == "__main__":
    build_scheduler(Path(sys.argv[1]))
