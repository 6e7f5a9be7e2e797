"""Vocabularies as tables of bytes, for the two common kinds of decoders."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from dpu_service.text.bytelevel import token_bytes

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How vocabularies with byte fallback name the token of a byte."""
WORD_SPACE = "▁"
"""SentencePiece's mark for a space."""


@dataclass(frozen=True)
class ByteTables:
    """Bytes of each token id, so that a text is the bytes of its tokens, one behind the other.

    `visible` is silent where control tokens are left out; `strip`: spaces that the beginning of a text loses.
    """

    everything: list[bytes]
    visible: list[bytes]
    strip: int = 0


def byte_tables(decoder: dict[str, Any], tokenizer: Tokenizer, control: dict[str, int]) -> ByteTables | None:
    """None for a decoder that is neither byte-level nor SentencePiece's with byte fallback.

    Args:
        decoder: its description in tokenizer.json.
        control: ids of control tokens by their text.
    """
    if decoder.get("type") == "ByteLevel":
        return _tables(tokenizer, control, token_bytes, 0)
    strip = _sentencepiece_strip(decoder)
    return None if strip is None else _tables(tokenizer, control, _sentencepiece_bytes, strip)


def _tables(tokenizer: Tokenizer, control: dict[str, int], spell: Any, strip: int) -> ByteTables:
    vocab: dict[str, int] = tokenizer.get_vocab()
    everything = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, number in vocab.items():
        everything[number] = spell(token)
    visible = list(everything)
    for number in control.values():
        visible[number] = b""
    return ByteTables(everything, visible, strip)


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes.fromhex(byte.group(1)) if byte else token.replace(WORD_SPACE, " ").encode("utf-8", "replace")


def _sentencepiece_strip(decoder: dict[str, Any]) -> int | None:
    """Spaces stripped, or None where the decoder is another one than Llama 2's, Mistral's or Gemma's."""
    parts = decoder.get("decoders") or []
    replace = {"type": "Replace", "pattern": {"String": WORD_SPACE}, "content": " "}
    if decoder.get("type") != "Sequence" or parts[:3] != [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]:
        return None
    if len(parts) == 3:
        return 0
    start = parts[3].get("start")
    if parts[3:] != [{"type": "Strip", "content": " ", "start": start, "stop": 0}] or not isinstance(start, int):
        return None
    return start
