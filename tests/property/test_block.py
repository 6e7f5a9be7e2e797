"""The scheduler as the GPU's block of threads runs it, on emulated threads, against the twin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_runtime.scheduler import host
from tests.emulation.build import build_emulated
from tests.property.test_histories import run_history

HISTORIES = 60


@pytest.fixture(scope="module")
def block_scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every HostScheduler made meanwhile runs there."""
    host.use_library(build_emulated("scheduler_block.cpp", tmp_path_factory.mktemp("block")))
    yield
    host.use_library(None)


@pytest.mark.usefixtures("block_scheduler")
def test_block_and_twin_agree() -> None:
    for seed in range(HISTORIES):
        try:
            run_history(seed)
        except Exception as error:
            error.add_note(f"history: run_history({seed})")
            raise
