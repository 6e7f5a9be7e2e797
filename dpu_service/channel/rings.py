"""Writers of a channel's submit ring and cancel ring."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from blink_proto import arena
from dpu_service.transport.base import Transport

_LAPS = (1 << 32) - 1
_SEED_MASK = (1 << 64) - 1
_NO_STOPS = (0,) * arena.SubmitRecord["stop_tokens"].shape[0]
_SUBMIT = struct.Struct(f"<4I2fQ2I{len(_NO_STOPS)}I4f4IiIQ")
"""SubmitRecord up to its commit word. One of numpy's, set field by field, takes seven times as long."""


@dataclass(frozen=True)
class Sampling:
    """How the device chooses tokens and when it stops; every value already checked."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    allow_only: bool = False
    logprobs: int = 0
    """0, or 1 + number of most likely tokens whose log-probabilities come with each token."""
    priority: int = 0
    """Class by which the device admits what waits, the lowest first; 32 bits with a sign."""
    cache_salt: int = 0
    """Only sequences with the same one share what the device keeps of their prompts; 64 bits."""
    prompt_logprobs: bool = False
    """With `logprobs`: those of the prompt's tokens too, from the second one on. Only then may `max_tokens` be 0, for
    prompts of two tokens or more."""


class Ring:
    """A ring whose records end in a commit word. Positions count records since the epoch began."""

    def __init__(self, transport: Transport, offset: int, slots: int, record_bytes: int) -> None:
        self._transport = transport
        self._offset = offset
        self._slots = slots
        self._record_bytes = record_bytes
        self.position = 0
        self._lease = 0

    def start(self, position: int, lease: int) -> None:
        """Begins under a lease at the position where the device reads next."""
        self.position, self._lease = position, lease

    def has_room(self, taken: int) -> bool:
        """Whether a record may be written when the device has taken all below `taken`."""
        return self.position - taken < self._slots

    def append(self, payload: bytes) -> int:
        """Writes a record (without its commit word), then commits it; its position."""
        position = self.position
        at = self._offset + position % self._slots * self._record_bytes
        self._transport.write(at, payload)
        lap = 1 + position // self._slots % _LAPS
        self._transport.commit(at + self._record_bytes - 8, arena.pack_commit_word(lap, self._lease))
        self.position += 1
        return position


def submit_payload(
    prompt_offset: int, prompt_tokens: int, sampling: Sampling, bias_count: int = 0, ban_words: int = 0
) -> bytes:
    """A SubmitRecord without its commit word. Bias entries and banned sequences stand behind the prompt in the heap."""
    stops = sampling.stop_tokens
    return _SUBMIT.pack(
        prompt_offset,
        prompt_tokens,
        sampling.max_tokens,
        sampling.top_k,
        sampling.temperature,
        sampling.top_p,
        sampling.seed & _SEED_MASK,
        arena.SubmitFlag.IGNORE_EOS * sampling.ignore_eos
        | arena.SubmitFlag.ALLOW_ONLY * sampling.allow_only
        | arena.SubmitFlag.PROMPT_LOGPROBS * sampling.prompt_logprobs,
        len(stops),
        *stops,
        *_NO_STOPS[len(stops) :],
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.logprobs,
        prompt_offset + prompt_tokens if bias_count or ban_words else 0,
        bias_count,
        sampling.min_tokens,
        sampling.priority,
        ban_words,
        sampling.cache_salt,
    )


def cancel_payload(target: int) -> bytes:
    """A CancelRecord without its commit word."""
    return struct.pack("<Q", target)
