"""A front end gone mad: random submissions, cancels and cursors, most of them impossible."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from blink_proto import arena
from tests.bench.gpu.front import Front, submission

_ANY_WORD = (0, 1, 2, 3, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_ANY_FLOAT = (0.0, -0.0, 1.0, 0.5, -1.0, 100.0, 101.0, 1e30, 1e-40, float("inf"), float("-inf"), float("nan"))


class Hostile:
    """Plays `turns` random actions on a channel that it holds. Everything is decided by the seed."""

    def __init__(self, front: Front, vocab_size: int, seed: int) -> None:
        self._front, self._vocab, self._random = front, vocab_size, random.Random(seed)
        self.submitted = 0

    def play(self, turns: int) -> None:
        """Acts; reads the log now and then, so that it does not only stall itself."""
        actions = (self._garbage, self._garbage, self._twisted, self._valid, self._cancel, self._cursors, self._heap)
        for _ in range(turns):
            self._random.choice(actions)()
            if self._random.random() < 0.3:
                self._front.poll()

    def _room(self) -> bool:
        front = self._front
        return front.submit_position - int(front.words()["submit_read"]) < front.sizes.submit_slots

    def _append(self, record: np.ndarray) -> None:
        if self._room():
            self._front.append(record)
            self.submitted += 1

    def _garbage(self) -> None:
        """Random bytes with a right commit word."""
        raw = np.frombuffer(self._random.randbytes(arena.SubmitRecord.itemsize), arena.SubmitRecord)
        self._append(raw.reshape(())[()])

    def _twisted(self) -> None:
        """A right submission with one or two wrong fields."""
        record = submission(0, 5, 3)
        for _ in range(self._random.randint(1, 2)):
            name = self._random.choice([n for n in arena.SUBMIT_RECORD_OFFSETS if n not in ("commit", "reserved")])
            kind = arena.SubmitRecord[name].kind
            value = self._random.choice(_ANY_FLOAT if kind == "f" else _ANY_WORD)
            record[name] = np.uint32(value).view(np.int32) if kind == "i" else value
        self._append(record)

    def _valid(self) -> None:
        """A right submission over whatever the heap holds, with all that can be asked of the sampler."""
        any_of, start = self._random.choice, self._random.randrange(self._front.sizes.heap_tokens - 64)
        sampling: dict[str, Any] = {"temperature": any_of((0.0, 0.7, 1.5)), "top_k": any_of((0, 5))}
        record = submission(start, self._random.randint(1, 64), self._random.randint(1, 20), **sampling)
        record["min_p"], record["repetition_penalty"] = any_of((0.0, 0.1)), any_of((0.0, 1.3))
        record["presence_penalty"], record["frequency_penalty"] = any_of((0.0, -2.0)), any_of((0.0, 0.5))
        record["logprobs"], record["min_tokens"] = any_of((0, 1, 21)), any_of((0, 1))
        if record["logprobs"] and any_of((False, True)):
            record["flags"] = int(record["flags"]) | arena.SubmitFlag.PROMPT_LOGPROBS
            record["max_tokens"] = any_of((0, 5))
        if any_of((False, True)):
            place = (start + 64) % (self._front.sizes.heap_tokens - 3)
            words = np.array([arena.BAN_LENGTH + any_of((2, 2, 3)), *any_of(((7, 8), (7, 7)))], "<u4")
            self._front.write(self._front.heap_offset + 4 * place, words.tobytes())
            record["bias_offset"], record["ban_words"] = place, len(words)
        self._append(record)

    def _cancel(self) -> None:
        position = self._front.submit_position
        target = self._random.choice((0, position - 1, position, position + 5, (1 << 64) - 1, 1 << 40))
        self._front.append_cancel(max(0, target))

    def _cursors(self) -> None:
        """An impossible position of the reader, for a moment."""
        front = self._front
        at = front.control_offset + arena.CHANNEL_IN_OFFSETS["log_read"]
        front.commit(at, self._random.choice((0, front.log_position + 1, (1 << 64) - 1, 1 << 63)))
        front.commit(at, front.log_position)

    def _heap(self) -> None:
        """Prompt tokens, some of them outside the vocabulary."""
        most = self._vocab if self._random.random() < 0.8 else 1 << 32
        words = np.array([self._random.randrange(most) for _ in range(64)], "<u4")
        start = self._random.randrange(self._front.sizes.heap_tokens - 64)
        self._front.write(self._front.heap_offset + 4 * start, words.tobytes())
