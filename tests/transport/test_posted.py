"""What the `verbs` transport asks of a device, to the bit: rights to memory and of connections, and the work it posts.

By the stand-in, which has all of it where it can be looked at. What comes of rights is tested in `test_rights`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from blink_proto.rdma.binding import RdmaError, Read, Work, Write
from blink_proto.rdma.gids import gid_of
from blink_proto.rdma.wire import Answer, Endpoint
from dpu_service.sequences.pump import Pump
from dpu_service.transport.base import TransportError
from gpu_runtime.registration import verbs
from gpu_runtime.registration.base import RegistrationError
from tests.transport.kinds import KINDS
from tests.transport.played import ADDRESS, PlayedDevice, PlayedDomain, PlayedPair, PlayedRegion, PlayedWindow
from tests.transport.site import PATIENCE, Site, ask

LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, BIND = 1, 2, 4, 16
"""Of enum ibv_access_flags. Relaxed ordering would be bit 20."""
SMALL = 64
"""Bytes that are put into the work itself, at most."""


@pytest.fixture(params=["verbs-played", "verbs-played-regions"], ids=["windows", "regions"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    assert PlayedDevice.openings == {}
    made = Site(KINDS[request.param])
    yield made
    made.close()


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[list[Work]]:
    """What goes to the devices from now on, as it is posted."""
    noted: list[list[Work]] = []
    post = PlayedPair.post

    def note(pair: PlayedPair, works: Sequence[Work], number: int) -> None:
        noted.append(list(works))
        post(pair, works, number)

    monkeypatch.setattr(PlayedPair, "post", note)
    return noted


def at(site: Site, inbound: bool, offset: int) -> int:
    """Address of a byte of the arena."""
    region = np.frombuffer(site.device.inbound if inbound else site.device.outbound, np.uint8)
    return int(region.ctypes.data) + offset


def rights_of(site: Site) -> tuple[dict[str, int], dict[str, int]]:
    """Of regions and of windows, by what they lie over."""
    places = {
        at(site, True, site.inbound.channel_offset(0)): "inbound",
        at(site, False, 0): "head",
        at(site, False, site.outbound.channel_offset(0)): "outbound",
    }
    regions, windows = {}, {}
    for one in PlayedDevice.openings.values():
        if isinstance(one, PlayedRegion):
            regions[places.get(one.address, "front end's own")] = int(one.access)
        elif isinstance(one, PlayedWindow) and one.bound:
            windows[places[one.bound[0].address]] = int(one.bound[3])
    return regions, windows


def test_memory_has_the_least_rights(site: Site) -> None:
    """The front end's own memory is for its device alone; a channel's inbound memory may be written, and not read: the
    next holder would see prompts of the one before. A region below windows has no rights for peers."""
    site.enter()
    regions, windows = rights_of(site)
    if site.kind.name == "verbs-played":
        assert windows == {"inbound": REMOTE_WRITE, "head": REMOTE_READ, "outbound": REMOTE_READ}
        wanted = {"inbound": LOCAL_WRITE | BIND, "head": BIND, "outbound": BIND}
    else:
        assert windows == {}
        wanted = {"inbound": LOCAL_WRITE | REMOTE_WRITE, "head": REMOTE_READ, "outbound": REMOTE_READ}
    assert regions == {**wanted, "front end's own": LOCAL_WRITE}


def test_only_the_runtimes_end_lets_its_peer_do_anything(site: Site) -> None:
    answer = Answer.from_bytes(site.enter().registration.answer)
    ends = {number: int(pair.access) for number, pair in PlayedDevice.pairs.items()}
    assert ends.pop(int(answer.endpoint.queue_pair)) == REMOTE_WRITE | REMOTE_READ
    assert list(ends.values()) == [0]


def test_a_commit_word_is_inline_and_alone_behind_its_payload(site: Site, posted: list[list[Work]]) -> None:
    transport, heap = site.enter().transport, site.heap()
    posted.clear()
    transport.write(heap, bytes(3000))
    transport.write(heap + 4096, bytes(SMALL))
    assert posted == [], "payload goes with the next commit"
    transport.commit(heap + 8192, 7)
    transport.commit(heap + 8192, 8)
    transport.flush(PATIENCE)
    writes = [[(work.size, work.remote, work.inline) for work in works if isinstance(work, Write)] for works in posted]
    place = at(site, True, heap)
    word = (8, place + 8192, True)
    assert writes == [[(3000, place, False), (SMALL, place + 4096, True), word], [word]]


def reads(posted: list[list[Work]]) -> list[list[int]]:
    """Addresses that were read, by what was posted together."""
    found = [[work.remote for work in works if isinstance(work, Read)] for works in posted]
    return [one for one in found if one]


def test_a_poll_asks_once_for_cursors_and_log(site: Site, posted: list[list[Work]]) -> None:
    """The log is one range or, where it wraps, two."""
    client = site.client()
    cursors = at(site, False, site.outbound.channel_offset(0) + site.outbound.channel_control_offset)
    log = at(site, False, site.log())
    ask(client, [1], 3)
    for _ in range(20):
        site.device.turn()
        client.poll()
        posted.clear()
        client.fetch()
        (asked,) = reads(posted)
        assert asked[0] == cursors
        assert len(asked) in (2, 3)
        assert all(log <= place < log + site.device.sizes.log_slots * 16 for place in asked[1:])


def test_a_turn_of_the_pump_asks_once(site: Site, posted: list[list[Work]]) -> None:
    pump = Pump(site.client(), 16, 10.0)
    pump._last_beat = time.monotonic() + 60  # with which the telemetry page is asked for too
    posted.clear()
    for _ in range(5):
        site.device.turn()
        pump._turn()
    assert [len(asked) for asked in reads(posted)] == [2] * 5


def offer() -> bytes:
    """Of a front end that never comes."""
    return Endpoint(99, 1, gid_of(ADDRESS), 0, 3).to_bytes()


@pytest.mark.parametrize(("linger", "left"), [(0.0, 1), (60.0, 2)])
def test_connections_that_were_revoked_are_ended(
    site: Site, linger: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the next session; and not at once, so that their peers are told that the keys are void."""
    monkeypatch.setattr(verbs, "LINGER_SECONDS", linger)
    for channel in (0, 1):
        site.registrar.register(offer(), (channel,)).revoke()
    assert len(PlayedDevice.pairs) == left


def test_a_queue_pair_that_cannot_be_had_leaves_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(domain: PlayedDomain, depth: int) -> PlayedPair:
        raise RdmaError("create_qp failed (Cannot allocate memory)")

    site.registrar.register(offer(), (0,)).revoke()  # with windows, memory stays registered for later sessions
    before = set(PlayedDevice.domains), PlayedDevice.opened
    with monkeypatch.context() as patched:
        patched.setattr(PlayedDomain, "queue_pair", none_left)
        with pytest.raises(RegistrationError, match="create_qp failed"):
            site.registrar.register(offer(), (0,))
        with pytest.raises(TransportError, match="create_qp failed"):
            site.kind.connector()
    assert (set(PlayedDevice.domains), PlayedDevice.opened) == before
    site.die()
    assert (PlayedDevice.domains, PlayedDevice.opened, PlayedDevice.pairs) == (set(), 0, {})


def test_an_answer_that_names_memory_outside_of_the_arena_leaves_nothing(site: Site) -> None:
    def far(answer: bytes) -> bytes:
        found = Answer.from_bytes(answer)
        head, log = found.outbound
        return Answer(found.endpoint, found.inbound, (head, replace(log, size=1 << 40))).to_bytes()

    with pytest.raises(TransportError, match="outside of the arena"):
        site.enter(forge=far)
    site.die()
    assert (PlayedDevice.domains, PlayedDevice.opened, PlayedDevice.pairs) == (set(), 0, {})
    assert PlayedDevice.openings == {}
