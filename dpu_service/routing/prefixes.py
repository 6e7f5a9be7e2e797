"""Beginnings of prompts that a runtime was sent lately, and may still have in its prefix cache."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

BLOCK_TOKENS = 16
"""Of a runtime's KV cache by default; another size there makes matches a little coarser or finer than they are here."""
MOST_BLOCKS = 512
"""Of a request that are looked at: 8,192 tokens take half a millisecond, and what is longer alike goes the same way."""
HASH_BYTES = 8


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
        hashes.append(int.from_bytes(chain.copy().digest(), "little"))
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
    """The last blocks that a runtime was sent, by their hashes.

    Args:
        most: blocks that are remembered; those that were not sent for the longest time are forgotten, of one prompt the
            last ones first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def matching(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first blocks are known."""
        known = self._known
        for count, one in enumerate(hashes):
            if one not in known:
                return count
        return len(hashes)

    def add(self, hashes: Sequence[int]) -> None:
        """These were sent just now."""
        known = self._known
        for one in reversed(hashes):
            known[one] = None
            known.move_to_end(one)
        while len(known) > self._most:
            known.popitem(last=False)

    def clear(self) -> None:
        """The runtime has begun anew."""
        self._known.clear()
