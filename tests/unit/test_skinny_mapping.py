"""skinny.cu's own text, run on the host by an emulated thread block (`emulation/machine.h`), against float64.

What is emulated: bulk copies that land late and in random order, barriers, the warp's matrix instructions by the
tables of the PTX manual, and a kernel in front that writes the inputs only after this one has started. A wrong index,
a read before its bytes are there, a stage overwritten too early or a deadlock fails here without a GPU.
"""

from __future__ import annotations

import ctypes
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gpu_runtime.kernels.gpu.skinny import (
    Schedule,
    Weighted,
    reference_gated,
    reference_project,
    schedule,
    supports,
)

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = 3
NORMED = ("project", "project_float", "gated")


class _Late(ctypes.Structure):
    _fields_ = [("target", ctypes.c_void_p), ("source", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("emulation") / "skinny.so"
    folder = ROOT / "tests" / "unit" / "emulation"
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", f"-I{folder}", f"-I{ROOT / 'gpu_runtime'}"]
    subprocess.run(["g++", *flags, str(folder / "skinny.cpp"), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


@dataclass
class Problem:
    kind: str
    tokens: int
    columns: int
    units: int
    biased: bool = False
    indexed: bool = False
    early: int = 2
    blocks: int = BLOCKS
    seed: int = 0


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor.contiguous()


class Run:
    """Random inputs of a problem, its result by the emulated kernel and by the reference."""

    def __init__(self, library: ctypes.CDLL, problem: Problem, inputs: torch.Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(problem.seed)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * scale).bfloat16()

        kind, tokens = problem.kind, problem.tokens
        rows_of_weight = problem.units * (2 if kind == "gated" else 1)
        self.weight = normal(rows_of_weight, problem.columns, scale=problem.columns**-0.5)
        self.norm = Weighted(normal(problem.columns, scale=0.3) + 1, 1e-5)
        self.bias = normal(rows_of_weight) if problem.biased else None
        self.inputs = normal(tokens + 5 * problem.indexed, problem.columns, scale=2.0) if inputs is None else inputs
        self.rows = torch.randperm(len(self.inputs), generator=generator)[:tokens] if problem.indexed else None
        self.residual = normal(tokens, problem.units)
        self.cut = schedule(kind, tokens, problem.columns, problem.units, problem.blocks)
        self.let_in, self.out = self._run(library, problem)

    def _run(self, library: ctypes.CDLL, problem: Problem) -> tuple[bool, torch.Tensor]:
        cut: Schedule = self.cut
        dtype = torch.float32 if problem.kind == "project_float" else torch.bfloat16
        late_inputs = torch.full_like(self.inputs, float("nan"))
        out = torch.full((problem.tokens, problem.units), float("nan"), dtype=dtype)
        out_first = self.residual if problem.kind == "residual" else out.clone()
        late = [(late_inputs, self.inputs), (out, out_first)]
        stride, index = 0, None
        if self.rows is not None:
            stride, index = 3, torch.full((problem.tokens, 3), 1 << 30, dtype=torch.int32)
            real = index.clone()
            real[:, 0] = self.rows
            late.append((index, real))
        arrays = (_Late * len(late))(*(_Late(t.data_ptr(), s.data_ptr(), t.nbytes) for t, s in late))
        kernel = getattr(library, f"skinny_{problem.kind}_{cut.tokens}x{cut.pieces}")
        pointers = (late_inputs, self._norm_of(problem), self.bias, out, index)
        sizes = (stride, len(self.inputs), problem.tokens, problem.columns, problem.units)
        let_in = library.run_skinny(
            kernel,
            cut.blocks,
            cut.shared_bytes,
            problem.seed,
            arrays,
            len(late),
            ctypes.c_void_p(self.weight.data_ptr()),
            len(self.weight),
            *(ctypes.c_void_p(None if each is None else each.data_ptr()) for each in pointers),
            *sizes,
            ctypes.c_float(self.norm.epsilon),
            *(cut.tiles, cut.piece_units, cut.w_stages, cut.x_stages, problem.early),
        )
        return bool(let_in), out

    def _norm_of(self, problem: Problem) -> torch.Tensor | None:
        return self.norm.weight if problem.kind in NORMED else None

    def expected(self, kind: str) -> torch.Tensor:
        inputs = self.inputs if self.rows is None else self.inputs[self.rows]
        if kind == "gated":
            return reference_gated(inputs, self.weight, self.bias, self.norm)
        if kind == "residual":
            return self.residual.double() + reference_project(inputs, self.weight, self.bias, None)
        return reference_project(inputs, self.weight, self.bias, self.norm)


PROBLEMS = [
    Problem("project", 1, 576, 70),
    Problem("project", 5, 320, 190, biased=True),
    Problem("project", 16, 576, 100, early=0),
    Problem("project", 12, 1024, 700, biased=True, early=1000),
    Problem("project", 27, 320, 130),
    Problem("project", 40, 512, 90, biased=True),
    Problem("project_float", 3, 576, 400, indexed=True),
    Problem("project_float", 33, 320, 97),
    Problem("residual", 1, 1536, 93),
    Problem("residual", 8, 256, 33, biased=True),
    Problem("residual", 20, 832, 200),
    Problem("residual", 64, 64, 17),
    Problem("gated", 2, 576, 50),
    Problem("gated", 9, 320, 170, biased=True),
    Problem("gated", 30, 320, 80),
    Problem("gated", 64, 320, 31),
    Problem("gated", 1, 64, 1, blocks=132),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.kind}-{p.tokens}x{p.columns}x{p.units}")
def test_result(emulated: ctypes.CDLL, problem: Problem) -> None:
    run = Run(emulated, problem)
    expected = run.expected(problem.kind)
    error = (run.out.double() - expected).norm() / expected.norm()
    assert error < (3e-3 if problem.kind != "project_float" else 1e-5)
    assert run.let_in


def test_random_problems(emulated: ctypes.CDLL) -> None:
    chooser = random.Random(20)
    for seed in range(12):
        kind = chooser.choice(["project", "project_float", "residual", "gated"])
        tokens = chooser.randint(1, 24)
        indexed = kind == "project_float" and tokens <= 16
        problem = Problem(
            kind,
            tokens=tokens,
            columns=64 * chooser.randint(1, 12),
            units=chooser.randint(1, 260),
            biased=chooser.random() < 0.5,
            indexed=indexed,
            early=chooser.randint(0, 6),
            blocks=chooser.randint(1, 4),
            seed=seed,
        )
        run = Run(emulated, problem)
        expected = run.expected(kind)
        assert (run.out.double() - expected).norm() / expected.norm() < 3e-3, problem


@pytest.mark.parametrize("kind", ["project_float", "residual", "gated"])
def test_a_token_does_not_depend_on_its_company(emulated: ctypes.CDLL, kind: str) -> None:
    whole = Run(emulated, Problem(kind, 37, 640, 50, seed=7))
    for tokens in (1, 9, 20):
        part = Problem(kind, tokens, 640, 50, seed=7, blocks=2)
        library_run = Run(emulated, part, inputs=whole.inputs[:tokens])
        assert torch.equal(library_run.weight, whole.weight)
        if kind == "residual":
            difference = library_run.out.float() - library_run.residual.float()
            assert torch.isfinite(difference).all()
        else:
            assert torch.equal(bits(library_run.out), bits(whole.out[:tokens]))


def test_supports() -> None:
    assert supports(1, 576, 960, torch.bfloat16)
    assert supports(64, 14336, 4096, torch.bfloat16)
    assert not supports(65, 4096, 4096, torch.bfloat16)
    assert not supports(0, 4096, 4096, torch.bfloat16)
    assert not supports(1, 4128, 4096, torch.bfloat16)
    assert not supports(1, 4096, 4096, torch.float32)
