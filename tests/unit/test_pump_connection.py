"""The pump when its connection to the arena fails: requests end with an error, once, and the worker hears of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from blink_proto import arena
from blink_proto.arena import Finish
from dpu_service.channel.client import ChannelClient, LeaseState
from dpu_service.channel.errors import LeaseLostError
from dpu_service.channel.rings import Sampling
from dpu_service.sequences.errors import DeviceUnavailableError
from dpu_service.sequences.inbox import Inbox
from dpu_service.sequences.pump import Pump, Wanted
from dpu_service.transport.base import TransportError
from dpu_service.transport.shm import ShmTransport
from tests.replay import ReplayDevice, Script
from tests.transport.kinds import KINDS
from tests.transport.site import Site

SIZES = arena.Sizes(channels=1, submit_slots=4, cancel_slots=4, log_slots=64, heap_tokens=64)


class Breakable(ShmTransport):
    """Shared memory that can be lost."""

    lost: str = ""

    def commit(self, offset: int, word: int) -> None:
        if self.lost == "writing":
            raise TransportError("the wire was cut")
        super().commit(offset, word)

    def read(self, offset: int, size: int) -> bytes:
        if self.lost == "reading":
            raise TransportError("the wire was cut")
        return super().read(offset, size)


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site(KINDS["shm"], sizes=SIZES)
    made.device.script = lambda submission: Script([1], Finish.NONE)
    made.device.start()
    yield made
    made.close()


def make_pump(
    device: ReplayDevice, site: Site, broken: list[str], kind: type[Breakable] = Breakable
) -> tuple[Pump, Any]:
    transport = kind(device.blob(), len(device.inbound), len(device.outbound))
    client = ChannelClient(transport, site.geometry(), 0)
    return Pump(client, 16, 10.0, on_broken=lambda: broken.append("broken")), transport


async def ready(pump: Pump) -> None:
    async with asyncio.timeout(10):
        while not pump.ready:
            await asyncio.sleep(0.005)


async def failure_of(inbox: Inbox) -> Exception:
    async with asyncio.timeout(10):
        while True:
            try:
                await inbox.take()
            except DeviceUnavailableError as error:
                return error


@pytest.mark.parametrize("lost", ["writing", "reading"])
def test_requests_under_way_end_and_the_worker_hears_of_it_once(site: Site, lost: str) -> None:
    broken: list[str] = []

    async def play() -> None:
        pump, transport = make_pump(site.device, site, broken)
        running = asyncio.create_task(pump.run())
        await ready(pump)
        inboxes = [Inbox(), Inbox()]
        sequences = [pump.request([Wanted([1, 2], [Sampling(10)])], inbox) for inbox in inboxes]
        transport.lost = lost
        for inbox in inboxes:
            assert "connection" in str(await failure_of(inbox))
        async with asyncio.timeout(10):
            await running
        assert not pump.ready
        assert pump.in_flight == 0
        pump.abandon([one for many in sequences for one in many])
        pump.close(DeviceUnavailableError("the end"))
        with pytest.raises(DeviceUnavailableError):
            pump.request([Wanted([1], [Sampling(1)])], Inbox())

    asyncio.run(play())
    assert broken == ["broken"]


def test_a_request_that_finds_the_connection_lost_fails_like_those_under_way(site: Site) -> None:
    broken: list[str] = []

    async def play() -> None:
        pump, transport = make_pump(site.device, site, broken)
        running = asyncio.create_task(pump.run())
        await ready(pump)
        transport.lost = "writing"
        inbox = Inbox()
        pump.request([Wanted([1, 2], [Sampling(10)])], inbox)
        assert "connection" in str(await failure_of(inbox))
        await running

    asyncio.run(play())
    assert broken == ["broken"]


class Arriving(Breakable):
    """Shared memory whose descriptor is readable until somebody looks at what has come."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.event = os.eventfd(0, os.EFD_NONBLOCK)

    @property
    def descriptor(self) -> int | None:
        return self.event

    def fetched(self, ticket: int) -> bool:
        with suppress(BlockingIOError):
            os.eventfd_read(self.event)
        return True

    def read(self, offset: int, size: int) -> bytes:
        self.fetched(0)
        return super().read(offset, size)


def test_what_comes_after_the_lease_was_lost_is_taken_in_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not keep the event loop busy until the worker asks for the channel again."""
    told: list[LeaseState] = []
    take = Pump._take_arrivals

    def note(pump: Pump) -> None:
        told.append(pump.client.state)
        take(pump)

    def lost() -> None:
        raise LeaseLostError("the device ended this worker's lease")

    async def play() -> None:
        pump, transport = make_pump(site.device, site, [], Arriving)
        running = asyncio.create_task(pump.run())
        await ready(pump)
        monkeypatch.setattr("dpu_service.sequences.pump.BEAT_SECONDS", 5.0)  # so long it stays without the channel
        monkeypatch.setattr(pump.client, "poll", lost)
        pump._wakeup.set()
        async with asyncio.timeout(10):
            while pump.client.state is not LeaseState.VACANT:
                await asyncio.sleep(0.005)
        told.clear()
        for _ in range(3):
            os.eventfd_write(transport.event, 1)
            await asyncio.sleep(0.05)
        assert told == [LeaseState.VACANT] * 3
        pump.close(DeviceUnavailableError("the end"))
        running.cancel()

    monkeypatch.setattr(Pump, "_take_arrivals", note)
    asyncio.run(play())
