"""A prompt in the channel's heap."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass

from blink_proto import arena


@dataclass
class SharedPrompt:
    """A prompt that one or more sequences read; it stays in the heap until the last of them has ended.

    `bias`: (token, value) with ascending tokens, what all of them add to logits; it stands behind the tokens. `bans`:
    sequences of two tokens or more that none of them completes; they stand behind the bias.
    """

    tokens: Items[int]
    users: int
    offset: int | None = None
    bias: Items[tuple[int, float]] = ()
    bans: Items[Items[int]] = ()

    def heap_words(self) -> bytes:
        """What stands in the heap."""
        words = _words(self.tokens)
        if not self.bias and not self.bans:
            return words
        pairs = b"".join(struct.pack("<If", token, value) for token, value in self.bias)
        return words + pairs + _words([word for one in self.bans for word in (arena.BAN_LENGTH + len(one), *one)])

    @property
    def ban_words(self) -> int:
        """Words of the banned sequences."""
        return sum(1 + len(tokens) for tokens in self.bans)


def _words(numbers: Items[int]) -> bytes:
    """Little-endian, 32 bits each. By `array`, since numpy takes three times as long for a list."""
    found = array("I", numbers)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()
