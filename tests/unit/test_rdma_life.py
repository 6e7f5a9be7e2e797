"""RDMA into a CUDA device's memory from the control process's point of view, over a life of the chain.

Real are the control process, the handing over between processes, sessions and their rights, the relay and the scheduler
(on emulated threads). Device memory and adapter are stand-ins (`tests/standin`).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blink_proto import arena, control_pb2
from blink_proto.rdma.binding import RdmaError
from blink_proto.rdma.wire import Endpoint
from gpu_runtime.chain import process
from gpu_runtime.chain.process import ChainError
from gpu_runtime.config import make_config
from gpu_runtime.control import direct
from gpu_runtime.control.chain_life import ChainLife
from gpu_runtime.control.errors import BadRequestError, NotReadyError
from gpu_runtime.control.prepare import Prepared, prepare
from gpu_runtime.model.source import open_folder
from gpu_runtime.registration import verbs
from tests.bench.gpu.front import Front, Generation, submission
from tests.bench.gpu.remote_front import RemoteFront
from tests.standin.adapter import Adapter, Peer, RefusedError
from tests.standin.chain import LIBRARY, SILENT, token_at

OFFER = Endpoint(7, 1, bytes(16), 0, 3).to_bytes()
CHOICES: dict[str, Any] = {
    "channels": 4,
    "kv_tokens": 4096,
    "max_running": 8,
    "max_sequences": 8,
    "token_budget": 64,
    "lease_timeout_seconds": 5.0,
    "rdma_address": "192.0.2.1",
}


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch, relay_library: Path) -> Iterator[Adapter]:
    """The only one; chains for CUDA devices are stand-ins."""
    made = Adapter()
    monkeypatch.setattr(verbs, "open_device", lambda *choice: made)
    monkeypatch.setitem(process._MODULES, "cuda", "tests.standin.chain")
    monkeypatch.setenv(LIBRARY, str(relay_library))
    yield made
    assert descriptors() == [], "the control process has let the memory go"


def descriptors(name: str = "standin-device") -> list[str]:
    """What this process has open of that name; of the device's memory if none is said."""
    links = []
    for each in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{each}"))
        except OSError:
            continue  # the listing's own
    return [link for link in links if name in link]


def prepared(folder: Path, *transports: str) -> Prepared:
    config = make_config("cuda", transports=transports, **CHOICES)
    return prepare(config, open_folder(folder, "tiny"), "tiny", 1 << 40)


@dataclass
class Site:
    """A life of the chain, and front ends of it."""

    life: ChainLife
    adapter: Adapter

    async def open(self, name: str, transport: str, channels: int = 1) -> control_pb2.OpenSessionResponse:
        return await self.life.open_session(name, channels, transport, b"" if transport == "shm" else OFFER)

    async def remote(self, name: str = "dpu") -> tuple[RemoteFront, Peer]:
        """A front end over RDMA that holds its channel."""
        opened = await self.open(name, "verbs")
        peer = Peer(self.adapter, opened.transport_blob)
        front = RemoteFront(self.life.arena, peer.put, peer.get, opened.channels[0])
        await asyncio.to_thread(front.take)
        return front, peer

    async def local(self, name: str = "near") -> Front:
        """One in shared memory that holds its channel."""
        opened = await self.open(name, "shm")
        front = Front(self.life.arena, opened.channels[0])
        await asyncio.to_thread(front.take)
        return front


@asynccontextmanager
async def site(adapter: Adapter, folder: Path, *transports: str) -> AsyncIterator[Site]:
    life = await ChainLife.begin(prepared(folder, *transports), 1, lambda done, total, what: None)
    try:
        yield Site(life, adapter)
    finally:
        await life.end()
        assert adapter.closed
        assert await life.chain.wait() == 0


def play(adapter: Adapter, folder: Path, scene: Callable[[Site], Awaitable[None]], *transports: str) -> None:
    """One life, over both transports if nothing else is said."""

    async def run() -> None:
        async with site(adapter, folder, *(transports or ("shm", "verbs"))) as made:
            await scene(made)

    asyncio.run(run())


async def check(*fronts: Front, count: int = 12) -> None:
    """Each generates, at the same time as the others, what it must."""
    prompts = [list(range(3, 8 + index)) for index in range(len(fronts))]
    asked = [
        [front.submit(prompt, count), front.submit(prompt[:2], count)]
        for front, prompt in zip(fronts, prompts, strict=True)
    ]
    await asyncio.gather(*(asyncio.to_thread(front.run, made) for front, made in zip(fronts, asked, strict=True)))
    for made in asked:
        for one in made:
            start = len(one.prompt)
            assert one.tokens == [token_at(position) for position in range(start, start + count)]


def control_words(site: Site, channel: int) -> Any:
    """What local front ends wrote, in host memory."""
    layout = site.life.arena.inbound_layout
    at = layout.channel_offset(channel) + layout.channel_control_offset
    return site.life.arena.inbound[at : at + arena.ChannelIn.itemsize].view(arena.ChannelIn)[0]


def test_local_and_remote_front_ends_side_by_side(adapter: Adapter, tiny_folder: Path) -> None:
    async def scene(site: Site) -> None:
        (remote, _), near, (second, _) = await site.remote(), await site.local(), await site.remote("dpu-2")
        await check(remote, near, second)
        listed = {one.front_end: (one.transport, [c.live for c in one.channels]) for one in site.life.list_sessions()}
        assert listed == {"dpu": ("verbs", [True]), "near": ("shm", [True]), "dpu-2": ("verbs", [True])}

    play(adapter, tiny_folder, scene)


def test_without_local_front_ends_nothing_is_relayed(adapter: Adapter, tiny_folder: Path) -> None:
    async def scene(site: Site) -> None:
        remote, _ = await site.remote()
        await check(remote)
        with pytest.raises(BadRequestError, match="'shm' is not offered"):
            await site.open("near", "shm")

    play(adapter, tiny_folder, scene, "verbs")


def test_a_front_end_reaches_its_channels_and_the_first_page_only(adapter: Adapter, tiny_folder: Path) -> None:
    async def scene(site: Site) -> None:
        opened = await site.open("dpu", "verbs", 2)
        assert list(opened.channels) == [0, 1]
        peer, shared = Peer(adapter, opened.transport_blob), site.life.arena
        inbound, outbound = shared.inbound_layout, shared.outbound_layout
        windows = [(one.offset, one.size) for one in peer.answer.inbound]
        assert windows == [(inbound.channel_offset(c), inbound.channel_bytes) for c in (0, 1)]
        windows = [(one.offset, one.size) for one in peer.answer.outbound]
        assert windows == [
            (0, outbound.channel_offset(0)),
            *((outbound.channel_offset(c), outbound.channel_bytes) for c in (0, 1)),
        ]
        header = np.frombuffer(peer.get(outbound.header_offset, arena.ArenaHeader.itemsize), arena.ArenaHeader)[0]
        assert (int(header["magic"]), int(header["epoch"]), int(header["nonce"])) == (arena.MAGIC, 1, opened.nonce)
        into, out = peer.answer.inbound[0], peer.answer.outbound[1]
        for forbidden in (
            lambda: adapter.read(into.key, into.address, 8),
            lambda: adapter.write(out.key, out.address, bytes(8)),
            lambda: adapter.write(into.key, into.address + into.size, bytes(8)),
            lambda: adapter.write(into.key, into.address - 8, bytes(8)),
        ):
            with pytest.raises(RefusedError):
                forbidden()

    play(adapter, tiny_folder, scene)


def test_a_stale_local_front_end_does_not_spoil_a_channel(adapter: Adapter, tiny_folder: Path) -> None:
    """It goes on to write and to ring after its channel was granted to somebody who comes by RDMA."""

    async def scene(site: Site) -> None:
        stale = await site.local("was-here")
        await asyncio.to_thread(stale.give_back)
        site.life.sessions._sessions.clear()  # as after its time
        while site.life.arena.channel_out(0)[0]["live"]:
            await asyncio.sleep(0.01)
        remote, _ = await site.remote()
        assert remote.lease == stale.lease + 1
        stale.commit(stale.control_offset, remote.lease + 1)
        for _ in range(5):
            stale.beat()
            stale.commit(stale.control_offset + arena.CHANNEL_IN_OFFSETS["log_read"], 1 << 40)
            await check(remote)
        words = remote.words()
        assert [int(words[name]) for name in ("lease", "live", "protocol_errors")] == [remote.lease, 1, 0]

    play(adapter, tiny_folder, scene)


@pytest.mark.parametrize("beside", [("shm",), ()])
def test_a_session_is_ended_whoever_is_there(adapter: Adapter, tiny_folder: Path, beside: tuple[str, ...]) -> None:
    """Its keys at once; its lease too where the relay can overwrite the device's words."""

    async def scene(site: Site) -> None:
        left, _ = await site.remote("hostile")
        stays, _ = await site.remote("dpu")
        assert await site.life.entrance.end("hostile") == bool(beside)
        with pytest.raises(RefusedError):
            left.beat()
        assert [one.front_end for one in site.life.list_sessions()] == ["dpu"]
        assert site.life.sessions.free() == ([0, 2, 3] if beside else [2, 3])
        if beside:
            after, _ = await site.remote("other")
            assert (after.control_offset, after.lease) == (left.control_offset, left.lease + 1)
            await check(after)
        await check(stays)

    play(adapter, tiny_folder, scene, "verbs", *beside)


def test_a_channel_changes_its_transport_and_back(adapter: Adapter, tiny_folder: Path) -> None:
    async def scene(site: Site) -> None:
        first, peer = await site.remote()
        await check(first)
        near = await site.local("dpu")
        assert (near.lease, near.control_offset) == (first.lease + 1, first.control_offset)
        await check(near)
        with pytest.raises(RefusedError):
            first.beat()
        again, other = await site.remote()
        assert again.lease == near.lease + 1
        await check(again)
        assert not {one.key for one in peer.answer.inbound} & {one.key for one in other.answer.inbound}
        assert int(again.words()["protocol_errors"]) == 0
        assert int(control_words(site, 0)["lease"]) == near.lease, "left where they were, and not looked at"
        third = await site.local("dpu")
        assert third.lease == again.lease + 1
        await check(third)
        assert int(third.words()["protocol_errors"]) == 0

    play(adapter, tiny_folder, scene)


async def give_back(site: Site, front: Front) -> None:
    """A lease of channel 0, until it has ended."""
    front.give_back()
    async with asyncio.timeout(10):
        while site.life.arena.channel_out(0)[0]["live"]:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("after", ["verbs", "shm"])
def test_what_a_front_end_left_for_the_next_one_is_not_taken(adapter: Adapter, tiny_folder: Path, after: str) -> None:
    """It fills its rings for the lease after its own, loses session and keys, and another one gets the channel."""

    async def scene(site: Site) -> None:
        left, _ = await site.remote("hostile")
        await check(left)
        taken = int(left.words()["submit_read"])
        await give_back(site, left)
        await asyncio.to_thread(left.leave_for, left.lease + 1)
        site.life.sessions._sessions.pop("hostile").registration.revoke()
        with pytest.raises(RefusedError):
            left.beat()
        front = (await site.remote("other"))[0] if after == "verbs" else await site.local("other")
        assert (front.lease, front.control_offset) == (left.lease, left.control_offset)
        await check(front)
        words = front.words()
        assert [int(words[name]) for name in ("submit_read", "rejected", "protocol_errors")] == [taken + 2, 0, 0]
        assert front.unknown == 0

    play(adapter, tiny_folder, scene)


def log_of(site: Site, peer: Peer) -> bytes:
    """Of channel 0, as one reads it by RDMA."""
    layout = site.life.arena.outbound_layout
    return peer.get(layout.channel_offset(0) + layout.channel_log_offset, 16 * site.life.arena.sizes.log_slots)


@pytest.mark.parametrize("before", ["verbs", "shm"])
def test_who_gets_a_channel_finds_no_answers_and_no_prompts_in_it(
    adapter: Adapter, tiny_folder: Path, before: str
) -> None:
    """No answers from when it may read, for which it needs no lease; no prompts that it could have told to it."""

    async def scene(site: Site) -> None:
        if before == "verbs":
            earlier, peer = await site.remote("earlier")
            await check(earlier)
            assert any(log_of(site, peer))
        else:
            earlier = await site.local("earlier")
            await check(earlier)
        await give_back(site, earlier)
        await site.life.sessions._sessions.pop("earlier").revoke()
        opened = await site.open("later", "verbs")
        assert list(opened.channels) == [0]
        peer = Peer(adapter, opened.transport_blob)
        assert not any(log_of(site, peer))
        later = RemoteFront(site.life.arena, peer.put, peer.get, 0)
        await asyncio.to_thread(later.take)
        told = Generation(later.append(submission(0, 5, 0, prompt_logprobs=True, logprobs=1)), [0] * 5, 0)
        later._heap.allocate(5)
        later.generations[told.position] = told
        await asyncio.to_thread(later.run, [told])
        assert len(told.prompt_logprobs) == 4, "each of token 0, or else it would not be taken"

    play(adapter, tiny_folder, scene)


@pytest.mark.parametrize("before", ["verbs", "shm"])
def test_a_channel_is_not_given_on_with_a_lease_that_has_just_begun(
    adapter: Adapter, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Asked for as the last act, when nobody has seen it yet: what was submitted under it would be answered."""
    monkeypatch.setitem(CHOICES, "lease_timeout_seconds", 0.5)

    async def scene(site: Site) -> None:
        earlier = (await site.remote("earlier"))[0] if before == "verbs" else await site.local("earlier")
        site.life.sessions._sessions.pop("earlier").registration.revoke()
        site.life.sessions._is_live = lambda channel: False
        with pytest.raises(NotReadyError, match="ask once more"):
            await site.open("later", "verbs")
        assert adapter.regions == {}
        async with asyncio.timeout(10):
            while site.life.arena.channel_out(0)[0]["live"]:
                await asyncio.sleep(0.02)
        later, _ = await site.remote("later")
        assert later.lease == earlier.lease + 1
        await check(later)

    play(adapter, tiny_folder, scene)


def test_the_lease_of_a_remote_front_end_that_is_gone_ends(
    adapter: Adapter, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHOICES, "lease_timeout_seconds", 0.3)

    async def scene(site: Site) -> None:
        front, peer = await site.remote()
        deadline = asyncio.get_running_loop().time() + 10
        while site.life.arena.channel_out(0)[0]["live"]:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.02)
        while site.life.sessions.all():  # what it was given goes with the session, after twice that time
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.05)
        with pytest.raises(RefusedError):
            peer.get(0, 8)
        assert adapter.regions == {}
        after, _ = await site.remote("another")
        assert after.lease == front.lease + 1

    play(adapter, tiny_folder, scene)


def test_the_chains_process_is_needed_only_to_change_a_transport(
    adapter: Adapter, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "HANDOVER_SECONDS", 0.2)

    async def scene(site: Site) -> None:
        await site.open("dpu", "verbs")
        await site.open("near", "shm")
        os.kill(site.life.chain.pid, signal.SIGSTOP)
        try:
            assert list((await site.open("dpu", "verbs")).channels) == [0]
            assert list((await site.open("near", "shm")).channels) == [1]
            for name, transport in (("dpu", "shm"), ("third", "verbs")):
                with pytest.raises(NotReadyError, match="does not answer"):
                    await site.open(name, transport)
            assert len(adapter.regions) == 0, "the one that wanted to change has nothing left"
        finally:
            os.kill(site.life.chain.pid, signal.SIGCONT)
        (remote, _), near = await site.remote(), await site.local()
        await check(remote, near)

    play(adapter, tiny_folder, scene)


def test_what_was_registered_is_revoked_before_the_memory_goes(adapter: Adapter, tiny_folder: Path) -> None:
    """Registrations first, then descriptors; the chain's process waits for both."""
    seen: list[tuple[bool, int, int]] = []

    async def scene(site: Site) -> None:
        await site.remote()
        chain, entrance = site.life.chain, site.life.entrance
        assert len(descriptors()) >= 2
        close, process_id = entrance._memory.close, chain.pid  # type: ignore[union-attr]

        def watched() -> None:
            seen.append((chain.mailbox.halted, len(adapter.regions), os.waitid(os.P_PID, process_id, _ALIVE) is None))
            close()

        entrance._undo.pop_all()
        entrance._undo.callback(watched)
        entrance._undo.callback(entrance._registrars["verbs"].close)

    play(adapter, tiny_folder, scene)
    assert seen == [(True, 0, True)]


_ALIVE = os.WEXITED | os.WNOHANG | os.WNOWAIT


def test_a_chain_that_hands_nothing_over_is_not_begun(
    adapter: Adapter, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SILENT, "1")
    with pytest.raises(ChainError, match="handed no memory over"):
        play(adapter, tiny_folder, lambda site: asyncio.sleep(0))
    assert adapter.closed


def test_without_an_adapter_no_chain_is_begun(
    adapter: Adapter, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*choice: object) -> Adapter:
        raise RdmaError("this machine has no RDMA devices")

    monkeypatch.setattr(verbs, "open_device", absent)
    sockets = descriptors("socket:")
    with pytest.raises(BadRequestError, match="no RDMA devices"):
        play(adapter, tiny_folder, lambda site: asyncio.sleep(0))
    assert descriptors("socket:") == sockets


def test_a_session_is_not_opened_into_a_life_that_ends(adapter: Adapter, tiny_folder: Path) -> None:
    async def scene(site: Site) -> None:
        opening = asyncio.create_task(site.open("dpu", "verbs"))
        await asyncio.sleep(0)
        await asyncio.wait_for(site.life.end(), 3)
        with pytest.raises(NotReadyError, match="ending"):
            await asyncio.wait_for(opening, 1)
        assert adapter.regions == {}
        with pytest.raises(NotReadyError, match="ending"):
            await site.open("near", "shm")

    play(adapter, tiny_folder, scene)
