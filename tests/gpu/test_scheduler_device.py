"""The scheduler's GPU build on random histories, compared with the twin record by record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.property.test_histories import run_history

pytestmark = pytest.mark.gpu
HISTORIES = int(os.environ.get("BLINK_HISTORIES", "1000"))


@pytest.mark.parametrize("batch", range(4))
def test_device_and_twin_agree(device_scheduler: Path, batch: int) -> None:
    for seed in range(batch, HISTORIES, 4):
        try:
            run_history(seed)
        except Exception as error:
            error.add_note(f"history: run_history({seed})")
            raise
