"""Counters that all workers see: a page of memory with a row for each worker.

Every word has one writer, the row's worker, so there are no locks; whoever wants to know sums a column. Two workers
that decide at the same moment may both count a request before either sees the other's, so a limit can be passed for a
moment by as many requests as there are workers, less one.
"""

from __future__ import annotations

import mmap
from enum import IntEnum

from dpu_service.shared import new_memory

SLOTS = 1024
WORD_BYTES = 8


class Word(IntEnum):
    """What is counted for each tenant."""

    RUNNING = 0
    """Sequences of requests that are being answered."""
    WAITING = 1
    """Of these, those without a first token."""
    REQUESTS = 2
    """Requests ever taken, less those given back."""
    TOKENS = 3
    """Tokens ever charged, less those given back."""
    REQUESTS_LEFT = 4
    """The worker's view of what is left, for one that starts later: twice the number, plus 1; 0 before there is one."""
    TOKENS_LEFT = 5


_ROW = SLOTS * len(Word)


class CounterPage:
    """The page, mapped.

    Args:
        descriptor: from `create`.
        workers: rows.
    """

    def __init__(self, descriptor: int, workers: int) -> None:
        self._memory = mmap.mmap(descriptor, page_bytes(workers))
        self._words = memoryview(self._memory).cast("q")

    def add(self, worker: int, slot: int, word: Word, count: int) -> None:
        """Only by the row's own worker."""
        self._words[worker * _ROW + slot * len(Word) + word] += count

    def leave_word(self, worker: int, slot: int, word: Word, left: int) -> None:
        """Only by the row's own worker."""
        self._words[worker * _ROW + slot * len(Word) + word] = 2 * left + 1

    def least(self, slot: int, word: Word, otherwise: int) -> int:
        """The smallest number that any worker has left, also one before this in its row."""
        found = [value >> 1 for value in self._words[slot * len(Word) + word :: _ROW] if value]
        return min(found, default=otherwise)

    def total(self, slot: int, word: Word) -> int:
        """Over all workers."""
        return sum(self._words[slot * len(Word) + word :: _ROW])

    def forget_worker(self, worker: int) -> None:
        """A worker has died: its requests have ended with it. What was charged stays charged."""
        for slot in range(SLOTS):
            for word in (Word.RUNNING, Word.WAITING):
                self._words[worker * _ROW + slot * len(Word) + word] = 0


def page_bytes(workers: int) -> int:
    """Size of the page."""
    return workers * _ROW * WORD_BYTES


def create(workers: int) -> int:
    """A descriptor of new memory for it."""
    return new_memory("blink-tenants", page_bytes(workers))
