"""Sampling on the GPU (`sampling.cu`): one block of threads for each row of logits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from gpu_runtime.cuda.module import CudaModule, Kernel
from gpu_runtime.kernels.sampling import MAX_VOCABULARY
from gpu_runtime.model.device_plan import DevicePlan

_THREADS = 1024


@cache
def _kernel() -> Kernel:
    return CudaModule.build(Path(__file__).with_name("sampling.cu")).kernel("blink_sample_rows")


def sample_rows(logits: torch.Tensor, plan: DevicePlan, rows_max: int) -> None:
    """Writes the token of each of the plan's rows into `plan.sampled`, and log-probabilities into `plan.slots.logprobs`
    for rows that ask for them; same tokens as `kernels.sampling.sample`.

    May be captured: how many rows there are, and how each is sampled, is read on the device. Reads nothing before the
    kernel in front has ended when that allows an early start (programmatic dependent launch).

    Args:
        logits: float32 [at least rows_max, vocabulary], contiguous; row r belongs to the plan's row r.
        rows_max: rows that the plan may have.

    Raises:
        ValueError: shapes or type do not fit, or the plan has no slots.
    """
    slots = plan.slots
    if slots is None:
        raise ValueError("this plan has nothing to sample from")
    rows, vocabulary = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or not 0 < rows_max <= rows:
        raise ValueError(f"logits must be contiguous float32 with at least {rows_max} rows, not {list(logits.shape)}")
    if vocabulary > MAX_VOCABULARY or rows_max > len(plan.sampled):
        raise ValueError(f"{rows_max} rows of {vocabulary} tokens are more than the sampling kernel or the plan hold")
    adjusted = torch.empty_like(logits[:rows_max])  # only rows with bias or penalties touch it
    step = (plan.header, plan.rows, logits)
    by_slot, results = (slots.extras, slots.bias, slots.bans, slots.history), (adjusted, slots.logprobs, plan.sampled)
    _kernel().launch(
        torch.cuda.current_stream().cuda_stream,
        grid=(rows_max, 1, 1),
        block=_THREADS,
        args=[
            *_pointers(step),
            ctypes.c_uint32(vocabulary),
            *_pointers(by_slot),
            ctypes.c_uint32(slots.history.shape[1]),
            *_pointers(results),
        ],
        programmatic=False,  # so that the scheduler behind it may start early and read what came before sampling
    )


def _pointers(tensors: Sequence[torch.Tensor]) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(each.data_ptr()) for each in tensors]
