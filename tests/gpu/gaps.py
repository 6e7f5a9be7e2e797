"""Times between a stream's tokens, as the reader of the token log sees them, while streams are kept running."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blink_proto.arena import Finish, RecordKind
from tests.bench.gpu.front import Front
from tests.shapes import token_prompt

PROMPT_TOKENS = 16
LOG_PAUSE_SECONDS = 20e-6


@dataclass(frozen=True)
class Gaps:
    """Seconds between one token of a stream and its next."""

    count: int
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, gaps: NDArray[np.float64]) -> Gaps:
        """The figures of many gaps."""
        p50, p99 = np.percentile(gaps, (50, 99))
        return cls(len(gaps), float(p50), float(p99), float(gaps.max()))

    def __str__(self) -> str:
        p50, p99, worst = (1e6 * value for value in (self.p50, self.p99, self.max))
        return f"{self.count} gaps: P50 {p50:.0f} µs, P99 {p99:.0f} µs, max {worst:.0f} µs"


class Streams:
    """Keeps so many sequences running: each that ends is followed by another one.

    They begin with different lengths, so that later on one ends now and one then, at every moment alike.
    """

    def __init__(self, front: Front, streams: int, tokens: int, vocab_size: int) -> None:
        self._front, self._tokens, self._vocab = front, tokens, vocab_size
        self._sent = 0
        for index in range(streams):
            self._submit(max(2, tokens * (index + 1) // streams))

    def window(self, seconds: float) -> Gaps:
        """Gaps whose second token came within the next `seconds`.

        Raises:
            TimeoutError: no token came for a tenth of the time.
        """
        times, sequences = [], []
        with _no_garbage_collection():
            now = begin = last = time.perf_counter()
            while now < begin + seconds:
                records = self._front.read()
                now = time.perf_counter()
                if len(records.sequence):
                    last = now
                    tokens = records.kind == RecordKind.TOKEN
                    sequences.append(records.sequence[tokens])
                    times.append(np.full(int(tokens.sum()), now))
                    self._follow(records.sequence[records.finish != Finish.NONE].tolist())
                elif now > last + max(seconds / 10, 0.5):
                    raise TimeoutError("no token came")
                else:
                    time.sleep(LOG_PAUSE_SECONDS)
        return Gaps.of(gaps_of(np.concatenate(sequences), np.concatenate(times)))

    def _follow(self, ended: list[int]) -> None:
        for sequence in ended:
            self._front.forget(self._front.generations[sequence])
            self._submit(self._tokens)

    def _submit(self, tokens: int) -> None:
        self._front.submit(token_prompt(PROMPT_TOKENS, self._vocab, self._sent), tokens)
        self._sent += 1


def gaps_of(sequences: NDArray[np.uint64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Differences between the times of neighbouring tokens of the same sequence."""
    order = np.argsort(sequences, kind="stable")
    same = np.diff(sequences[order]) == 0
    return np.diff(times[order])[same]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
