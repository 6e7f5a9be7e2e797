"""The GPU's attention kernels on a GPU, against float64 attention over gathered keys."""

from __future__ import annotations

import pytest
import torch

from tests.attention_cases import TOLERANCE, UNTOUCHED, Case, attend, build, large, worst_errors

pytestmark = pytest.mark.gpu
CASES = [*large(torch.bfloat16), *large(torch.float32)]
SMALL = Case("small", 128, 4, 8, (100, 900, 1999), ((200, 333),), 256, dtype=torch.bfloat16)


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


def test_same_bits_every_time() -> None:
    """Whichever tile arrives last adds them in the same order."""
    step = build(SMALL, "cuda")
    first = attend(step, repeats=1)
    assert all(torch.equal(first, attend(step, repeats=1)) for _ in range(50))


@pytest.mark.parametrize("programmatic", [False, True])
def test_captured(programmatic: bool) -> None:
    """A captured graph follows the plan that is in memory when it is replayed."""
    step = build(SMALL, "cuda")
    attend(step, programmatic=programmatic)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(step, repeats=1, check=False, programmatic=programmatic)
    graph.replay()
    found = worst_errors(step, out)
    assert found["decode"] < TOLERANCE[torch.bfloat16]
    assert found["chunk"] < TOLERANCE[torch.bfloat16]
    step.plan.header.zero_()  # no tiles at all
    graph.replay()
    assert bool((out == UNTOUCHED).all())
