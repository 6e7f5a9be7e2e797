"""A channel goes to another front end only when the device has ended the run that the last one's rights may overlap."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from blink_proto import arena
from gpu_runtime.control import successors
from gpu_runtime.control.errors import NotReadyError
from gpu_runtime.control.successors import Successors
from gpu_runtime.shared_arena import ArenaLimits, SharedArena

OLD, NEW = ("dpu", "CN=a"), ("dpu", "CN=b")


@pytest.fixture
def shared() -> Iterator[SharedArena]:
    made = SharedArena.create(arena.Sizes(4, 4, 4, 8, 64), ArenaLimits(1, 1, 100, 64, 64))
    made.telemetry[0]["heartbeat"] = 41
    yield made
    made.unlink()


def ends(waiting: Successors, channels: tuple[int, ...], holder: tuple[str, str]) -> bool:
    """Whether it returns while nothing changes."""

    async def run() -> bool:
        task = asyncio.create_task(waiting.wait(channels, holder))
        done, _ = await asyncio.wait([task], timeout=0.05)
        task.cancel()
        return bool(done)

    return asyncio.run(run())


def test_only_somebody_else_waits(shared: SharedArena) -> None:
    made = Successors(shared, lambda: False)
    assert ends(made, (0, 1), NEW), "nobody had them"
    made.note((1,), OLD)
    assert ends(made, (0, 1), OLD)
    assert ends(made, (0, 2), NEW)
    assert not ends(made, (0, 1), NEW)
    assert not ends(made, (1,), ("other", "CN=a"))
    made.note((1,), NEW)
    assert ends(made, (1,), NEW)


@pytest.mark.parametrize("value", [42, 0])
def test_it_waits_for_a_run(shared: SharedArena, value: int) -> None:
    made = Successors(shared, lambda: False)
    made.note((0,), OLD)

    async def scene() -> None:
        task = asyncio.create_task(made.wait((0,), NEW))
        await asyncio.sleep(0.03)
        assert not task.done()
        shared.telemetry[0]["heartbeat"] = np.uint64(value)
        await asyncio.wait_for(task, 1)

    asyncio.run(scene())


def test_a_device_that_does_not_go_on_is_told(shared: SharedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(successors, "RUN_SECONDS", 0.05)
    made = Successors(shared, lambda: False)
    made.note((0,), OLD)
    with pytest.raises(NotReadyError, match="does not go on"):
        asyncio.run(made.wait((0,), NEW))


def test_nobody_waits_for_a_life_that_ends(shared: SharedArena) -> None:
    made = Successors(shared, lambda: True)
    made.note((0,), OLD)
    assert ends(made, (0,), NEW)
