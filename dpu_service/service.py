"""What the handlers of one worker share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from dpu_service import metrics
from dpu_service.api.bodies import WHOLE_BODIES, BodyRoom
from dpu_service.channel.geometry import Geometry
from dpu_service.config import ModelInfo, WorkerConfig
from dpu_service.sequences.pump import Pump
from dpu_service.tenants.gate import Gate
from dpu_service.text.encoder import TextEncoder


@dataclass(frozen=True)
class Serving:
    """One model on one epoch of the device."""

    model: ModelInfo
    geometry: Geometry
    encoder: TextEncoder
    pump: Pump


@dataclass
class Service:
    """State of a worker. `serving` is None until the runtime has a model."""

    config: WorkerConfig
    gate: Gate
    serving: Serving | None = None
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
        return not self.draining and self.serving is not None and self.serving.pump.ready

    @property
    def announced(self) -> bool:
        """Whether probes are told that it is ready."""
        return self.ready and not self.leaving

    def why_not_ready(self) -> str:
        """In words for people; empty when ready."""
        if self.draining or self.leaving:
            return "shutting down"
        if self.serving is None:
            return "waiting for the GPU runtime to have a model"
        return "" if self.serving.pump.ready else self.serving.pump.describe()

    def show_sequences(self) -> None:
        """Brings the gauges up to date."""
        pump = self.serving.pump if self.serving is not None else None
        if pump is None:
            metrics.show(0, 0, 0)
        else:
            metrics.show(pump.in_flight, pump.waiting, pump.unsent)

    def enter(self) -> None:
        """A completion request begins."""
        self.active += 1
        self.idle.clear()

    def leave(self) -> None:
        """A completion request is answered."""
        self.active -= 1
        if self.active == 0:
            self.idle.set()
