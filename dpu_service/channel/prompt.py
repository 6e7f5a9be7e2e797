"""A prompt in the channel's heap."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

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
        pairs = b"".join(struct.pack("<If", token, value) for token, value in self.bias)
        bans = [word for tokens in self.bans for word in (arena.BAN_LENGTH + len(tokens), *tokens)]
        return np.asarray(self.tokens, "<u4").tobytes() + pairs + np.asarray(bans, "<u4").tobytes()

    @property
    def ban_words(self) -> int:
        """Words of the banned sequences."""
        return sum(1 + len(tokens) for tokens in self.bans)
