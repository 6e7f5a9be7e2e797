"""Device code on emulated threads against the twin: the scheduler as the GPU's block of threads runs it, and the relay
between host and device memory, behind which front ends see what the twin says, those too that it must leave alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_runtime.scheduler import host
from tests.emulation.build import build_emulated
from tests.property.test_histories import run_history


@pytest.fixture
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every HostScheduler made meanwhile runs on the library built from the source in question."""
    host.use_library(build_emulated(request.param, tmp_path_factory.mktemp("emulated")))
    yield
    host.use_library(None)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("emulated", "histories"),
    [("scheduler_block.cpp", 60), ("relay.cpp", 200), ("relay_direct.cpp", 100)],
    indirect=["emulated"],
)
def test_emulated_and_twin_agree(histories: int) -> None:
    for seed in range(histories):
        try:
            run_history(seed)
        except Exception as error:
            error.add_note(f"history: run_history({seed})")
            raise
