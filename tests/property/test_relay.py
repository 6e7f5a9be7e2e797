"""The relay between host and device memory, on emulated threads: front ends see what the twin says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_runtime.scheduler import host
from tests.emulation.build import build_emulated
from tests.property.test_histories import run_history

HISTORIES = 200


@pytest.fixture(scope="module")
def relayed_scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every HostScheduler made meanwhile looks at an arena of its own, which the relay fills and empties."""
    host.use_library(build_emulated("relay.cpp", tmp_path_factory.mktemp("relay")))
    yield
    host.use_library(None)


@pytest.mark.usefixtures("relayed_scheduler")
def test_relayed_and_twin_agree() -> None:
    for seed in range(HISTORIES):
        try:
            run_history(seed)
        except Exception as error:
            error.add_note(f"history: run_history({seed})")
            raise
