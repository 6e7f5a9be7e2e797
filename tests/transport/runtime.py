"""A runtime in a process of its own, to be stopped or killed: `python -m tests.transport.runtime TRANSPORT SIZES`.

Says the names of its arena's regions. Then each line of its standard input is an offer in hex, which is answered with
the session's answer for channel 0.
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from blink_proto import arena
from dpu_service.transport.base import Transport
from tests.replay import ReplayDevice
from tests.replay.device import SHM
from tests.transport.kinds import KINDS, Kind


class Runtime:
    """It, as seen by a front end of this process, with its arena to look into."""

    def __init__(self, kind: Kind, sizes: arena.Sizes) -> None:
        self.kind, self.sizes = kind, sizes
        command = [sys.executable, "-m", "tests.transport.runtime", kind.name, json.dumps(asdict(sizes))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._names = json.loads(self._said())
        self.inbound, self.outbound = map(_mapped, self._names)

    def enter(self) -> Transport:
        """A front end of channel 0."""
        connector = self.kind.connector()
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(connector.offer.hex() + "\n")
            self.process.stdin.flush()
            return connector.connect(bytes.fromhex(self._said()), self.sizes, 0)
        finally:
            connector.close()

    def end(self) -> None:
        """However it is."""
        self.process.kill()
        self.process.communicate()
        for name in self._names:
            (SHM / name).unlink(missing_ok=True)

    def _said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def _mapped(name: str) -> mmap.mmap:
    with (SHM / name).open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


@contextmanager
def runtime_of(kind: Kind, sizes: arena.Sizes) -> Iterator[Runtime]:
    """Killed at the end."""
    made = Runtime(kind, sizes)
    try:
        yield made
    finally:
        made.end()


def main() -> None:
    """See the module."""
    device = ReplayDevice(arena.Sizes(**json.loads(sys.argv[2])), vocab_size=100, window=1 << 17)
    device.turn()
    registrar = KINDS[sys.argv[1]].registrar(device)
    print(json.dumps(device.names), flush=True)
    held = []
    for line in sys.stdin:
        held.append(registrar.register(bytes.fromhex(line), (0,)))
        print(held[-1].answer.hex(), flush=True)


if __name__ == "__main__":
    main()
