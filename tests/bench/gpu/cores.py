"""Which cores do what in a measurement: the front end's four stand for the DPU, the client has four, the rest works."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

GROUP = 4
ENOUGH = 3 * GROUP


@dataclass(frozen=True)
class Cores:
    """Sets of cores that do not meet; on a small machine (`apart` false) all of them are all cores."""

    front_end: frozenset[int]
    client: frozenset[int]
    rest: frozenset[int]

    @property
    def apart(self) -> bool:
        """Whether the sets are different ones."""
        return self.front_end != self.rest

    @classmethod
    def split(cls, available: Iterable[int] | None = None) -> Cores:
        """Four, four and the rest of this process's cores."""
        cores = sorted(os.sched_getaffinity(0) if available is None else available)
        if len(cores) < ENOUGH:
            return cls(*(frozenset(cores) for _ in range(3)))
        return cls(*map(frozenset, (cores[:GROUP], cores[GROUP : 2 * GROUP], cores[2 * GROUP :])))


def pin(pid: int, cores: Iterable[int]) -> None:
    """Keeps all threads of a process on those cores, and what they start later."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


@contextlib.contextmanager
def as_client(cores: Cores) -> Iterator[None]:
    """This process on the client's cores meanwhile; the processes that it starts begin there too."""
    before = os.sched_getaffinity(0)
    pin(os.getpid(), cores.client)
    try:
        yield
    finally:
        pin(os.getpid(), before)
