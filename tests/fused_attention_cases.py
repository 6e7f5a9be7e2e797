"""The cases of `attention_cases` for the kernel that also rotates and stores: beside `rope_store` and the plain kernel.

Needs Triton: imported where that is to be had only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from gpu_runtime.kernels.attention import RopeTables
from gpu_runtime.kernels.gpu.attention_decode import (
    DecodeScratch,
    Release,
    decode_attention,
    fused_decode_attention,
)
from gpu_runtime.kernels.gpu.rope_store import HeadNorms, reference_rope_store, rope_store
from tests.attention_cases import BLOCK, UNTOUCHED, Case, Step, build, expected


@dataclass(frozen=True)
class RawStep:
    """A step of decodes before rotation: the new positions of the cache are not written yet, and NaN."""

    step: Step
    tables: RopeTables
    norms: HeadNorms | None

    def copy(self) -> RawStep:
        """With its own queries, keys, values and cache."""
        step = self.step
        own = {name: getattr(step, name).clone() for name in ("fused", "keys", "values")}
        return replace(self, step=replace(step, **own))

    @property
    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.step.keys, self.step.values


def build_raw(case: Case, device: str = "cpu", normed: bool = False) -> RawStep:
    """Random queries, keys and values for every token; NaN in the rows of padding."""
    step = build(case, device)
    step.fused[: case.tokens].normal_()
    slots = step.plan.kv_slots[: case.tokens].long()
    for cache in (step.keys, step.values):
        cache[slots // BLOCK, :, slots % BLOCK] = math.nan
    angles = torch.rand(case.columns * BLOCK, case.head_dim // 2, device=device) * 7
    norms = None
    if normed:
        query, key = (1 + torch.randn(case.head_dim, device=device).to(case.dtype) / 4 for _ in range(2))
        norms = HeadNorms(query, key, 1e-6)
    return RawStep(step, RopeTables(angles.cos(), angles.sin()), norms)


def positions(raw: RawStep) -> torch.Tensor:
    """Of all tokens, padding at 0."""
    case = raw.step.case
    return torch.tensor([context - 1 for context in case.decodes] + [0] * case.padding, dtype=torch.int32).to(
        raw.step.keys.device
    )


def attend_fused(
    raw: RawStep, repeats: int = 1, check: bool = True, programmatic: bool = False, release: Release = "late"
) -> torch.Tensor:
    """What the fused kernel writes, several times on one scratch; leaves its keys and values in the step's cache."""
    step, case = raw.step, raw.step.case
    works = len(step.plan.works)
    scratch = DecodeScratch.allocate(works, case.shape, step.keys.device)
    for _ in range(repeats):
        scratch.outputs.fill_(math.nan)
        out = torch.full_like(step.queries.contiguous(), UNTOUCHED)
        tensors = step.fused, step.keys, step.values, step.plan
        how = {"programmatic": programmatic, "release": release}
        fused_decode_attention(*tensors, works, case.shape, scratch, out, raw.tables, raw.norms, **how)
        if check and scratch.arrived.any():
            raise AssertionError("tiles are still counted after the kernel")
    return out


def attend_separately(raw: RawStep) -> torch.Tensor:
    """The same by two kernels, with the same effects on the cache, but for padding's on the scratch block."""
    step, case = raw.step, raw.step.case
    works = len(step.plan.works)
    rope_store(step.fused, positions(raw), step.plan.kv_slots, raw.tables, raw.norms, *raw.cache)
    out = torch.full_like(step.queries.contiguous(), UNTOUCHED)
    scratch = DecodeScratch.allocate(works, case.shape, step.keys.device)
    decode_attention(step.queries, *raw.cache, step.plan, works, case.shape, scratch, out)
    return out


def fused_errors(case: Case, device: str = "cpu", normed: bool = False, repeats: int = 2) -> dict[str, float]:
    """Of the fused kernel: largest relative error of a head's output against float64 attention over what plain torch
    rotated and stored ("decode"), and against the two kernels ("apart"); numbers in rows of no work that changed
    ("padding"); relative error of the stored keys and values against `rope_store`'s ("stored"), 0 for the same bits;
    numbers that changed elsewhere in the cache ("elsewhere")."""
    raw = build_raw(case, device, normed)
    fused, apart, plain = raw.copy(), raw.copy(), raw.copy()
    out = attend_fused(fused, repeats)
    separate = attend_separately(apart)
    reference_rope_store(
        plain.step.fused, positions(raw), plain.step.plan.kv_slots, raw.tables, raw.norms, *plain.cache
    )
    slots = raw.step.plan.kv_slots[: case.tokens].long()
    changed, stored = 0, 0.0
    for before, after, other in zip(raw.cache, fused.cache, apart.cache, strict=True):
        own, others = (cache[slots // BLOCK, :, slots % BLOCK] for cache in (after, other))
        stored = max(stored, 0.0 if torch.equal(own, others) else _worst(own, others))
        restored = after.clone()
        restored[slots // BLOCK, :, slots % BLOCK] = math.nan
        changed += int((_bits(restored) != _bits(before)).sum())
    heads = (len(out), case.shape.query_heads, case.head_dim)
    return {
        "decode": _worst(out.view(heads)[: case.tokens], expected(plain.step).view(heads)[: case.tokens]),
        "apart": _worst(out.view(heads)[: case.tokens], separate.view(heads)[: case.tokens]),
        "padding": float((out[case.tokens :] != UNTOUCHED).sum()),
        "stored": stored,
        "elsewhere": float(changed),
    }


def _worst(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    errors = (actual.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)
    return float(torch.where(errors.isnan(), math.inf, errors).max())


def _bits(cache: torch.Tensor) -> torch.Tensor:
    """Of numbers, with all that are none alike."""
    return torch.nan_to_num(cache.float(), nan=12345.0).view(torch.int32)
