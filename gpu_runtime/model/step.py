"""What the layers need to know of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class StepInputs:
    """Views of the scheduler's plan.

    `token_ids`, `positions`, `kv_slots`: int32 [bucket]. `works`: layout.Work [works]. `block_table`: int32
    [slots, blocks]. `sampled_tokens`: indices in the step of the tokens whose logits are wanted, [rows].
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    kv_slots: NDArray[np.int32]
    works: NDArray[np.void]
    block_table: NDArray[np.int32]
    sampled_tokens: NDArray[np.uint32]
