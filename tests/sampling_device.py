"""The sampling kernel on a GPU, for rows made by `tests.sampling_cases`. Imported only where there is a CUDA device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_runtime.kernels.gpu.sampling import sample_rows
from gpu_runtime.model.device_plan import DevicePlan, SamplingSlots
from gpu_runtime.scheduler import layout
from tests.sampling_cases import Cases

UNTOUCHED = -12345
_UNUSED = ("works", "decode_tiles", "chunk_tiles", "token_ids", "positions", "kv_slots", "block_table")


def words(records: NDArray[Any]) -> torch.Tensor:
    """A copy of records [n, ..] on the device, int32 [n, words]."""
    flat = np.ascontiguousarray(records).view(np.uint8).reshape(len(records), -1)
    return torch.from_numpy(flat.view(np.int32).copy()).cuda()


class OnDevice:
    """A plan and logits on the device; the plan has `rows` rows, the first ones of the cases."""

    def __init__(self, made: Cases, rows: int | None = None) -> None:
        self.count = len(made.rows)
        header = np.zeros(1, layout.StepHeader)
        header["rows"] = self.count if rows is None else rows
        self.logits = made.logits.cuda()
        self.plan = DevicePlan(
            **dict.fromkeys(_UNUSED, torch.empty(0)),
            header=words(header)[0],
            rows=words(made.rows),
            sampled=torch.full((self.count,), UNTOUCHED, dtype=torch.int32, device="cuda"),
            slots=SamplingSlots(
                words(made.slots.history),
                words(made.slots.extras),
                words(made.slots.bias),
                words(made.slots.bans),
                words(np.zeros(self.count, layout.RowLogprobs)),
            ),
        )

    def launch(self) -> None:
        """Samples, on the current stream."""
        sample_rows(self.logits, self.plan, self.count)

    def tokens(self) -> list[int]:
        """What was sampled."""
        return [int(token) for token in self.plan.sampled.tolist()]

    def logprobs(self) -> NDArray[np.void]:
        """RowLogprobs [rows]."""
        assert self.plan.slots is not None
        found = self.plan.slots.logprobs.cpu().numpy()
        return np.ascontiguousarray(found).view(layout.RowLogprobs).reshape(-1)
