"""What a request adds to logits: `logit_bias`, `allowed_token_ids` and `bad_words`, as the device's bias entries and
banned sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

from blink_proto import arena
from dpu_service.api.bad_words import NOTHING, Banned
from dpu_service.api.errors import bad_value

MAX_BIAS_VALUE = 100.0


@dataclass(frozen=True)
class Bias:
    """(token, value) with ascending tokens; with `allow_only` no other token may be sampled. `banned.sequences` are
    not completed."""

    entries: tuple[tuple[int, float], ...] = ()
    allow_only: bool = False
    banned: Banned = NOTHING

    @property
    def heap_words(self) -> int:
        """What it takes in the prompt heap."""
        return 2 * len(self.entries) + self.banned.words


def read_bias(
    logit_bias: dict[str, float] | None,
    allowed: list[int] | None,
    vocab_size: int,
    banned: Banned = NOTHING,
) -> Bias:
    """Checks them. A token that is not allowed needs no bias.

    Raises:
        ApiError: 400, naming the field.
    """
    values = _values(logit_bias or {}, vocab_size) | dict.fromkeys(banned.tokens, -math.inf)
    if allowed is not None:
        if not allowed:
            raise bad_value("allowed_token_ids", "'allowed_token_ids' must name at least one token")
        if not all(0 <= token < vocab_size for token in allowed):
            raise bad_value("allowed_token_ids", f"'allowed_token_ids' must be at least 0 and below {vocab_size}")
        values = {token: values.get(token, 0.0) for token in allowed if token not in banned.tokens}
        if not values:
            raise bad_value("bad_words", "'bad_words' leave none of 'allowed_token_ids'")
    if len(values) > arena.MAX_BIAS:
        raise bad_value(
            _longest(logit_bias, allowed), f"at most {arena.MAX_BIAS} tokens can be changed in their logits"
        )
    return Bias(tuple(sorted(values.items())), allowed is not None, banned)


def _longest(logit_bias: dict[str, float] | None, allowed: list[int] | None) -> str:
    if allowed is not None:
        return "allowed_token_ids"
    return "bad_words" if len(logit_bias or {}) <= arena.MAX_BIAS else "logit_bias"


def _values(logit_bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    values = {}
    for key, value in logit_bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            raise bad_value("logit_bias", f"'logit_bias' must name token ids from 0 to {vocab_size - 1}")
        if not -MAX_BIAS_VALUE <= value <= MAX_BIAS_VALUE:
            raise bad_value("logit_bias", f"values of 'logit_bias' must be between ±{MAX_BIAS_VALUE:g}")
        values[int(key)] = value
    return values
