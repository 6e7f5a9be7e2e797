"""Contract of transports with registrations: keys, who may reach what, and how it ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from blink_proto import arena
from dpu_service.transport.base import Range, TransportError
from tests.transport.forging import Forge
from tests.transport.kinds import Kind
from tests.transport.site import PATIENCE, Entrance, Site


def writes_fail(site: Site, entrance: Entrance, place: int) -> None:
    """A commit raises, now or as soon as the other end has refused it, and then again; nothing has changed."""
    before = bytes(site.device.inbound)

    def write() -> None:
        entrance.transport.commit(place, 0xBAD)
        entrance.transport.flush(PATIENCE)

    with pytest.raises(TransportError, match=site.kind.refusal):
        write()
    with pytest.raises(TransportError, match=site.kind.refusal):
        entrance.transport.commit(place, 0xBAD)
    assert bytes(site.device.inbound) == before


def test_what_is_secret_shows_nothing_of_itself(site: Site) -> None:
    entrance = site.enter()
    secret = entrance.registration.answer
    for thing in (entrance.transport, entrance.registration):
        assert secret.hex() not in repr(thing)
        assert str(secret) not in repr(thing)


def test_every_session_has_keys_of_its_own(guarded_site: Site) -> None:
    answers = [guarded_site.enter().registration.answer for _ in range(4)]
    assert len(set(answers)) == 4


def test_revoked_keys_write_nothing_any_more(guarded_site: Site) -> None:
    entrance = guarded_site.enter()
    entrance.transport.commit(guarded_site.heap(), 1)
    entrance.transport.flush(PATIENCE)
    assert guarded_site.written(guarded_site.heap()) == 1
    entrance.registration.revoke()
    writes_fail(guarded_site, entrance, guarded_site.heap())


def test_revoked_keys_read_nothing_any_more(guarded_site: Site) -> None:
    entrance = guarded_site.enter()
    entrance.registration.revoke()
    guarded_site.publish(guarded_site.log(), 0x5EC2E7)

    def fails() -> bool:
        try:
            entrance.transport.fetch(Range(guarded_site.log(), 8))
            assert int.from_bytes(entrance.transport.read(guarded_site.log(), 8), "little") != 0x5EC2E7
        except TransportError:
            return True
        return False

    guarded_site.until(fails)


def test_one_front_end_is_revoked_and_the_other_goes_on(guarded_site: Site) -> None:
    first, second = guarded_site.enter(0), guarded_site.enter(1)
    first.registration.revoke()
    writes_fail(guarded_site, first, guarded_site.heap(0))
    second.transport.commit(guarded_site.heap(1), 2)
    second.transport.flush(PATIENCE)
    assert guarded_site.written(guarded_site.heap(1)) == 2


def test_a_channel_that_was_not_handed_out_cannot_be_named(guarded_site: Site) -> None:
    entrance = guarded_site.enter(0)
    with pytest.raises(TransportError):
        entrance.transport.commit(guarded_site.heap(1), 1)
    with pytest.raises(TransportError):
        entrance.transport.read(guarded_site.log(1), 8)


@pytest.fixture
def forge(kind: Kind) -> Forge:
    """Changes what a runtime answers."""
    if kind.forge is None:
        pytest.skip("memory that is shared by its name has no keys")
    return kind.forge


@pytest.fixture
def open_forge(forge: Forge) -> Forge:
    """One that knows how keys and addresses are written."""
    if forge.opaque:
        pytest.skip(forge.opaque)
    return forge


def test_a_wrong_key_writes_nothing(open_forge: Forge, site: Site) -> None:
    writes_fail(site, site.enter(forge=open_forge.with_a_wrong_key), site.heap())


def test_memory_beside_the_window_is_out_of_reach(open_forge: Forge, site: Site) -> None:
    entrance = site.enter(forge=lambda answer: open_forge.moved(answer, site.inbound.channel_bytes))
    writes_fail(site, entrance, site.heap(0))


def test_another_front_ends_keys_are_of_no_use(forge: Forge, site: Site) -> None:
    victim = site.enter(1)
    entrance = site.enter(0, forge=lambda answer: forge.with_inbound_of(answer, victim.registration.answer))
    writes_fail(site, entrance, site.heap(0))
    victim.transport.commit(site.heap(1), 3)
    victim.transport.flush(PATIENCE)
    assert site.written(site.heap(1)) == 3


def test_an_earlier_sessions_keys_are_of_no_use(forge: Forge, site: Site) -> None:
    """Of the same front end and channel, after its end."""
    first = site.enter()
    answer = first.registration.answer
    first.registration.revoke()
    writes_fail(site, site.enter(forge=lambda later: forge.with_inbound_of(later, answer)), site.heap())


def test_no_session_has_a_key_of_an_earlier_one(forge: Forge, site: Site) -> None:
    keys: list[object] = []
    for _ in range(5):
        entrance = site.enter()
        keys += forge.keys(entrance.registration.answer)
        entrance.transport.commit(site.heap(), len(keys))
        entrance.transport.flush(PATIENCE)
        assert site.written(site.heap()) == len(keys)
        entrance.registration.revoke()
    assert len(keys) == 15
    assert len(set(keys)) == len(keys)


def test_a_sessions_keys_are_of_no_use_to_an_older_connection_to_the_same_channel(forge: Forge, site: Site) -> None:
    successors: list[Entrance] = []

    def later(answer: bytes) -> bytes:
        successors.append(site.enter())
        return forge.with_inbound_of(answer, successors[0].registration.answer)

    writes_fail(site, site.enter(forge=later), site.heap())
    successors[0].transport.commit(site.heap(), 4)
    successors[0].transport.flush(PATIENCE)
    assert site.written(site.heap()) == 4


EVEN = arena.Sizes(channels=2, submit_slots=4, cancel_slots=2, log_slots=64, heap_tokens=256)
"""A channel's inbound memory is as long as its outbound memory, so that keys fit in each other's places."""


def test_outbound_memory_cannot_be_written(forge: Forge, new_site: Callable[..., Site]) -> None:
    site = new_site(sizes=EVEN)
    entrance = site.enter(forge=forge.writing_outbound)
    before = bytes(site.device.outbound)
    writes_fail(site, entrance, site.inbound.channel_offset(0))
    assert bytes(site.device.outbound) == before


def test_inbound_memory_cannot_be_read(forge: Forge, new_site: Callable[..., Site]) -> None:
    """Who holds a channel next would see prompts of the one before. Refused is the first read of the channel."""
    site = new_site(sizes=EVEN)
    with pytest.raises(TransportError, match=site.kind.refusal):
        site.enter(forge=forge.reading_inbound)


@pytest.mark.parametrize("cut", [0, 5, 40, -1])
def test_answers_that_are_cut_are_refused(site: Site, cut: int) -> None:
    with pytest.raises(TransportError):
        site.enter(forge=lambda answer: answer[:cut])
