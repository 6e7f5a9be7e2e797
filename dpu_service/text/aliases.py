"""A tokenizer that knows control tokens by secret names, and their usual texts as text."""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec
from tokenizers import Tokenizer


class AliasedTokenizer:
    """The given tokenizer, except for the names of some of its tokens.

    The usual text of a token is then text like any other, wherever it stands, and the token itself is written by its
    alias. Aliases are drawn anew for every instance, so no text from outside can have them.

    Args:
        source: content of tokenizer.json.
        tokens: texts of added tokens.
    """

    def __init__(self, source: str, tokens: frozenset[str]) -> None:
        secret = secrets.token_hex(8)
        self._aliases = {token: f"\ufdee{secret}-{i}\ufdef" for i, token in enumerate(sorted(tokens))}
        made = msgspec.json.decode(source)
        before = {one["content"]: one["id"] for one in made["added_tokens"]}
        _rename(made, self._aliases)
        self.tokenizer = Tokenizer.from_str(msgspec.json.encode(made).decode())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        for token, alias in self._aliases.items():
            if self.tokenizer.token_to_id(alias) != before[token]:
                raise ValueError("the tokenizer gives a renamed token another id")

    def rewrite(self, text: str, pattern: re.Pattern[str]) -> str:
        """The text with aliases for what the pattern finds, which must be names of tokens."""
        return pattern.sub(lambda match: self._aliases[match.group()], text)


def _rename(made: dict[str, Any], aliases: dict[str, str]) -> None:
    for one in made["added_tokens"]:
        one["content"] = aliases.get(one["content"], one["content"])
    model = made["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {aliases.get(token, token): number for token, number in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: pairs of token and score
        model["vocab"] = [[aliases.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    made["post_processor"] = None  # names tokens too, and is not used for conversations
