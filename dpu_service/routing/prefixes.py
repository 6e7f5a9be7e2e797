"""Beginnings of prompts that a runtime was sent lately, and may still have in its prefix cache."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from dpu_service.shared import new_memory

BLOCK_TOKENS = 16
"""Of a runtime's KV cache by default; another size there makes matches a little coarser or finer than they are here."""
MOST_BLOCKS = 512
"""Of a request that are looked at: 8,192 tokens take half a millisecond, and what is longer alike goes the same way."""
HASH_BYTES = 8
PLACES = 1 << 17
"""For each runtime: two million tokens, some times what its KV cache holds, in 1 MiB."""


def prefix_hashes(prompt: Sequence[int], salt: bytes, most: int = MOST_BLOCKS) -> list[int]:
    """For each full block of a prompt a hash of all tokens up to its end, at most `most` of them.

    Args:
        salt: prompts under different salts have nothing in common.
    """
    full = min(len(prompt) // BLOCK_TOKENS, most)
    words = array("I", prompt[: full * BLOCK_TOKENS])
    chain = blake2b(len(salt).to_bytes(8, "little") + salt, digest_size=HASH_BYTES)
    hashes = []
    for start in range(0, full * BLOCK_TOKENS, BLOCK_TOKENS):
        chain.update(words[start : start + BLOCK_TOKENS])
        hashes.append(int.from_bytes(chain.copy().digest(), "little") or 1)  # 0 is a free place
    return hashes


def request_hashes(prompts: Iterable[Sequence[int]], salt: bytes) -> list[list[int]]:
    """Those of each prompt of a request, at most `MOST_BLOCKS` in all; prompts behind them are left out."""
    found: list[list[int]] = []
    left = MOST_BLOCKS
    for prompt in prompts:
        if left == 0:
            break
        found.append(prefix_hashes(prompt, salt, left))
        left -= len(found[-1])
    return found


class RecentPrefixes:
    """Blocks that a runtime was sent, by their hashes: word 0 tells in which of its lives, and each of the others holds
    the latest of the hashes that have its place. So memory is bounded and what is old is overwritten by and by, and
    several workers may use the same words without locks: the worst that a race does is a choice that could be better.

    Args:
        words: 1 and a power of two of them, 64 bits each, all zero at first.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._mask = len(words) - 2
        if self._mask + 1 < 1 or self._mask & (self._mask + 1):
            raise ValueError(f"{len(words)} words are not 1 and a power of two")

    @classmethod
    def alone(cls, places: int = PLACES) -> RecentPrefixes:
        """In memory of its own."""
        return cls(memoryview(bytearray(HASH_BYTES * (1 + places))).cast("Q"))

    def matching(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first blocks are known: up to the last one that is, which was sent with all before."""
        words, mask = self._words, self._mask
        for count in range(len(hashes), 0, -1):
            one = hashes[count - 1]
            if words[1 + (one & mask)] == one:
                return count
        return 0

    def add(self, hashes: Sequence[int]) -> None:
        """These were sent just now."""
        words, mask = self._words, self._mask
        for one in hashes:
            words[1 + (one & mask)] = one

    def begin(self, life: int) -> None:
        """The runtime is in this life; nothing is known from another one. Other than 0."""
        if self._words[0] != life:
            self._words[1:] = memoryview(bytes(HASH_BYTES * (len(self._words) - 1))).cast("Q")
            self._words[0] = life


class PrefixPage:
    """The words for all runtimes, shared by all workers.

    Args:
        descriptor: from `create`.
        runtimes: how many there are.
    """

    def __init__(self, descriptor: int, runtimes: int) -> None:
        words = memoryview(mmap.mmap(descriptor, page_bytes(runtimes))).cast("Q")
        self.runtimes = [RecentPrefixes(words[k * (1 + PLACES) : (k + 1) * (1 + PLACES)]) for k in range(runtimes)]


def page_bytes(runtimes: int) -> int:
    """Size of the page."""
    return runtimes * (1 + PLACES) * HASH_BYTES


def create(runtimes: int) -> int:
    """A descriptor of new memory for it."""
    return new_memory("blink-prefixes", page_bytes(runtimes))
