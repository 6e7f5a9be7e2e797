"""Contract of transports with registrations: keys, who may reach what, and how it ends."""

from __future__ import annotations

import pytest

from blink_proto.rdma.wire import Answer, Window
from dpu_service.transport.base import Range, TransportError
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


def forged(kind: Kind, change: object) -> object:
    """Skips where the answer is not one that this suite can forge."""
    if not kind.name.startswith("verbs"):
        pytest.skip("the answer is opaque to this suite")
    return change


def other_windows(answer: bytes, key_of: bytes | None = None, shift: int = 0, flip: int = 0) -> bytes:
    """The answer with its inbound windows moved, under another key, or under those of another answer."""
    found = Answer.from_bytes(answer)
    keys = found.inbound if key_of is None else Answer.from_bytes(key_of).inbound
    inbound = tuple(
        Window(one.offset, one.size, other.address + shift, other.key ^ flip)
        for one, other in zip(found.inbound, keys, strict=True)
    )
    return Answer(found.endpoint, inbound, found.outbound).to_bytes()


def test_a_wrong_key_writes_nothing(kind: Kind, guarded_site: Site) -> None:
    forged(kind, None)
    entrance = guarded_site.enter(forge=lambda answer: other_windows(answer, flip=0x5A))
    writes_fail(guarded_site, entrance, guarded_site.heap())


def test_memory_beside_the_window_is_out_of_reach(kind: Kind, guarded_site: Site) -> None:
    forged(kind, None)
    entrance = guarded_site.enter(
        0, forge=lambda answer: other_windows(answer, shift=guarded_site.inbound.channel_bytes)
    )
    writes_fail(guarded_site, entrance, guarded_site.heap(0))


def test_another_front_ends_keys_are_of_no_use(kind: Kind, guarded_site: Site) -> None:
    forged(kind, None)
    victim = guarded_site.enter(1)
    entrance = guarded_site.enter(0, forge=lambda answer: other_windows(answer, key_of=victim.registration.answer))
    writes_fail(guarded_site, entrance, guarded_site.heap(0))
    victim.transport.commit(guarded_site.heap(1), 3)
    victim.transport.flush(PATIENCE)
    assert guarded_site.written(guarded_site.heap(1)) == 3


def test_no_session_has_a_key_of_an_earlier_one(kind: Kind, guarded_site: Site) -> None:
    forged(kind, None)
    keys: list[int] = []
    for _ in range(5):
        entrance = guarded_site.enter()
        answer = Answer.from_bytes(entrance.registration.answer)
        keys += [one.key for one in (*answer.inbound, *answer.outbound)]
        entrance.transport.commit(guarded_site.heap(), len(keys))
        entrance.transport.flush(PATIENCE)
        assert guarded_site.written(guarded_site.heap()) == len(keys)
        entrance.registration.revoke()
    assert len(set(keys)) == len(keys)


def test_a_sessions_keys_are_of_no_use_to_an_older_connection_to_the_same_channel(kind: Kind, site: Site) -> None:
    forged(kind, None)
    successors: list[Entrance] = []

    def later(answer: bytes) -> bytes:
        successors.append(site.enter())
        new, old = Answer.from_bytes(successors[0].registration.answer), Answer.from_bytes(answer)
        return Answer(old.endpoint, new.inbound, old.outbound).to_bytes()

    writes_fail(site, site.enter(forge=later), site.heap())
    successors[0].transport.commit(site.heap(), 4)
    successors[0].transport.flush(PATIENCE)
    assert site.written(site.heap()) == 4


def test_outbound_memory_cannot_be_written(kind: Kind, guarded_site: Site) -> None:
    forged(kind, None)

    def swapped(answer: bytes) -> bytes:
        found = Answer.from_bytes(answer)
        log = found.outbound[-1]
        inbound = tuple(Window(one.offset, log.size, log.address, log.key) for one in found.inbound)
        return Answer(found.endpoint, inbound, found.outbound).to_bytes()

    entrance = guarded_site.enter(forge=swapped)
    before = bytes(guarded_site.device.outbound)
    writes_fail(guarded_site, entrance, guarded_site.inbound.channel_offset(0))
    assert bytes(guarded_site.device.outbound) == before


def test_inbound_memory_cannot_be_read(kind: Kind, guarded_site: Site) -> None:
    """Who holds a channel next would see prompts of the one before. Refused is the first read of the channel."""
    forged(kind, None)

    def swapped(answer: bytes) -> bytes:
        found = Answer.from_bytes(answer)
        (into,), (head, log) = found.inbound, found.outbound
        outbound = (head, Window(log.offset, min(log.size, into.size), into.address, into.key))
        return Answer(found.endpoint, found.inbound, outbound).to_bytes()

    with pytest.raises(TransportError, match=guarded_site.kind.refusal):
        guarded_site.enter(forge=swapped)


@pytest.mark.parametrize("cut", [0, 5, 40, -1])
def test_answers_that_are_cut_are_refused(site: Site, cut: int) -> None:
    with pytest.raises(TransportError):
        site.enter(forge=lambda answer: answer[:cut])
