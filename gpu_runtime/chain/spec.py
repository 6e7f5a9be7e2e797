"""What the control process tells a chain before it starts: sent once, as JSON, over the chain's standard input."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from blink_proto import arena
from gpu_runtime.config import ModelLimits, RuntimeConfig
from gpu_runtime.shared_arena import ArenaName


@dataclass(frozen=True)
class ChainSpec:
    """One life of the chain."""

    model_folder: str
    config: RuntimeConfig
    limits: ModelLimits
    arena_name: ArenaName
    mailbox_descriptor: int
    memory_descriptor: int = -1
    """Socket to hand the arena's device memory over by (`registration.handover`); -1: nobody wants it."""

    @property
    def sizes(self) -> arena.Sizes:
        """Sizes of the arena's rings."""
        return self.config.arena_sizes()

    def to_json(self) -> bytes:
        """One line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> ChainSpec:
        """The reverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: not such a line.
        """
        raw = json.loads(line)
        limits = raw["limits"]
        return cls(
            model_folder=raw["model_folder"],
            config=RuntimeConfig(**raw["config"]),
            limits=ModelLimits(limits["vocab_size"], limits["max_model_tokens"], tuple(limits["eos_token_ids"])),
            arena_name=ArenaName(**raw["arena_name"]),
            mailbox_descriptor=raw["mailbox_descriptor"],
            memory_descriptor=raw["memory_descriptor"],
        )
