"""The GPU's attention kernels on a GPU, against float64 attention over gathered keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attention_cases import SMALL, TOLERANCE, Case, attend, build, large, worst_errors

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16)
CASES = [case for dtype in DTYPES for case in (*(replace(case, dtype=dtype) for case in SMALL), *large(dtype))]


@pytest.fixture(autouse=True)
def _needs_device() -> None:
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {str(case.dtype).removeprefix('torch.')}")
def test_attention(case: Case) -> None:
    """Each head of each token is right, and rows of no work stay as they were."""
    step = build(case, "cuda")
    found = worst_errors(step, attend(step, repeats=5))
    assert found["decode"] < TOLERANCE[case.dtype]
    assert found["chunk"] < TOLERANCE[case.dtype]
    assert found["padding"] == 0.0


def test_captured_and_replanned() -> None:
    """A captured graph follows the plan that is in memory when it is replayed."""
    full = build(Case("full", 128, 4, 2, (100, 900), ((200, 333),), 256, dtype=torch.bfloat16), "cuda")
    attend(full)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(full, repeats=1, check=False)
    graph.replay()
    assert worst_errors(full, out)["decode"] < 1e-2
    full.plan.header[9:12] = 0  # no tiles at all
    graph.replay()
    assert bool((out == 7.0).all())
