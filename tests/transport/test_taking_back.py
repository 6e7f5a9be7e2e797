"""Contract of transports with registrations: a device that does not take back what a front end was given."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn

import pytest

from blink_proto.rdma.binding import RdmaError
from gpu_runtime.control.errors import NotReadyError
from gpu_runtime.control.sessions import REVOKE_SECONDS, Sessions
from gpu_runtime.registration import doca
from gpu_runtime.registration.base import Registration, RegistrationError
from tests.transport.kinds import DOCA_ADDRESS, Kind
from tests.transport.played import PlayedDevice, PlayedPair, PlayedRegion, PlayedWindow
from tests.transport.site import Site
from tests.transport.test_rights import writes_fail

Trouble = Callable[[pytest.MonkeyPatch], None]


def refuses(*closed: type) -> Trouble:
    """The played device keeps things of these kinds."""

    def close(self: object) -> NoReturn:
        raise RdmaError("close failed (Device or resource busy)")

    def make(patch: pytest.MonkeyPatch) -> None:
        for one in closed:
            patch.setattr(one, "close", close)

    return make


def fails(function: str) -> Trouble:
    """A function of DOCA's stand-in."""
    return lambda patch: patch.setenv("DOCA_SHIM_FAIL", f"{function}=17")


def stays_busy(patch: pytest.MonkeyPatch) -> None:
    """The stand-in's contexts do not become idle."""
    patch.setenv("DOCA_SHIM_BUSY", "1")
    patch.setattr(doca, "STOP_SECONDS", 0.1)


TROUBLES: dict[str, dict[str, Trouble]] = {
    "verbs-played": {"windows": refuses(PlayedWindow)},
    "verbs-played-regions": {"regions": refuses(PlayedRegion, PlayedPair)},
    "doca": {
        "context": fails("doca_ctx_stop"),
        "connection": fails("doca_rdma_destroy"),
        "memory": fails("doca_mmap_destroy"),
        "engine": fails("doca_pe_destroy"),
        "busy": stays_busy,
    },
}


@pytest.fixture
def troubles(kind: Kind) -> dict[str, Trouble]:
    """By name."""
    if kind.name not in TROUBLES or DOCA_ADDRESS:
        pytest.skip("cannot be played there")
    return TROUBLES[kind.name]


def test_what_is_not_taken_back_is_said_and_taken_at_the_next_try(
    troubles: dict[str, Trouble], guarded_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trouble in troubles.values():
        entrance = guarded_site.enter()
        entrance.transport.commit(guarded_site.heap(), 1)
        with monkeypatch.context() as patched:
            trouble(patched)
            for _ in range(3):
                with pytest.raises(RegistrationError):
                    entrance.registration.revoke()
        entrance.registration.revoke()
        writes_fail(guarded_site, entrance, guarded_site.heap())
        entrance.registration.revoke()


def test_a_session_stays_until_its_front_end_is_shut_out(
    troubles: dict[str, Trouble], guarded_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its channel goes to nobody else meanwhile, and each look of the control plane tries again."""
    sessions, name = Sessions(2, lambda channel: False), guarded_site.kind.name

    async def give(channels: tuple[int, ...]) -> Registration:
        return guarded_site.enter(*channels).registration

    async def scene(trouble: Trouble) -> None:
        one = await sessions.open("a", 1, name, "", give)
        one.lived = time.monotonic() - REVOKE_SECONDS
        with monkeypatch.context() as patched:
            trouble(patched)
            for again in (sessions.end(one), sessions.open("a", 1, name, "", give)):
                with pytest.raises(NotReadyError, match="what 'a' was given cannot be taken away yet"):
                    await again
            await sessions.sweep(time.monotonic())
            assert not one.revoked
            assert (sessions.free(), sessions.all()) == ([1], [one])
        await sessions.sweep(time.monotonic())
        assert one.revoked
        await sessions.end(one)
        assert sessions.free() == [0, 1]

    for trouble in troubles.values():
        asyncio.run(scene(trouble))


def test_a_connection_that_stays_too_is_not_forgotten(
    kind: Kind, new_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that stays registered is out of reach when nobody is connected to it, and not before."""
    if kind.name != "verbs-played-regions":
        pytest.skip("cannot be played there")
    before = set(PlayedDevice.pairs)
    entrance = new_site().enter()
    (own,) = (pair for pair in set(PlayedDevice.pairs) - before if PlayedDevice.pairs[pair].access)
    with monkeypatch.context() as kept:
        refuses(PlayedRegion)(kept)
        with monkeypatch.context() as patched:
            refuses(PlayedPair)(patched)
            for _ in range(2):
                with pytest.raises(RegistrationError):
                    entrance.registration.revoke()
        assert own in PlayedDevice.pairs
        entrance.registration.revoke()
        assert own not in PlayedDevice.pairs
