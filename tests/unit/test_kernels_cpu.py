"""The CPU kernels against plain torch, published vectors and probability theory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from gpu_runtime.kernels.attention import (
    RopeTables,
    Shape,
    paged_attention,
    reference_attention,
    reference_rope,
    rope_store,
)
from gpu_runtime.kernels.linear import (
    Linear,
    Norm,
    project,
    project_gated,
    project_onto,
    reference_gated,
    reference_linear,
    reference_rms_norm,
    rms_norm,
)
from gpu_runtime.scheduler import layout

BLOCK = 16


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def random_linear(columns: int, inner: int, biased: bool = False) -> Linear:
    return Linear(torch.randn(columns, inner), torch.randn(columns) if biased else None)


SHAPES = [(1, 576, 1536), (7, 33, 5), (64, 128, 1), (130, 50, 63), (3, 7, 130)]


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_project(rows: int, inner: int, columns: int, biased: bool) -> None:
    """Several matrices of different sizes in one call, with and without a norm before them."""
    inputs, norm = torch.randn(rows, inner), Norm(torch.rand(inner) + 0.5, 1e-5)
    linears = [random_linear(size, inner, biased) for size in (columns, columns + 70, 3)]
    for out, linear in zip(project(inputs, linears), linears, strict=True):
        assert relative(out, reference_linear(inputs, linear)) < 1e-6
    normed = reference_rms_norm(inputs, norm)
    for out, linear in zip(project(inputs, linears, norm), linears, strict=True):
        assert relative(out, reference_linear(normed, linear)) < 1e-6


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_project_onto(rows: int, inner: int, columns: int) -> None:
    inputs, linear, residual = torch.randn(rows, inner), random_linear(columns, inner, True), torch.randn(rows, columns)
    expected = residual.double() + reference_linear(inputs, linear)
    project_onto(residual, inputs, linear)
    assert relative(residual, expected) < 1e-6


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_project_gated(rows: int, inner: int, columns: int) -> None:
    inputs, norm = torch.randn(rows, inner) * 50, Norm(torch.rand(inner) * 2, 1e-6)
    gate, up = random_linear(columns, inner), random_linear(columns, inner)
    assert relative(project_gated(inputs, gate, up, norm), reference_gated(inputs, gate, up, norm)) < 2e-6


def test_gate_of_extreme_inputs() -> None:
    """silu of ±1e30 is 0 or the input itself, never NaN."""
    gate, up = Linear(torch.tensor([[1e30], [-1e30], [0.0]])), Linear(torch.ones(3, 1))
    out = project_gated(torch.ones(1, 1), gate, up, Norm(torch.ones(1), 0.0))
    assert torch.equal(out, torch.tensor([[1e30, 0.0, 0.0]]))


@pytest.mark.parametrize("size", [8, 24, 64, 576, 33])
def test_rms_norm(size: int) -> None:
    inputs, norm = torch.randn(5, 3, size) * 10, Norm(torch.randn(size), 1e-5)
    assert relative(rms_norm(inputs, norm), reference_rms_norm(inputs, norm)) < 1e-6


@pytest.mark.parametrize("inner", [100, 103, 576])
def test_rows_do_not_depend_on_each_other(inner: int) -> None:
    inputs, norm = torch.randn(70, inner), Norm(torch.rand(inner), 1e-5)
    linear, other = random_linear(91, inner, True), random_linear(91, inner)
    whole, gated = project(inputs, [linear], norm)[0], project_gated(inputs, linear, other, norm)
    for begin, end in ((0, 1), (0, 2), (0, 3), (0, 4), (5, 10), (1, 10), (6, 70)):
        rows = inputs[begin:end].contiguous()
        assert torch.equal(project(rows, [other, linear], norm)[1], whole[begin:end])
        assert torch.equal(project_gated(rows, linear, other, norm), gated[begin:end])


def attention_case(heads: int, kv_heads: int, dim: int):
    """Three sequences: a decode far in, a chunk in the middle of a prompt, a whole short prompt; padding behind."""
    shape = Shape(heads, kv_heads, dim, BLOCK, 8)
    works = np.zeros(3, layout.Work)
    for work, (slot, begin, count, context) in zip(works, [(2, 0, 1, 100), (0, 1, 20, 50), (1, 21, 3, 3)], strict=True):
        work["slot"], work["query_start"], work["query_tokens"], work["context_tokens"] = slot, begin, count, context
    table = np.random.default_rng(0).permutation(24).astype(np.int32).reshape(3, 8)
    caches = [torch.randn(24 * BLOCK, kv_heads, dim) for _ in range(2)]
    return shape, works, table, torch.randn(26, heads * dim), *caches


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 8, 80), (16, 1, 96), (4, 2, 128), (24, 2, 256)])
def test_paged_attention(heads: int, kv_heads: int, dim: int) -> None:
    torch.manual_seed(dim)
    shape, works, table, queries, keys, values = attention_case(heads, kv_heads, dim)
    out = paged_attention(queries, keys, values, works, table, shape)
    expected = reference_attention(queries, keys, values, works, table, shape)
    assert relative(out[:24], expected[:24].double()) < 1e-6
    assert not out[24:].any()


def test_attention_of_extreme_scores() -> None:
    """Scores of ±1000 neither overflow nor give NaN: the softmax is the arg-max's value."""
    shape = Shape(1, 1, 8, BLOCK, 1)
    works = np.zeros(1, layout.Work)
    works["query_tokens"], works["context_tokens"] = 1, 4
    keys, values = torch.zeros(BLOCK, 1, 8), torch.arange(BLOCK * 8.0).view(BLOCK, 1, 8)
    keys[:4, 0, 0] = torch.tensor([-1000.0, 1000.0, 0.0, 500.0])
    queries = torch.zeros(1, 8)
    queries[0, 0] = 100.0
    out = paged_attention(queries, keys, values, works, np.zeros((1, 1), np.int32), shape)
    assert torch.equal(out[0], values[1, 0])


def test_rope_and_store() -> None:
    torch.manual_seed(3)
    shape = Shape(6, 2, 16, BLOCK, 1)
    angles = torch.rand(40, 8) * 6
    tables = RopeTables(angles.cos(), angles.sin())
    queries, keys, values = torch.randn(5, 96), torch.randn(5, 32), torch.randn(5, 32)
    positions, slots = np.array([0, 7, 39, 2, 2], np.int32), np.array([16, 3, 30, 9, 0], np.int32)
    caches = [torch.full((32, 2, 16), torch.nan) for _ in range(2)]
    rotated = [reference_rope(t.view(5, -1, 16), torch.from_numpy(positions).long(), tables) for t in (queries, keys)]
    rope_store(queries, keys, values, positions, slots, shape, tables, *caches)
    assert torch.allclose(queries.view(5, 6, 16), rotated[0], atol=1e-5)
    assert torch.allclose(caches[0][slots], rotated[1], atol=1e-5)
    assert torch.equal(caches[1][slots], values.view(5, 2, 16))
    assert caches[0].isnan().any(dim=2).sum() == 2 * (32 - 5)


def test_torch_and_the_kernels_share_one_thread_pool() -> None:
    """A second pool would put twice as many threads as cores to work."""
    code = (
        "import os, torch; from gpu_runtime.kernels.linear import Linear, project\n"
        "torch.set_num_threads(3); threads = lambda: len(os.listdir('/proc/self/task'))\n"
        "a = torch.randn(2000, 2000); torch.nn.functional.silu(a); before = threads()\n"
        "project(a, [Linear(a)]); assert threads() == before\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line or 'libomp' in line})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 1
