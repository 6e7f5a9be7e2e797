"""The GPU's attention kernels on a GPU, against float64 attention over gathered keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.attention_cases import TOLERANCE, UNTOUCHED, Case, attend, build, large, worst_errors

if TYPE_CHECKING:
    from gpu_runtime.kernels.gpu.attention_decode import Release

pytestmark = pytest.mark.gpu
CASES = [*large(torch.bfloat16), *large(torch.float32)]
FUSED = [(replace(case, chunks=()), False) for case in CASES if case.dtype == torch.bfloat16 or case.head_dim < 256]
FUSED += [(case, True) for case, _ in FUSED if case.group in (1, 4)]
SMALL = Case("small", 128, 4, 8, (100, 900, 1999), ((200, 333),), 256, dtype=torch.bfloat16)


def label(case: Case) -> str:
    return f"{case.name}, {str(case.dtype).removeprefix('torch.')}"


@pytest.fixture(autouse=True)
def _needs_device() -> None:
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


@pytest.mark.parametrize("case", CASES, ids=label)
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


@pytest.mark.parametrize(
    ("case", "normed"), FUSED, ids=lambda value: label(value) if isinstance(value, Case) else str(value)
)
def test_fused_attention(case: Case, normed: bool) -> None:
    """Right, equal to the two kernels but for the order of sums, and the cache holds what `rope_store` writes.

    In bfloat16 bit by bit, but for norms, whose sums have another order; not in float32, where it shows (on an H200)
    which product of a rotation was fused with its sum.
    """
    from tests.fused_attention_cases import fused_errors

    found = fused_errors(case, "cuda", normed, repeats=5)
    assert found["decode"] < TOLERANCE[case.dtype]
    assert found["apart"] < TOLERANCE[case.dtype]
    same_bits = case.dtype == torch.bfloat16 and not normed
    assert found["stored"] == 0.0 if same_bits else found["stored"] < TOLERANCE[case.dtype]
    assert found["padding"] == 0.0
    assert found["elsewhere"] == 0.0


@pytest.mark.parametrize("release", ["late", "start"])
def test_fused_behind_a_kernel_that_lets_it_start(release: Release) -> None:
    """Each layer's row of queries, keys and values is still to be written when attention starts; bit by bit what it
    gives when it starts afterwards."""
    from gpu_runtime.kernels.gpu.attention_decode import DecodeScratch, fused_decode_attention
    from gpu_runtime.kernels.gpu.norm import rms_norm
    from tests.fused_attention_cases import build_raw

    case = Case("small", 128, 4, 8, (100, 900, 1999, 65, 1), (), 256, dtype=torch.bfloat16)
    raw, layers = build_raw(case, "cuda"), 20
    works = len(raw.step.plan.works)
    scratch = DecodeScratch.allocate(works, case.shape, torch.device("cuda"))
    sources = [torch.randn_like(raw.step.fused) for _ in range(layers)]
    weight = torch.ones_like(sources[0][0])
    rooms = [(raw.copy(), torch.zeros_like(raw.step.queries.contiguous())) for _ in range(layers)]

    def run(programmatic: bool) -> list[torch.Tensor]:
        for source, (own, out) in zip(sources, rooms, strict=True):
            fused = rms_norm(source, weight, 1e-5, programmatic)
            tensors = fused, *own.cache, own.step.plan
            tables = raw.tables, raw.norms
            how = None, programmatic, release
            fused_decode_attention(*tensors, works, case.shape, scratch, out, *tables, *how)
        return [tensor.clone() for own, out in rooms for tensor in (out, *own.cache)]

    wanted = run(False)
    for _, out in rooms:
        out.zero_()
    run(True)  # what is built at the first call is not captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(True)
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(got, wanted, strict=True))
