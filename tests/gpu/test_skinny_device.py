"""The products for few tokens on a GPU, against float64; what torch.empty gives is filled with NaN before each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("the kernels are for Hopper", allow_module_level=True)

from gpu_runtime.kernels.gpu.skinny import SkinnyKernels, Weighted, reference_gated, reference_project

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 3e-3, torch.float32: 1e-5}
"""‖out − expected‖ / ‖expected‖; the reference rounds inputs · norm to bf16 as the kernels do."""
UNROUNDED_TOLERANCE = 5e-3
TOKENS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 48, 64)
# Columns and units of Llama 8B and 1B, SmolLM2, Qwen2 0.5B, and ragged ones.
SHAPES = (
    (4096, 6144),
    (4096, 4096),
    (2048, 3072),
    (8192, 2048),
    (576, 960),
    (1536, 576),
    (896, 1152),
    (4864, 896),
    (1088, 777),
    (320, 131),
    (64, 1),
)


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def weighted(columns: int) -> Weighted:
    return Weighted(1 + normal(columns, scale=0.3), 1e-5)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_project(shape: tuple[int, int]) -> None:
    columns, units = shape
    weight, bias, norm = normal(units, columns, scale=columns**-0.5), normal(units), weighted(columns)
    for tokens in TOKENS:
        inputs = normal(tokens, columns, scale=3.0)
        with poisoned():
            plain, biased = (SkinnyKernels().project(inputs, norm, weight, each) for each in (None, bias))
        assert error(plain, reference_project(inputs, weight, None, norm)) < TOLERANCE[plain.dtype], tokens
        assert error(biased, reference_project(inputs, weight, bias, norm)) < TOLERANCE[plain.dtype], tokens
        wide = inputs.double()
        normed = norm.weight.double() * wide * (wide.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt()
        assert error(plain, normed @ weight.double().T) < UNROUNDED_TOLERANCE, tokens


@pytest.mark.parametrize("shape", [(2048, 128256), (576, 49152), (1088, 777)], ids=str)
def test_project_rows_to_float(shape: tuple[int, int]) -> None:
    columns, units = shape
    weight, norm = normal(units, columns, scale=columns**-0.5), weighted(columns)
    for tokens in (1, 5, 16, 40, 64):
        inputs = normal(2 * tokens, columns)
        rows = torch.zeros(tokens, 4, dtype=torch.int32, device="cuda")
        rows[:, 0] = torch.randperm(2 * tokens, device="cuda")[:tokens]
        rows[0, 0] = -7  # goes to the nearest
        with poisoned():
            out = SkinnyKernels().project(inputs, norm, weight, rows=rows[:, 0], dtype=torch.float32)
        expected = reference_project(inputs[rows[:, 0].clamp(0).long()], weight, None, norm)
        assert error(out, expected) < TOLERANCE[torch.float32], tokens


@pytest.mark.parametrize("shape", [*SHAPES, (14336, 4096)], ids=str)
def test_project_onto(shape: tuple[int, int]) -> None:
    columns, units = shape
    weight, bias = normal(units, columns, scale=columns**-0.5), normal(units)
    for tokens in TOKENS:
        inputs, residual = normal(tokens, columns), normal(tokens, units)
        for each in (None, bias):
            out = residual.clone()
            SkinnyKernels().project_onto(out, inputs, weight, each)
            expected = residual.double() + reference_project(inputs, weight, each, None)
            assert error(out, expected) < TOLERANCE[out.dtype], tokens


@pytest.mark.parametrize("shape", [(4096, 14336), (2048, 8192), (576, 1536), (1088, 333), (64, 1)], ids=str)
def test_project_gated(shape: tuple[int, int]) -> None:
    columns, units = shape
    weight, bias, norm = normal(2 * units, columns, scale=columns**-0.5), normal(2 * units), weighted(columns)
    for tokens in (1, 3, 8, 13, 16, 30, 64):
        inputs = normal(tokens, columns)
        for each in (None, bias):
            with poisoned():
                out = SkinnyKernels().project_gated(inputs, norm, weight, each)
            assert error(out, reference_gated(inputs, weight, each, norm)) < TOLERANCE[out.dtype], tokens


def test_a_token_does_not_depend_on_its_company() -> None:
    """The same bits in every kernel, wherever the rows of the matrix lie."""
    inputs, norm = normal(64, 2048), weighted(2048)
    weight = normal(3000, 2048, scale=2048**-0.5)
    whole = SkinnyKernels().project(inputs, norm, weight)
    for tokens in TOKENS:
        assert torch.equal(SkinnyKernels().project(inputs[:tokens], norm, weight), whole[:tokens])
        assert torch.equal(SkinnyKernels().project(inputs[:tokens], norm, weight[:500]), whole[:tokens, :500])


def layers(tokens: int) -> Callable[[SkinnyKernels], torch.Tensor]:
    """Something like a model of 6 layers without attention, from fixed inputs."""
    norm = weighted(1024)
    matrices = [
        [normal(rows, columns, scale=columns**-0.5) for rows, columns in ((1536, 1024), (1024, 1536))]
        + [normal(rows, columns, scale=columns**-0.5) for rows, columns in ((6144, 1024), (1024, 3072))]
        for _ in range(6)
    ]
    start = normal(tokens, 1024)

    def run(kernels: SkinnyKernels) -> torch.Tensor:
        hidden = start.clone()
        for qkv, output, gate_up, down in matrices:
            kernels.project_onto(hidden, kernels.project(hidden, norm, qkv), output)
            kernels.project_onto(hidden, kernels.project_gated(hidden, norm, gate_up), down)
        return kernels.project(hidden, norm, matrices[0][0], dtype=torch.float32)

    return run


@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("early", [0, 2, 1 << 20])
def test_overlapping_kernels_agree_with_separate_ones(tokens: int, early: int) -> None:
    """Captured, with kernels that start before the one in front has ended, many times: always the same bits."""
    run = layers(tokens)
    expected = run(SkinnyKernels(programmatic=False))
    overlapping = SkinnyKernels(early=early)
    run(overlapping)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(overlapping)
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_refuses_what_it_cannot_take() -> None:
    kernels, norm = SkinnyKernels(), weighted(64)
    with pytest.raises(ValueError, match="matrix"):
        kernels.project(normal(2, 64), norm, normal(10, 32))
    with pytest.raises(ValueError, match="inputs"):
        kernels.project(normal(2, 128)[:, :64], norm, normal(10, 64))
    with pytest.raises(ValueError, match="no kernel"):
        kernels.project(normal(65, 64), norm, normal(10, 64))
