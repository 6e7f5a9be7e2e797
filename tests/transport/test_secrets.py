"""Contract of transports: what reaches the arena – numbers of queue pairs and packets, keys, addresses, names – shows
nowhere: in no object, no error with what is behind it, no line of a log at any level.
"""

from __future__ import annotations

import gc
import json
import logging
import re
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterator

import pytest

from blink_proto.doca.blobs import Answer as DocaAnswer
from blink_proto.doca.blobs import Offer as DocaOffer
from blink_proto.rdma.wire import Answer, Endpoint
from dpu_service import wire
from dpu_service.logs import describe
from dpu_service.transport.base import Range, TransportError
from gpu_runtime.registration.base import RegistrationError
from tests.transport.kinds import Kind
from tests.transport.site import PATIENCE, Entrance, Site

OURS = ("blink_proto", "dpu_service", "gpu_runtime")
SMALLEST = 100_000
"""Smaller numbers are found anywhere; real devices count queue pairs from a small number."""


def secrets_of(kind: Kind, offer: bytes, answer: bytes) -> set[int | bytes]:
    """What is secret in what both ends told each other."""
    if kind.name == "shm":
        return {name.encode().lstrip(b"/") for name in json.loads(answer).values()}
    if kind.name == "doca":
        granted = DocaAnswer.decode(answer)
        exports = [part for keys in granted.channels.values() for part in (keys.inbound, keys.outbound)]
        return {DocaOffer.decode(offer).connection, granted.connection, granted.head, *exports}
    found, mine = Answer.from_bytes(answer), Endpoint.from_bytes(offer)
    numbers = [number for end in (mine, found.endpoint) for number in (end.queue_pair, end.first_packet)]
    numbers += [number for one in (*found.inbound, *found.outbound) for number in (one.key, one.address)]
    return {int(number) for number in numbers if number >= SMALLEST}


def shown(secret: int | bytes, text: str) -> bool:
    """Whether a text has it in any form that one would look for."""
    if isinstance(secret, int):
        return re.search(rf"(?i)(?<![0-9a-f])(?:{secret}|(?:0x)?0*{secret:x})(?![0-9a-f])", text) is not None
    head = secret[:24]
    forms = (head.hex(), b64encode(head).decode()[:24], repr(head)[2:-1], head.decode("latin-1"))
    return any(form in text for form in forms)


def places_of(kind: Kind, answer: bytes) -> list[range]:
    """Addresses that are secret."""
    if not kind.name.startswith("verbs"):
        return []
    found = Answer.from_bytes(answer)
    return [range(one.address, one.address + one.size) for one in (*found.inbound, *found.outbound)]


def points_into(places: list[range], text: str) -> bool:
    """Whether a number in a text is one of these addresses."""
    words = re.findall(r"(?i)(?<![0-9a-f])(?:0x)?([0-9a-f]{9,16})(?![0-9a-f])", text)
    numbers = [int(word, 16) for word in words] + [int(word) for word in words if word.isdigit()]
    return any(number in place for place in places for number in numbers)


def ours() -> Iterator[object]:
    """Every object of both programs that is alive."""
    for thing in gc.get_objects():
        if str(getattr(type(thing), "__module__", "")).startswith(OURS):
            yield thing


def told_by(failing: Callable[[], object]) -> str:
    """All that an error can be made to say."""
    try:
        failing()
    except (TransportError, RegistrationError) as error:
        return f"{error!r} {describe(error)} {''.join(traceback.format_exception(error))}"
    raise AssertionError("nothing failed")


def refused_write(site: Site, entrance: Entrance) -> str:
    def write() -> None:
        entrance.transport.commit(site.heap(), 7)
        entrance.transport.flush(PATIENCE)

    return told_by(write)


def test_the_numbers_would_be_found() -> None:
    for text in ("key 6204161", "0x5EAB01", "005eab01", "[5eab01]", "key=0x005eab01,"):
        assert shown(6204161, text)
    for text in ("62041611", "a5eab01", "5eab012"):
        assert not shown(6204161, text)
    place = [range(0x7F0000001000, 0x7F0000002000)]
    assert points_into(place, "at 0x7f0000001008")
    assert points_into(place, f"remote={0x7F0000001FFF}")
    assert not points_into(place, "at 0x7f0000002000")
    assert shown(b"SHIMMEM\0", "U0hJTU1FTQA=")
    assert shown(b"SHIMMEM\0", r"b'SHIMMEM\x00'")


def test_nothing_shows_what_is_secret(kind: Kind, site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secrets: set[int | bytes] = set()
    texts: list[str] = []
    connector = kind.connector()
    registration = site.registrar.register(connector.offer, (0,))
    secrets |= secrets_of(kind, connector.offer, registration.answer)
    places = places_of(kind, registration.answer)
    transport = connector.connect(registration.answer, site.device.sizes, 0)
    entrance = Entrance(transport, registration, 0)
    transport.write(site.heap(), bytes(3000))
    transport.commit(site.heap(), 1)
    alive = list(ours())  # with what is under way
    transport.fetch(Range(site.log(), 8))
    alive += ours()
    texts += [f"{thing!r} {thing}" for thing in alive]
    texts += [repr(wire.Offer(1, connector.offer)), str({"offer": wire.Offer(1, connector.offer)})]
    transport.flush(PATIENCE)
    texts.append(told_by(lambda: transport.commit(1 << 40, 1)))
    for cut in (0, 5, 40, -1):
        texts.append(told_by(lambda cut=cut: site.enter(forge=lambda answer: answer[:cut])))  # type: ignore[misc]
    texts.append(told_by(lambda: site.registrar.register(b"x" + connector.offer, (0,))))
    registration.revoke()
    if kind.guards:
        texts.append(refused_write(site, entrance))
    transport.close()
    texts.append(told_by(lambda: transport.commit(site.heap(), 1)))
    texts += [f"{record.getMessage()} {record.__dict__}" for record in caplog.records]
    assert len(secrets) >= 2
    assert len(alive) > 5
    found = [(secret, text[:300]) for secret in secrets for text in texts if shown(secret, text)]
    assert found == []
    assert [text[:300] for text in texts if points_into(places, text)] == []
