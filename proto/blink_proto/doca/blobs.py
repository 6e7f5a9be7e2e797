"""What both ends of the `doca` transport tell each other in OpenSession, as JSON. Secrets, and never printed."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1
MAX_BYTES = 1 << 20


class BlobError(Exception):
    """The bytes are not what the peer should have sent."""


@dataclass(frozen=True, repr=False)
class Offer:
    """The front end's end of the connection."""

    connection: bytes

    def encode(self) -> bytes:
        """For `OpenSessionRequest.offer`."""
        return _encode({"connection": _text(self.connection)})

    @classmethod
    def decode(cls, raw: bytes) -> Offer:
        """The reverse.

        Raises:
            BlobError: it is no offer.
        """
        return cls(_bytes(_decode(raw), "connection"))

    def __repr__(self) -> str:
        return "Offer(redacted)"


@dataclass(frozen=True, repr=False)
class ChannelKeys:
    """Exports of one channel's memory: the inbound one may be written, the outbound one read."""

    inbound: bytes
    outbound: bytes

    def __repr__(self) -> str:
        return "ChannelKeys(redacted)"


@dataclass(frozen=True, repr=False)
class Answer:
    """The runtime's end, and what the front end may reach through it.

    `head`: export of the outbound region up to its first channel.
    """

    connection: bytes
    head: bytes
    channels: Mapping[int, ChannelKeys]

    def encode(self) -> bytes:
        """For `OpenSessionResponse.transport_blob`."""
        channels = {str(number): [_text(keys.inbound), _text(keys.outbound)] for number, keys in self.channels.items()}
        return _encode({"connection": _text(self.connection), "head": _text(self.head), "channels": channels})

    @classmethod
    def decode(cls, raw: bytes) -> Answer:
        """The reverse.

        Raises:
            BlobError: it is no answer.
        """
        fields = _decode(raw)
        channels = fields.get("channels")
        if not isinstance(channels, dict):
            raise BlobError("it has no channels")
        return cls(_bytes(fields, "connection"), _bytes(fields, "head"), dict(map(_channel, channels.items())))

    def __repr__(self) -> str:
        return "Answer(redacted)"


def _encode(fields: dict[str, Any]) -> bytes:
    return json.dumps({"version": VERSION, **fields}).encode()


def _decode(raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_BYTES:
        raise BlobError("it is too long")
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        raise BlobError("it is no JSON") from None  # the text of the cause would quote the blob
    if not isinstance(fields, dict) or fields.get("version") != VERSION:
        raise BlobError(f"it is not of version {VERSION} of the doca transport")
    return fields


def _text(content: bytes) -> str:
    return b64encode(content).decode()


def _bytes(fields: dict[str, Any], name: str) -> bytes:
    return _content(fields.get(name), name)


def _content(text: Any, name: str) -> bytes:
    try:
        content = b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        content = b""
    if not content:
        raise BlobError(f"its {name} is missing or malformed")
    return content


def _channel(item: tuple[str, Any]) -> tuple[int, ChannelKeys]:
    number, keys = item
    if not number.isascii() or not number.isdigit() or len(number) > 4 or not isinstance(keys, list) or len(keys) != 2:
        raise BlobError("a channel of it is malformed")
    return int(number), ChannelKeys(_content(keys[0], "inbound export"), _content(keys[1], "outbound export"))
