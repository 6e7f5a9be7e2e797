"""RDMA into the arena in device memory, as far as it goes without an adapter: copies over the bus stand in for one.

What is there for an adapter is real: the device's attributes, the dma-bufs of a running chain's arena, the way on which
they reach the control process, the relay that leaves such channels alone, and an idle chain that notices.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blink_proto import arena
from gpu_runtime.config import ConfigError, make_config
from gpu_runtime.cuda.errors import check
from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.registration.gpu_memory import check_device, hand_over
from gpu_runtime.registration.handover import RegionAddress
from gpu_runtime.registration.memory import LentMemory
from gpu_runtime.registration.ways import Wish, has_peermem
from tests.bench.gpu.chains import LocalChain, local_chain, open_model
from tests.bench.gpu.front import Front, Generation, submission
from tests.bench.gpu.remote_front import RemoteFront
from tests.gpu.conftest import DEVICE, cannot_import
from tests.gpu.shared_chain import SharedChain
from tests.gpu.small import VOCABULARY
from tests.shapes import token_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(DEVICE == "cpu", reason="the soft GPU's arena is no device memory"),
]
SIZES: dict[str, Any] = {
    "kv_tokens": 16384,
    "max_running": 64,
    "max_sequences": 128,
    "token_budget": 128,
    "lease_timeout_seconds": 2.0,
    "dtype": "float32",
    "rdma_address": "192.0.2.1",
}
CHAIN = {"transports": ("shm", "verbs"), **SIZES}


def prompts(count: int) -> list[list[int]]:
    return [token_prompt(3 + 11 * index % 90, VOCABULARY, index) for index in range(count)]


def remote(chain: LocalChain, channel: int) -> RemoteFront:
    """A front end that reaches device memory by copies, each of which has ended when the next one begins."""
    memory = chain.chain.arena

    def put(offset: int, payload: bytes) -> None:
        memory.inbound.write(offset, np.frombuffer(payload, np.uint8))

    def get(offset: int, size: int) -> bytes:
        content: bytes = memory.outbound.read(offset, np.uint8, size).tobytes()
        return content

    return RemoteFront(chain.shared, put, get, channel, chain.chain.ended)


def hand_to_card(chain: LocalChain, channels: int) -> float:
    """Has the relay leave these channels alone; seconds until it does."""
    began = time.monotonic()
    chain.chain.set_direct(channels)
    while chain.chain.direct_seen() != channels:
        assert time.monotonic() < began + 5
    return time.monotonic() - began


def grant(chain: LocalChain, channel: int, way: str) -> Front:
    """A front end that has a channel but no lease yet, as the control process grants it; all others but channel 1 are
    local ones'."""
    if way == "remote":
        assert hand_to_card(chain, 0b10 | 1 << channel) < 1
        return remote(chain, channel)
    layout = chain.shared.inbound_layout
    words = layout.channel_offset(channel) + layout.channel_control_offset
    chain.shared.inbound[words : words + arena.ChannelIn.itemsize] = 0
    hand_to_card(chain, 0b10)
    return Front(chain.shared, channel, chain.chain.ended)


def answers(*fronts: Front, count: int = 16) -> list[list[list[int]]]:
    """What each is told for the same prompts, all at the same time."""
    asked = [[front.submit(prompt, count) for prompt in prompts(24)] for front in fronts]
    for front, made in zip(fronts, asked, strict=True):
        front.run(made)
    return [[one.tokens for one in made] for made in asked]


@pytest.fixture(scope="module")
def told() -> list[list[int]]:
    """What a front end of the shared chain was told for the prompts."""
    return []


@pytest.fixture
def both(shared: SharedChain, device: str, small_model: Path) -> LocalChain:
    """A chain with front ends of both kinds."""
    return shared.chain(small_model, device)


@pytest.fixture
def pair(both: LocalChain) -> Iterator[tuple[Front, RemoteFront]]:
    """A local front end on channel 0, and one that comes by copies on channel 1."""
    hand_to_card(both, 0b10)
    near, far = both.front(0), remote(both, 1)
    far.take()
    yield near, far
    for front in (near, far):
        front.give_back()
        front.wait(lambda front=front: not int(front.words()["live"]), 10, "the lease did not end")


def test_a_remote_front_end_gets_what_a_local_one_gets(told: list[list[int]], pair: tuple[Front, RemoteFront]) -> None:
    near, far = pair
    by_host, by_card = answers(near, far)
    told += by_host
    assert by_card == by_host
    assert {len(tokens) for tokens in by_card} == {16}


def test_an_idle_chain_notices_without_a_bell(both: LocalChain, pair: tuple[Front, RemoteFront]) -> None:
    """A poll lasts 20 ms; copies and looks take some tens of microseconds each, several of them for every request."""
    _, far = pair
    waits = []
    for _ in range(100):
        time.sleep(0.003)
        one = far.submit([5, 6, 7], 1)
        began = time.monotonic()
        while int(far.words()["submit_read"]) <= one.position:
            pass
        waits.append(time.monotonic() - began)
        far.run([one])
    print(f"\nnoticed after {1e6 * float(np.median(waits)):.0f} µs (median), {1e6 * max(waits):.0f} µs (longest)")
    assert float(np.median(waits)) < 0.002


def test_what_local_front_ends_write_does_not_reach_its_channel(
    both: LocalChain, pair: tuple[Front, RemoteFront]
) -> None:
    near, far = pair
    stale = Front(both.shared, 1, both.chain.ended)
    for round_number in range(20):
        stale.beat()
        stale.commit(stale.control_offset, far.lease + 1)
        stale.commit(stale.control_offset + arena.CHANNEL_IN_OFFSETS["log_read"], 1 << (20 + round_number))
        far.run([far.submit(prompts(3)[2], 8)])
    near.run([near.submit([3, 4], 4)])
    words = far.words()
    assert [int(words[name]) for name in ("lease", "live", "protocol_errors")] == [far.lease, 1, 0]
    layout = both.shared.inbound_layout
    start = layout.channel_offset(1) + layout.channel_control_offset
    both.shared.inbound[start : start + arena.ChannelIn.itemsize] = 0


def test_its_records_are_not_copied_to_the_host_but_its_cursors_are(
    both: LocalChain, pair: tuple[Front, RemoteFront]
) -> None:
    _, far = pair
    far.run([far.submit([3, 4, 5], 8)])
    layout = both.shared.outbound_layout
    start = layout.channel_offset(1) + layout.channel_log_offset
    far.wait(lambda: int(both.shared.channel_out(1)[0]["log_written"]) == far.log_position, 5, "cursors did not come")
    assert int(both.shared.channel_out(1)[0]["lease"]) == far.lease
    assert not both.shared.outbound[start : start + 16 * both.shared.sizes.log_slots].any()


def test_a_channel_changes_hands(both: LocalChain) -> None:
    """From a local front end to a remote one and back, with the next lease each time and the same tokens."""
    expected = None
    leases = []
    for turn in range(6):
        front = grant(both, 2, "remote" if turn % 2 else "local")
        front.take()
        leases.append(front.lease)
        (tokens,) = answers(front, count=6)
        expected = expected or tokens
        assert tokens == expected
        assert int(front.words()["protocol_errors"]) == 0
    assert leases == list(range(leases[0], leases[0] + 6))
    front.give_back()


def end_lease(front: Front) -> None:
    front.give_back()
    front.wait(lambda: not int(front.words()["live"]), 10, "the lease did not end")


@pytest.mark.parametrize("after", ["remote", "local"])
@pytest.mark.parametrize("before", ["remote", "local"])
def test_what_a_front_end_leaves_for_the_next_lease_is_not_taken(
    both: LocalChain, pair: tuple[Front, RemoteFront], before: str, after: str
) -> None:
    """Whichever way it and the next one come; the rings' commit words can be foretold."""
    near, _ = pair
    (expected,) = answers(near, count=6)
    earlier = grant(both, 4, before)
    earlier.take()
    names = ("submit_read", "rejected", "protocol_errors")
    free, *wrong = (int(earlier.words()[name]) for name in names)
    earlier.leave_for(earlier.lease + 1)
    own = grant(both, 4, after)
    own.take()
    assert own.lease == earlier.lease
    assert int(own.words()["submit_read"]) == free
    (tokens,) = answers(own, count=6)
    assert tokens == expected
    assert [int(own.words()[name]) for name in names] == [free + len(tokens), *wrong]
    assert own.unknown == 0
    end_lease(own)


@pytest.mark.parametrize("before", ["remote", "local"])
def test_a_remote_front_end_finds_nothing_of_an_earlier_one(both: LocalChain, before: str) -> None:
    """No answers from when it may read, no records or prompts from when it may submit, and no prompt to be told."""
    earlier, memory, size = grant(both, 4, before), both.chain.arena, 24
    layout, outbound = both.shared.inbound_layout, both.shared.outbound_layout
    start = layout.channel_offset(4) + layout.channel_submit_offset
    written = layout.channel_bytes - layout.channel_submit_offset
    log = outbound.channel_offset(4) + outbound.channel_log_offset, np.uint8, 16 * both.shared.sizes.log_slots
    earlier.take()
    answers(earlier)
    assert memory.inbound.read(layout.channel_offset(4) + layout.channel_heap_offset, np.uint32, size).all()
    assert memory.outbound.read(*log).any()
    end_lease(earlier)
    later = grant(both, 4, "remote")
    assert not memory.outbound.read(*log).any()
    later.take()
    assert not memory.outbound.read(*log).any()
    assert not memory.inbound.read(start, np.uint8, written).any()
    position = later.append(submission(0, size, 0, prompt_logprobs=True, logprobs=1))
    later.generations[position] = told = Generation(position, [0] * size, later._heap.allocate(size) or 0)
    later.run([told])
    assert len(told.prompt_logprobs) == size - 1, "each of token 0, or else it would not be taken"
    end_lease(later)


def test_a_dead_remote_front_ends_lease_ends(both: LocalChain) -> None:
    hand_to_card(both, 0b1000)
    front = remote(both, 3)
    front.take()
    began = time.monotonic()
    while int(front.words()["live"]):
        assert time.monotonic() < began + 10
        time.sleep(0.05)
    assert time.monotonic() - began > 1.5  # its time-out is 2 s


def test_without_local_front_ends(told: list[list[int]], own_device: str, small_model: Path) -> None:
    """Nothing of host memory is looked at, whatever is written and rung there."""
    with local_chain(small_model, own_device, transports=("verbs",), **SIZES) as alone:
        front = remote(alone, 0)
        front.take()
        Front(alone.shared, 0).commit(front.control_offset, 77)
        (tokens,) = answers(front)
        assert not told or tokens == told
        assert int(front.words()["protocol_errors"]) == 0
        front.give_back()


def is_synchronous(region: RegionAddress) -> bool:
    """The driver's own word on CU_POINTER_ATTRIBUTE_SYNC_MEMOPS."""
    from cuda.bindings import driver

    name = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    return bool(check(driver.cuPointerGetAttribute(name, region.address)))


def test_the_arena_that_is_lent_has_synchronous_copies_which_wait_for_no_chain(
    told: list[list[int]], own_device: str, small_model: Path
) -> None:
    """Lent as the chain's process does it, before the chain runs; then used by a front end that comes by copies."""
    from cuda.bindings import driver

    config = make_config(own_device, transports=("verbs",), **SIZES)
    made, memory = LocalChain(open_model(small_model, config), config), LentMemory(config.arena_sizes())
    try:
        lent = made.chain.arena.inbound, made.chain.arena.outbound
        inbound, outbound = (RegionAddress(one.address, one.size) for one in lent)
        assert (is_synchronous(inbound), is_synchronous(outbound)) == (False, False)
        way = hand_over(driver, check(driver.cuCtxGetDevice()), config.rdma_wish, inbound, outbound, memory.chain_end)
        assert (is_synchronous(inbound), is_synchronous(outbound)) == (True, True)
        memory.receive(lambda: False)
        assert memory.way == way == "dma-buf"
        made.chain.start()
        front = remote(made, 0)
        front.take()
        (tokens,) = answers(front)
        assert not told or tokens == told
        front.give_back()
    finally:
        memory.close()
        made.close()


# The process of a chain, and what the control process gets of it.


class Registered:
    """Of an adapter what registers: notes what it is given."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int, int, int]] = []

    def register_dmabuf(self, descriptor: int, offset: int, size: int, base: int, access: int) -> str:
        self.made.append((os.lseek(descriptor, 0, os.SEEK_END), offset, size, base))
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def register(self, address: int, size: int, access: int) -> str:
        raise AssertionError("device memory is never registered by its address")


def test_the_device_may_be_reached_by_rdma(device: str) -> None:
    from cuda.bindings import driver

    from gpu_runtime.control.device_check import require_device

    check(driver.cuInit(0))
    number = check(driver.cuDeviceGet(0))
    assert check_device(driver, number, Wish()) == "dma-buf"
    require_device("cuda", rdma=Wish())
    if has_peermem():
        assert check_device(driver, number, Wish("peermem")) == "peermem"
        require_device("cuda", rdma=Wish("peermem"))
    else:
        with pytest.raises(RegistrationError, match="nvidia-peermem is not loaded"):
            check_device(driver, number, Wish("peermem"))
        with pytest.raises(ConfigError, match="nvidia-peermem is not loaded"):
            require_device("cuda", rdma=Wish("peermem"))


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Any]:
    """A life of the chain, in a process of its own, as the control process has it."""
    from gpu_runtime.control.chain_life import ChainLife
    from gpu_runtime.control.prepare import prepare
    from gpu_runtime.model.source import open_folder

    config = make_config("cuda", transports=("shm", "verbs"), **SIZES)
    prepared = prepare(config, open_folder(folder, "small"), "small", 60 << 30)
    life = await ChainLife.begin(prepared, 1, lambda done, total, what: None)
    try:
        yield life
    finally:
        await life.end()


def test_the_control_process_gets_the_memory_of_the_chains_process(
    own_device: str, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := cannot_import("gpu_runtime.control.chain_life"):
        pytest.skip(reason)
    from gpu_runtime.registration import verbs
    from gpu_runtime.registration.parts import Part
    from tests.standin.adapter import Adapter

    adapter = Adapter()
    monkeypatch.setattr(verbs, "open_device", lambda *choice: adapter)

    async def scene() -> None:
        async with served(small_model) as life:
            memory, shared = life.entrance._memory, life.arena
            domain = Registered()
            for inbound, layout in ((True, shared.inbound_layout), (False, shared.outbound_layout)):
                part = Part(inbound, layout.channel_offset(3), layout.channel_bytes)
                assert "dmabuf" in memory.register(domain, part, 0)
                whole, offset, size, base = domain.made[-1]
                assert (offset, size) == (part.offset, part.size)
                assert layout.total_bytes <= whole < layout.total_bytes + (2 << 20)
                assert (base - offset) % (2 << 20) == 0, "physical pages: an adapter needs few entries"
            # Channels change hands over the mailbox, while the chain runs.
            began = time.monotonic()
            await life.entrance._direct.assign((1,), direct=True)
            print(f"\nthe relay took note after {1e3 * (time.monotonic() - began):.0f} ms")
            assert life.chain.mailbox.direct_seen == 0b10
            near, stale = Front(shared, 0), Front(shared, 1)
            await asyncio.to_thread(near.take)
            stale.commit(stale.control_offset, 1)
            await asyncio.to_thread(near.run, [near.submit(prompts(2)[1], 12)])
            assert int(stale.words()["lease"]) == 0
            await life.entrance._direct.assign((1,), direct=False)
            await asyncio.to_thread(stale.take)
            await asyncio.to_thread(stale.run, [stale.submit(prompts(2)[1], 12)])
            process = life.chain
        assert await process.wait() == 0
        assert adapter.closed
        assert not [each for each in os.listdir("/proc/self/fd") if "dmabuf" in _link(each)]

    asyncio.run(scene())


def _link(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # the listing's own
        return ""
