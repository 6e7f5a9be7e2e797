"""A channel goes to another front end only when the runs have ended that the last one's rights may overlap, and without
a lease of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from blink_proto import arena
from gpu_runtime.control import successors
from gpu_runtime.control.errors import NotReadyError
from gpu_runtime.control.successors import Holder, Successors
from gpu_runtime.shared_arena import ArenaLimits, SharedArena

OLD, NEW = Holder("dpu", "CN=a", False), Holder("dpu", "CN=b", False)
NEAR, NEAR_TOO = Holder("near", "CN=a", True), Holder("near-2", "CN=b", True)


@pytest.fixture
def shared() -> Iterator[SharedArena]:
    made = SharedArena.create(arena.Sizes(4, 4, 4, 8, 64), ArenaLimits(1, 1, 100, 64, 64))
    made.telemetry[0]["heartbeat"] = 41
    yield made
    made.unlink()


def successors_of(shared: SharedArena, over: bool = False) -> Successors:
    return Successors(shared, lambda channel: bool(shared.channel_out(channel)[0]["live"]), lambda: over)


def beat(shared: SharedArena, value: int | None = None) -> None:
    """A run of the scheduler has ended."""
    now = shared.telemetry[0]["heartbeat"]
    shared.telemetry[0]["heartbeat"] = now + np.uint64(1) if value is None else np.uint64(value)


def ends(waiting: Successors, channels: tuple[int, ...], holder: Holder) -> bool:
    """Whether it returns while nothing changes."""

    async def run() -> bool:
        task = asyncio.create_task(waiting.wait(channels, holder))
        done, _ = await asyncio.wait([task], timeout=0.05)
        task.cancel()
        return bool(done)

    return asyncio.run(run())


def test_only_somebody_else_waits(shared: SharedArena) -> None:
    made = successors_of(shared)
    assert ends(made, (0, 1), NEW), "nobody had them"
    made.note((1,), OLD)
    assert ends(made, (0, 1), OLD)
    assert ends(made, (0, 2), NEW)
    assert not ends(made, (0, 1), NEW)
    assert not ends(made, (1,), Holder("other", "CN=a", False))
    made.note((1,), NEW)
    assert ends(made, (1,), NEW)


def test_local_front_ends_do_not_wait_for_each_other(shared: SharedArena) -> None:
    """Each has all of host memory anyway."""
    made = successors_of(shared)
    made.note((0, 1), NEAR)
    made.note((1,), OLD)
    assert ends(made, (0,), NEAR_TOO)
    assert not ends(made, (0,), NEW)
    assert not ends(made, (1,), NEAR_TOO)
    assert ends(made, (1,), Holder("dpu", "CN=a", True)), "the same one by another way"


@pytest.mark.parametrize("value", [42, 0])
def test_it_waits_for_two_runs(shared: SharedArena, value: int) -> None:
    """What the first one says of leases may still be under way."""
    made = successors_of(shared)
    made.note((0,), OLD)

    async def scene() -> None:
        task = asyncio.create_task(made.wait((0,), NEW))
        for number in range(2):
            await asyncio.sleep(0.03)
            assert not task.done()
            beat(shared, value + number)
        await asyncio.wait_for(task, 1)

    asyncio.run(scene())


def test_a_lease_that_begins_meanwhile_is_in_the_way(shared: SharedArena) -> None:
    """Of an earlier holder's channel; not of one that is the front end's own."""
    made = successors_of(shared)
    made.note((0, 1), OLD)
    made.note((2,), NEW)

    async def scene(channels: tuple[int, ...], live: int) -> None:
        task = asyncio.create_task(made.wait(channels, NEW))
        await asyncio.sleep(0.01)
        beat(shared)
        await asyncio.sleep(0.01)
        shared.channel_out(live)[0]["live"] = 1
        beat(shared)
        await asyncio.wait_for(task, 1)

    asyncio.run(scene((0, 2), live=2))
    with pytest.raises(NotReadyError, match="ask once more"):
        asyncio.run(scene((0, 1, 2), live=1))
    assert ends(made, (2,), NEW)


def test_a_device_that_does_not_go_on_is_told(shared: SharedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(successors, "RUN_SECONDS", 0.05)
    made = successors_of(shared)
    made.note((0,), OLD)
    with pytest.raises(NotReadyError, match="does not go on"):
        asyncio.run(made.wait((0,), NEW))


def test_nobody_waits_for_a_life_that_ends(shared: SharedArena) -> None:
    made = successors_of(shared, over=True)
    made.note((0,), OLD)
    assert ends(made, (0,), NEW)
