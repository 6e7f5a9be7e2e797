"""What the handlers of one worker share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from dpu_service import metrics
from dpu_service.api.bodies import WHOLE_BODIES, BodyRoom
from dpu_service.config import WorkerConfig
from dpu_service.runtimes import Runtimes
from dpu_service.tenants.gate import Gate


@dataclass
class Service:
    """State of a worker."""

    config: WorkerConfig
    gate: Gate
    runtimes: Runtimes
    leaving: bool = False
    """Still serving, but probes are told otherwise."""
    draining: bool = False
    active: int = 0
    """Completion requests that are being answered."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while `active` is 0."""
    bodies: BodyRoom = field(init=False)

    def __post_init__(self) -> None:
        self.idle.set()
        self.bodies = BodyRoom(WHOLE_BODIES * self.config.max_body_bytes)

    @property
    def ready(self) -> bool:
        """Whether new completions are taken."""
        return not self.draining and any(one.pump.ready for one in self.runtimes.servings)

    @property
    def announced(self) -> bool:
        """Whether probes are told that it is ready."""
        return self.ready and not self.leaving

    def why_not_ready(self) -> str:
        """In words for people; empty when ready."""
        if self.draining or self.leaving:
            return "shutting down"
        if self.ready:
            return ""
        why = self.runtimes.why_not_ready()
        return why[0] if len(self.runtimes) == 1 else "; ".join(f"runtime {k}: {reason}" for k, reason in why.items())

    def show_sequences(self) -> None:
        """Brings the gauges up to date."""
        pumps = [one.pump for one in self.runtimes.servings]
        metrics.show(
            sum(pump.in_flight for pump in pumps),
            sum(pump.waiting for pump in pumps),
            sum(pump.unsent for pump in pumps),
        )

    def enter(self) -> None:
        """A completion request begins."""
        self.active += 1
        self.idle.clear()

    def leave(self) -> None:
        """A completion request is answered."""
        self.active -= 1
        if self.active == 0:
            self.idle.set()
