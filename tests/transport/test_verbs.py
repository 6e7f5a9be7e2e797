"""The `verbs` transport's own promises, by every binding: memory windows, what is said when there are none, and no call
that stops the threads of the process. Real ones: `tests/rdma`.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from blink_proto.rdma.binding import Access, RdmaError, open_device
from blink_proto.rdma.choice import RdmaChoice
from blink_proto.rdma.gids import gid_of
from blink_proto.rdma.wire import Answer, Endpoint
from dpu_service.transport.base import TransportError
from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.registration.parts import Part
from gpu_runtime.registration.verbs import VerbsRegistrar
from tests.transport.kinds import RDMA_ADDRESS, DeviceMemory, Kind
from tests.transport.played import ADDRESS, PlayedDevice, PlayedDomain, PlayedPair, PlayedRegion, PlayedWindow
from tests.transport.site import PATIENCE, Site

WITH_WINDOWS = ("verbs-pyverbs", "verbs-played")
WITHOUT = {
    "verbs": "the binding ibverbs has no memory windows",
    "verbs-played-regions": "played0 has no memory windows",
}
QUIET_ADDRESS = os.environ.get("BLINK_RDMA_QUIET_ADDRESS", "")
"""Of a device on whose network nobody else is."""


@pytest.fixture
def verbs_site(kind: Kind, new_site: Callable[..., Site]) -> Site:
    if not kind.name.startswith("verbs"):
        pytest.skip("not by verbs")
    return new_site()


def regions_of(kind: Kind) -> int:
    """Memory regions on the device, by somebody else's count."""
    if "played" in kind.name:
        return sum(isinstance(one, PlayedRegion) for one in PlayedDevice.openings.values())
    rdma = shutil.which("rdma", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    assert rdma is not None
    said = subprocess.run([rdma, "resource", "show", "mr"], capture_output=True, text=True, check=True).stdout
    return said.count("mrn ")


def test_sessions_with_windows_pin_nothing_anew_and_those_without_leave_nothing(kind: Kind, verbs_site: Site) -> None:
    counts = [regions_of(kind)]
    for turn in range(1, 4):
        entrance = verbs_site.enter()
        entrance.transport.commit(verbs_site.heap(), turn)
        entrance.transport.flush(PATIENCE)
        entrance.registration.revoke()
        entrance.transport.close()
        counts.append(regions_of(kind) - counts[0])
    inbound_head_and_outbound = 3
    assert counts[1:] == [inbound_head_and_outbound if kind.name in WITH_WINDOWS else 0] * 3


def test_a_window_gives_no_more_than_it_says(kind: Kind, verbs_site: Site) -> None:
    """The region below a window has no rights of its own, by which its key would be of use."""
    answer = Answer.from_bytes(verbs_site.enter().registration.answer)
    if kind.name == "verbs-played":
        below = [one for one in PlayedDevice.openings.values() if isinstance(one, PlayedRegion)]
        beneath = [one for one in below if one.address in {int(w.address) for w in answer.inbound + answer.outbound}]
        assert len(beneath) == 3
        assert not any(one.access & (Access.REMOTE_READ | Access.REMOTE_WRITE) for one in beneath)
    else:
        with pytest.raises(TransportError, match="within the memory of this session"):
            verbs_site.enter().transport.commit(verbs_site.heap(1), 1)


def test_how_memory_is_given_is_said(kind: Kind, caplog: pytest.LogCaptureFixture, new_site: Any) -> None:
    if not kind.name.startswith("verbs"):
        pytest.skip("not by verbs")
    caplog.set_level(logging.INFO, "gpu_runtime")
    new_site()
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("verbs by ") for line in said)
    fallen_back = [line for line in said if line.startswith("no memory windows")]
    assert len(fallen_back) == (kind.name in WITHOUT)
    assert all(WITHOUT[kind.name] in line for line in fallen_back)


class Unbindable(DeviceMemory):
    """Memory over which no window can be bound, as the kernel has it for dma-bufs."""

    def register(self, domain: Any, part: Part, access: Any) -> Any:
        if access & Access.BIND_WINDOWS:
            raise RdmaError("reg_mr failed (Invalid argument)")
        return super().register(domain, part, access)


class Owned(DeviceMemory):
    """Memory that somebody else registers (nvidia-peermem), and gives back while he answers."""

    no_windows = "its owner registers it"
    answers = True

    def register(self, domain: Any, part: Part, access: Any) -> Any:
        region = super().register(domain, part, access)
        forget = region.close

        def give_back() -> None:
            if not Owned.answers:
                raise RdmaError("the owner does not answer")
            forget()

        region.close = give_back
        return region


def offer() -> bytes:
    return Endpoint(99, 1, gid_of(ADDRESS), 0, 3).to_bytes()


def played_registrar(site: Site, memory: type[DeviceMemory] = DeviceMemory) -> VerbsRegistrar:
    return VerbsRegistrar(memory(site.device), site.device.sizes, RdmaChoice("", ADDRESS, "played"))


@pytest.fixture
def played_site(kind: Kind, verbs_site: Site) -> Site:
    if kind.name != "verbs-played":
        pytest.skip("looks into the stand-in")
    return verbs_site


def test_memory_that_no_window_can_be_bound_over(played_site: Site, caplog: pytest.LogCaptureFixture) -> None:
    registrar = played_registrar(played_site, Unbindable)
    registration = registrar.register(offer(), (0,))
    (window,) = Answer.from_bytes(registration.answer).inbound
    assert isinstance(PlayedDevice.openings[window.key], PlayedRegion)
    assert "no memory windows, so each session has memory regions of its own: reg_mr failed" in caplog.text
    registration.revoke()
    assert window.key not in PlayedDevice.openings
    registrar.close()


def test_memory_that_its_owner_does_not_give_back_is_out_of_reach(
    played_site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    registrar = played_registrar(played_site, Owned)
    before = set(PlayedDevice.pairs), set(PlayedDevice.openings)
    registration = registrar.register(offer(), (0,))
    assert "no memory windows, so each session has memory regions of its own: its owner registers it" in caplog.text
    (pair,) = set(PlayedDevice.pairs) - before[0]
    with monkeypatch.context() as patched:
        patched.setattr(Owned, "answers", False)
        registration.revoke()
        assert pair not in PlayedDevice.pairs, "nobody is connected to it any more"
        assert len(set(PlayedDevice.openings) - before[1]) == 3
        registration.revoke()
        registrar._end_revoked(float("inf"))
        assert "connection was ended, as its memory stays registered: the owner does not answer" in caplog.text
        assert "is not given back yet: the owner does not answer" in caplog.text
        other = registrar.register(offer(), (1,))
        assert len(set(PlayedDevice.openings) - before[1]) == 6
    other.revoke()
    assert len(set(PlayedDevice.openings) - before[1]) == 3
    registrar.close()
    assert (set(PlayedDevice.pairs), set(PlayedDevice.openings)) == before


def test_a_registration_that_fails_half_way_leaves_nothing(played_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    registrar = played_registrar(played_site, Owned)
    before = set(PlayedDevice.pairs), set(PlayedDevice.openings)
    seen: list[Part] = []
    register = Owned.register

    def fails_at_the_last(self: Owned, domain: Any, part: Part, access: Any) -> Any:
        seen.append(part)
        if len(seen) == 3:
            raise RdmaError("no more memory can be pinned")
        return register(self, domain, part, access)

    monkeypatch.setattr(Owned, "register", fails_at_the_last)
    with pytest.raises(RegistrationError, match="can be pinned"):
        registrar.register(offer(), (0,))
    assert (set(PlayedDevice.pairs), set(PlayedDevice.openings)) == before
    registrar.close()


def test_a_window_that_cannot_be_bound_leaves_nothing(played_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    registrar = played_registrar(played_site)
    registrar.register(offer(), (0,)).revoke()
    with monkeypatch.context() as patched:
        patched.setattr(PlayedWindow, "bind", lambda *_: False)
        with pytest.raises(RegistrationError, match="memory window bind error"):
            registrar.register(offer(), (0,))
    assert set(PlayedDevice.pairs) == set()
    assert not any(isinstance(one, PlayedWindow) for one in PlayedDevice.openings.values())
    registrar.close()


def test_a_channel_that_goes_to_another_set_is_registered_anew(played_site: Site) -> None:
    registrar, before = played_registrar(played_site), set(PlayedDevice.openings)
    registrar.register(offer(), (0,)).revoke()
    both = registrar.register(offer(), (0, 1))
    answer = Answer.from_bytes(both.answer)
    assert (len(answer.inbound), len(answer.outbound)) == (2, 3)
    opened = [PlayedDevice.openings[key] for key in set(PlayedDevice.openings) - before]
    assert sorted(type(one).__name__ for one in opened) == ["PlayedRegion"] * 5 + ["PlayedWindow"] * 5
    both.revoke()
    registrar.close()
    assert set(PlayedDevice.openings) == before
    assert set(PlayedDevice.pairs) == set()


def domains_of_pairs() -> list[PlayedDomain]:
    """In which there is a queue pair, of every one."""
    return [pair.domain for pair in PlayedDevice.pairs.values()]


@pytest.mark.parametrize("binding", ["played", "played-regions"])
def test_no_two_sessions_are_ever_in_one_protection_domain(
    played_site: Site, binding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one channel one after the other, or of several; also when a connection cannot be ended, and when none was."""
    domains, opened = set(PlayedDevice.domains), PlayedDevice.opened
    choice = RdmaChoice("", ADDRESS, binding)
    registrar = VerbsRegistrar(DeviceMemory(played_site.device), played_site.device.sizes, choice)
    held = []

    def enter(*channels: int) -> None:
        held.append(registrar.register(offer(), channels))
        assert len(set(domains_of_pairs())) == len(PlayedDevice.pairs)

    for channels in ((0,), (0,), (1,), (0, 1), (0,), (1,)):
        enter(*channels)
        held[-1].revoke()
    with monkeypatch.context() as patched:
        refuse = "destroy_qp failed (Device or resource busy)"

        def close(self: PlayedPair) -> None:
            raise RdmaError(refuse)

        patched.setattr(PlayedPair, "close", close)
        for channels in ((0,), (0,), (0, 1), (1,)):
            enter(*channels)
            held[-1].revoke()
    enter(0)
    enter(0)
    enter(0, 1)
    for one in held:
        one.revoke()
    registrar.close()
    assert (PlayedDevice.domains, PlayedDevice.opened, PlayedDevice.pairs) == (domains, opened, {})


@pytest.mark.parametrize("refusing", [PlayedRegion, PlayedWindow, PlayedPair, PlayedDomain])
def test_what_is_not_given_back_when_channels_change_hands_is_given_back_later(
    played_site: Site, refusing: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody's session hangs on it."""
    domains, openings = set(PlayedDevice.domains), set(PlayedDevice.openings)
    registrar = played_registrar(played_site)
    registrar.register(offer(), (0,)).revoke()
    with monkeypatch.context() as patched:

        def close(self: object) -> None:
            raise RdmaError("busy")

        patched.setattr(refusing, "close", close)
        later = registrar.register(offer(), (0, 1))
    later.revoke()
    registrar.close()
    assert (PlayedDevice.domains, set(PlayedDevice.openings), PlayedDevice.pairs) == (domains, openings, {})


def test_windows_go_with_a_connection_that_has_failed(played_site: Site) -> None:
    entrance = played_site.enter()
    (window,) = Answer.from_bytes(entrance.registration.answer).inbound
    for pair in PlayedDevice.pairs.values():
        pair.fail()
    entrance.registration.revoke()
    assert window.key not in PlayedDevice.openings


def test_what_a_device_cannot_do_with_dma_bufs_is_said(kind: Kind, verbs_site: Site) -> None:
    """Soft-RoCE knows none, whatever the descriptor is for; no key comes of it, and the domain goes on."""
    binding = {"verbs": "ibverbs", "verbs-pyverbs": "pyverbs"}.get(kind.name)
    if binding is None:
        pytest.skip("played")
    device = open_device("", RDMA_ADDRESS, (binding,))
    domain, file = device.domain(), os.memfd_create("no-dma-buf")
    os.ftruncate(file, 1 << 16)
    with pytest.raises(RdmaError, match=r"(?i)not supported"):
        domain.register_dmabuf(file, 0, 4096, 1 << 40, Access.REMOTE_READ)
    os.close(file)
    ordinary = mmap.mmap(-1, 4096)
    at = ctypes.addressof(ctypes.c_char.from_buffer(ordinary))
    domain.register(at, 4096, Access.REMOTE_READ).close()
    for part in (domain, device):
        part.close()


def longest_stop(failing: Callable[[], object]) -> tuple[float, float]:
    """Seconds that something took, and the longest in which another thread did not get on meanwhile."""
    over, longest = threading.Event(), [0.0]

    def count() -> None:
        before = time.monotonic()
        while not over.is_set():
            time.sleep(0.001)
            now = time.monotonic()
            longest[0], before = max(longest[0], now - before), now

    counter = threading.Thread(target=count)
    counter.start()
    begun = time.monotonic()
    with pytest.raises(RdmaError):
        failing()
    took = time.monotonic() - begun
    over.set()
    counter.join()
    return took, longest[0]


def test_a_peer_that_nobody_is_stops_no_other_thread(kind: Kind, verbs_site: Site) -> None:
    if not QUIET_ADDRESS:
        pytest.skip("no network with nobody on it; make test-rdma has one")
    device = open_device("", QUIET_ADDRESS, ("pyverbs" if kind.name == "verbs-pyverbs" else "ibverbs",))
    domain = device.domain()
    pair = domain.queue_pair(1)
    absent = QUIET_ADDRESS.rpartition(".")[0] + ".99"
    took, longest = longest_stop(lambda: pair.connect(Endpoint(99, 1, gid_of(absent), 0, 3), Access(0)))
    for part in (pair, domain, device):
        part.close()
    assert took > 0.5, "somebody was asked for the address"
    assert longest < min(0.5, took / 2)
