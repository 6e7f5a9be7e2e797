"""API keys. Only their SHA-256 digests are kept: of 256 random bits nothing slower is needed."""

from __future__ import annotations

import hashlib
import secrets

PREFIX = "blink-"
SCHEME = "sha256:"
MAX_KEY_BYTES = 512
_DIGEST_HEX = 64


def new_key() -> str:
    """A key that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key).digest()


def write_digest(key: str) -> str:
    """A key's digest as the keys file has it."""
    return SCHEME + digest(key.encode()).hex()


def read_digest(text: str) -> bytes:
    """A digest of the keys file.

    Raises:
        ValueError: it is none. The message does not repeat it, as it may be a key by mistake.
    """
    try:
        found = bytes.fromhex(text.removeprefix(SCHEME))
    except ValueError:
        found = b""
    if not text.startswith(SCHEME) or len(text) != len(SCHEME) + _DIGEST_HEX or len(found) != _DIGEST_HEX // 2:
        raise ValueError(f"a key is not of the form {SCHEME}… with {_DIGEST_HEX} hex digits")
    return found


def presented_key(authorization: bytes | None) -> bytes | None:
    """The key of an Authorization header, or None when there is none."""
    scheme, _, key = (authorization or b"").partition(b" ")
    key = key.strip()
    return key if scheme.lower() == b"bearer" and 0 < len(key) <= MAX_KEY_BYTES else None
