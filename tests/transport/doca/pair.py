"""Both ends of the `doca` transport over the stand-in for its libraries; the runtime may be a process of its own.

Run as a program it is that runtime: `python -m tests.transport.doca.pair LIBRARIES`. It prints its arena's names, then
takes lines: an offer (hexadecimal) is answered with the session's answer, `revoke` with `revoked`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blink_proto import arena
from blink_proto.doca.settings import DocaSettings
from dpu_service.transport.doca.connector import DocaConnector
from dpu_service.transport.doca.transport import DocaTransport
from gpu_runtime.registration.doca import DocaRegistrar, DocaRegistration
from gpu_runtime.registration.memory import HostMemory
from gpu_runtime.shared_arena import ArenaLimits, ArenaName, SharedArena
from tests.transport.doca.build import SHIM_ADDRESS

SIZES = arena.Sizes(channels=3, submit_slots=8, cancel_slots=8, log_slots=64, heap_tokens=1 << 16)
INBOUND, OUTBOUND = arena.InboundLayout(SIZES), arena.OutboundLayout(SIZES)
LIMITS = ArenaLimits(nonce=11, epoch=22, vocab_size=33, max_model_tokens=44, max_sequence_tokens=55)


def settings(libraries: Path | str) -> DocaSettings:
    """For both ends."""
    return DocaSettings(address=SHIM_ADDRESS, libraries=str(libraries))


def registrar(shared: SharedArena, libraries: Path | str) -> DocaRegistrar:
    """For an arena in this process's memory."""
    return DocaRegistrar(HostMemory(shared), SIZES, settings(libraries))


class Pair:
    """A front end and a runtime of this process."""

    def __init__(self, libraries: Path) -> None:
        self.libraries = libraries
        self.arena = SharedArena.create(SIZES, LIMITS)
        self.registrar = registrar(self.arena, libraries)
        self._transports: list[DocaTransport] = []
        self._registrations: list[DocaRegistration] = []

    def connect(self, channel: int = 1) -> tuple[DocaTransport, DocaRegistration]:
        """Another front end."""
        connector = DocaConnector(settings(self.libraries))
        registration = self.registrar.register(connector.offer, (channel,))
        self._registrations.append(registration)
        try:
            transport = connector.connect(registration.answer, SIZES, channel)
        finally:
            connector.close()
        self._transports.append(transport)
        return transport, registration

    def close(self) -> None:
        """Both ends, the front ends' first."""
        for transport in self._transports:
            transport.close()
        for registration in self._registrations:
            registration.revoke()
        self.arena.unlink()


class Runtime:
    """A runtime in a process of its own; its arena is mapped here too, to look at what arrives."""

    def __init__(self, libraries: Path) -> None:
        command = [sys.executable, "-m", "tests.transport.doca.pair", str(libraries)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.arena = SharedArena.attach(ArenaName(*json.loads(self._said())), SIZES)
        self._libraries = libraries

    def connect(self, channel: int = 1) -> DocaTransport:
        """A front end in this process."""
        connector = DocaConnector(settings(self._libraries))
        try:
            return connector.connect(bytes.fromhex(self.tell(connector.offer.hex())), SIZES, channel)
        finally:
            connector.close()

    def tell(self, line: str) -> str:
        """Says a line; the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._said()

    def _said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def runtime_process(libraries: Path) -> Iterator[Runtime]:
    """Ends it afterwards, however it is."""
    runtime = Runtime(libraries)
    try:
        yield runtime
    finally:
        runtime.process.kill()
        runtime.process.communicate()
        runtime.arena.unlink()


def main(libraries: str) -> None:
    """See the module."""
    shared = SharedArena.create(SIZES, LIMITS)
    made = registrar(shared, libraries)
    print(json.dumps([shared.name.inbound, shared.name.outbound]), flush=True)
    registration: DocaRegistration | None = None
    for line in map(str.strip, sys.stdin):
        if line == "revoke":
            assert registration is not None
            registration.revoke()
            print("revoked", flush=True)
        else:
            registration = made.register(bytes.fromhex(line), (1,))
            print(registration.answer.hex(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
