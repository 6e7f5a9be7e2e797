"""The GPU's attention kernels in Triton's interpreter, against float64 attention over gathered keys."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.attention_cases import SMALL, TOLERANCE, Case

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, dict[str, float]]]:
    """Errors of all cases by their names, of every way to run them."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    paths = [str(ROOT / "proto"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "tests.attention_cases"]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr[-4000:]
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_attention(reports: dict[str, dict[str, dict[str, float]]], case: Case) -> None:
    """Each head of each token is right, and rows of no work stay as they were."""
    found = reports[case.name]["errors"]
    assert found["decode"] < TOLERANCE[torch.float32]
    assert found["chunk"] < TOLERANCE[torch.float32]
    assert found["padding"] == 0.0


@pytest.mark.parametrize("way", ["fused", "fused, normed"])
@pytest.mark.parametrize("case", [case for case in SMALL if not case.chunks], ids=lambda case: case.name)
def test_fused_attention(reports: dict[str, dict[str, dict[str, float]]], case: Case, way: str) -> None:
    """Right, equal to the two kernels but for the order of sums, and the cache holds what `rope_store` writes: bit by
    bit without norms, whose sums have another order."""
    found = reports[case.name][way]
    assert found["decode"] < TOLERANCE[torch.float32]
    assert found["apart"] < 1e-6
    assert found["stored"] == 0.0 if way == "fused" else found["stored"] < 1e-6
    assert found["padding"] == 0.0
    assert found["elsewhere"] == 0.0
