"""The runtimes of one worker: what each of them serves now, and which of them a request goes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from dpu_service.channel.geometry import Geometry
from dpu_service.config import ModelInfo
from dpu_service.routing.choice import Page, Reason, RoutingState, RuntimeState, begin, note_page, note_sent, rank
from dpu_service.routing.prefixes import RecentPrefixes
from dpu_service.sequences.pump import Pump, Wanted
from dpu_service.text.encoder import TextEncoder
from dpu_service.transport.base import TransportError

NO_MODEL = "waiting for the GPU runtime to have a model"


@dataclass(frozen=True)
class Serving:
    """One model on one epoch of one runtime's device."""

    model: ModelInfo
    geometry: Geometry
    encoder: TextEncoder
    pump: Pump
    runtime: int = 0
    """From 0, in the order of the options."""

    def telemetry(self) -> dict[str, int] | None:
        """The device's page; None where the connection has just failed."""
        try:
            return self.pump.client.telemetry()
        except TransportError:
            return None

    def fits(self, wanted: Sequence[Wanted]) -> bool:
        """Whether prompts and answers, which fit some runtime, fit this one's window."""
        longest = max(len(one.prompt) + sampling.max_tokens for one in wanted for sampling in one.samplings)
        return longest <= min(self.geometry.window, self.geometry.heap_tokens + 1)


@dataclass(frozen=True)
class Room:
    """A runtime that may take a request."""

    serving: Serving
    reason: Reason


class Runtimes:
    """See the module.

    Args:
        prefixes: what each runtime was sent, by their numbers from 0.
    """

    def __init__(self, prefixes: list[RecentPrefixes]) -> None:
        self._servings: list[Serving | None] = [None] * len(prefixes)
        self._routing = RoutingState([RuntimeState(one) for one in prefixes])
        self._names = [""] * len(prefixes)
        """Of the model that each one serves, or served last."""

    def __len__(self) -> int:
        return len(self._servings)

    def put(self, serving: Serving) -> None:
        """A runtime has a new life."""
        self._servings[serving.runtime] = serving
        self._names[serving.runtime] = serving.model.name
        begin(self._routing, serving.runtime, _life(serving.geometry))

    def take(self, runtime: int) -> Serving | None:
        """Its life is over; gives back what it was."""
        serving, self._servings[runtime] = self._servings[runtime], None
        return serving

    def at(self, runtime: int) -> Serving | None:
        """What one of them serves."""
        return self._servings[runtime]

    @property
    def servings(self) -> list[Serving]:
        """Of all runtimes that have a model, ready or not."""
        return [one for one in self._servings if one is not None]

    def alive(self) -> list[bool]:
        """Of each runtime whether its device is there, ready or not."""
        return [one is not None and not one.pump.health.is_lost for one in self._servings]

    def ready_of(self, model: str) -> list[Serving]:
        """Runtimes that serve a model and take requests, that with the largest window first."""
        found = [one for one in self.servings if one.model.name == model and one.pump.ready]
        return sorted(found, key=lambda one: (-one.geometry.window, -one.geometry.heap_tokens))

    def knows(self, model: str) -> bool:
        """Whether a runtime serves it, or served it last and nothing else since."""
        return model in self._names

    def why_not_ready(self) -> dict[int, str]:
        """In words for people, by number; nothing of those that are ready."""
        why = {number: self._why(one) for number, one in enumerate(self._servings)}
        return {number: reason for number, reason in why.items() if reason}

    def choices(self, first: Serving, wanted: Sequence[Wanted], prompts: Sequence[Sequence[int]]) -> list[Room]:
        """Runtimes that may take a request, the preferred one first.

        Args:
            first: one that serves its model, and that it fits.
            prompts: hashes of its prompts.
        """
        count = sum(len(one.samplings) for one in wanted)
        found = {
            one.runtime: one
            for one in self.ready_of(first.model.name)
            if one.pump.has_room(count) and one.geometry.heap_tokens >= first.geometry.heap_tokens and one.fits(wanted)
        }
        if len(found) > 1:
            for one in found.values():
                self._look(one)
        return [Room(found[runtime], reason) for runtime, reason in rank(self._routing, list(found), prompts)]

    def sent(self, serving: Serving, sequences: int, prompts: Sequence[Sequence[int]]) -> None:
        """A request went there."""
        note_sent(self._routing, serving.runtime, sequences, prompts)

    def _look(self, serving: Serving) -> None:
        page, pump = serving.telemetry(), serving.pump
        if page is None:
            return
        share = page["blocks_used"] / page["blocks_total"] if page["blocks_total"] else 0.0
        sequences = page["running"] + page["waiting"]
        note_page(
            self._routing, serving.runtime, Page(page["heartbeat"], sequences, share, pump.unsent, pump.seconds_silent)
        )

    def _why(self, serving: Serving | None) -> str:
        if serving is None:
            return NO_MODEL
        return "" if serving.pump.ready else serving.pump.describe()


def _life(geometry: Geometry) -> int:
    """A number that is another one in each life of an arena, and tells nothing of its nonce, which is a secret."""
    return int.from_bytes(blake2b(geometry.nonce.to_bytes(8, "little"), digest_size=8).digest(), "little") | 1
