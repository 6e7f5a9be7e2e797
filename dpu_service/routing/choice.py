"""The rule by which a request gets its runtime.

Load, in sequences: what the telemetry page says is running and waiting, and what this worker has sent and the page
cannot know yet, and up to `FULL_CACHE` more for a KV cache that fills. The least loaded runtime gets the request, of
equally loaded ones that which was sent something longest ago – unless another one is known to have had the prompt's
beginning: the one with the longest such beginning, p blocks, gets it while its load is at most p / `BLOCKS_A_SEQUENCE`,
but never more than `MOST_MARGIN`, above the least.

A runtime without a heartbeat for `SUSPECT_SECONDS` comes behind all others: it may be gone, or in a very long step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from dpu_service.routing.prefixes import RecentPrefixes

FULL_CACHE = 16
BLOCKS_A_SEQUENCE = 4
MOST_MARGIN = 16
SUSPECT_SECONDS = 2.0


class Reason(Enum):
    """Why a runtime was preferred; the values are in metrics."""

    ONLY = "only"
    PREFIX = "prefix"
    LOAD = "load"


@dataclass(frozen=True)
class Page:
    """What is seen of a runtime at one moment.

    Attributes:
        beat: the page's heartbeat; a page with the same one says nothing new.
        sequences: running and waiting on the device, of all front ends.
        kv_share: used share of the KV cache, 0 to 1.
        unsent: of this worker, not yet taken by the device.
        silent: seconds since the heartbeat changed.
    """

    beat: int
    sequences: int
    kv_share: float
    unsent: int
    silent: float = 0.0


@dataclass
class RuntimeState:
    """What a worker knows of one runtime; `prefixes` are known to all workers together."""

    prefixes: RecentPrefixes
    page: Page = field(default_factory=lambda: Page(-1, 0, 0.0, 0))
    unseen: int = 0
    """Sequences of this worker that the page cannot know."""
    last_sent: int = 0

    @property
    def load(self) -> float:
        """In sequences."""
        return self.page.sequences + self.unseen + FULL_CACHE * self.page.kv_share

    @property
    def suspect(self) -> bool:
        """Whether it may be gone."""
        return self.page.silent > SUSPECT_SECONDS


@dataclass
class RoutingState:
    """What a worker knows of all of them."""

    runtimes: list[RuntimeState]
    sent: int = 0
    """Requests so far."""


def note_page(state: RoutingState, runtime: int, page: Page) -> None:
    """A telemetry page was read."""
    one = state.runtimes[runtime]
    if page.beat != one.page.beat:
        one.unseen = page.unsent
        one.page = page
    else:
        one.page = Page(page.beat, one.page.sequences, one.page.kv_share, page.unsent, page.silent)


def note_sent(state: RoutingState, runtime: int, sequences: int, prompts: Sequence[Sequence[int]]) -> None:
    """A request went to a runtime; `prompts` are the hashes of each of its prompts."""
    state.sent += 1
    one = state.runtimes[runtime]
    one.unseen += sequences
    one.last_sent = state.sent
    for hashes in prompts:
        one.prefixes.add(hashes)


def begin(state: RoutingState, runtime: int, life: int) -> None:
    """There is a new session with a runtime: nothing of what was known from another of its lives holds."""
    before = state.runtimes[runtime]
    before.prefixes.begin(life)
    state.runtimes[runtime] = RuntimeState(before.prefixes, last_sent=before.last_sent)


def rank(state: RoutingState, candidates: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[tuple[int, Reason]]:
    """All candidates, the preferred one first, then by load. Those that are not candidates are never in it."""
    by_load = sorted(candidates, key=lambda index: _order(state.runtimes[index]))
    if len(by_load) < 2:
        return [(index, Reason.ONLY) for index in by_load]
    first = _with_prefix(state, by_load, prompts)
    if first is None:
        return [(index, Reason.LOAD) for index in by_load]
    return [(first, Reason.PREFIX), *((index, Reason.LOAD) for index in by_load if index != first)]


def _order(one: RuntimeState) -> tuple[bool, float, int]:
    return one.suspect, one.load, one.last_sent


def _with_prefix(state: RoutingState, by_load: list[int], prompts: Sequence[Sequence[int]]) -> int | None:
    """Which has the longest beginning of the prompts, of several the least loaded, unless its load is too high."""
    known = {index: _matching(state.runtimes[index], prompts) for index in by_load}
    best = max(by_load, key=lambda index: (not state.runtimes[index].suspect, known[index]))
    least = state.runtimes[by_load[0]]
    margin = min(known[best] / BLOCKS_A_SEQUENCE, MOST_MARGIN)
    near = state.runtimes[best].load <= least.load + margin
    return best if known[best] and near else None


def _matching(one: RuntimeState, prompts: Sequence[Sequence[int]]) -> int:
    return sum(one.prefixes.matching(hashes) for hashes in prompts)
