"""Compiles device code for one host thread that plays a block's threads (`fibers.h`)."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build_emulated(source: str, folder: Path) -> Path:
    """A shared library of a source beside this file."""
    target = folder / Path(source).with_suffix(".so")
    includes = [f"-I{ROOT / part}" for part in ("tests/emulation", "proto", "gpu_runtime")]
    flags = [
        "-std=c++20",
        "-O1",
        "-ffp-contract=off",
        "-fPIC",
        "-fvisibility=hidden",
        "-shared",
        "-Wno-unknown-pragmas",
    ]
    subprocess.run(
        ["g++", *flags, *includes, str(ROOT / "tests" / "emulation" / source), "-o", str(target)], check=True
    )
    return target
