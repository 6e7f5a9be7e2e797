"""Token ids to bytes for byte-level vocabularies (GPT-2's scheme: every byte has a printable stand-in)."""

from __future__ import annotations

from functools import cache


@cache
def stand_ins() -> dict[str, int]:
    """Byte of each stand-in character: printable Latin-1 stands for itself, the rest for 256, 257, … in order."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_bytes(token: str) -> bytes:
    """Bytes of a vocabulary entry; one with a character that is no stand-in (an added token) is plain text."""
    table = stand_ins()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


@cache
def _names() -> list[str]:
    return [character for character, _ in sorted(stand_ins().items(), key=lambda item: item[1])]


def token_name(data: bytes) -> str:
    """The vocabulary entry of these bytes, the other way round."""
    names = _names()
    return "".join([names[byte] for byte in data])
