"""Bodies of answers, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

DONE = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    """A server-sent event with a JSON body."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's `usage` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass(frozen=True)
class Piece:
    """New text of one choice; `finish_reason` is set in its last piece."""

    index: int
    text: str
    finish_reason: str | None


class Shape(Protocol):
    """How an endpoint words its answers."""

    def whole(self, texts: list[str], reasons: list[str], used: dict[str, int]) -> bytes:
        """The body of an answer in one piece."""

    def chunk(self, piece: Piece) -> bytes:
        """One event of a stream."""

    def usage_chunk(self, used: dict[str, int]) -> bytes:
        """The last event before [DONE], when usage was asked for."""


@dataclass
class _Head:
    """What every body of one answer begins with.

    Args:
        with_usage: chunks carry `"usage": null`, as they do when usage was asked for.
    """

    model: str
    with_usage: bool
    prefix: str
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: secrets.token_hex(12))

    def body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def chunk(self, kind: str, choice: dict[str, Any]) -> bytes:
        body = self.body(kind, [choice])
        if self.with_usage:
            body["usage"] = None
        return event(body)

    def usage_chunk(self, kind: str, used: dict[str, int]) -> bytes:
        return event({**self.body(kind, []), "usage": used})


class CompletionShape:
    """`text_completion` objects."""

    def __init__(self, model: str, with_usage: bool) -> None:
        self._head = _Head(model, with_usage, "cmpl")

    def whole(self, texts: list[str], reasons: list[str], used: dict[str, int]) -> bytes:
        """See `Shape`."""
        choices = [_text_choice(i, *said) for i, said in enumerate(zip(texts, reasons, strict=True))]
        return msgspec.json.encode({**self._head.body("text_completion", choices), "usage": used})

    def chunk(self, piece: Piece) -> bytes:
        """See `Shape`."""
        return self._head.chunk("text_completion", _text_choice(piece.index, piece.text, piece.finish_reason))

    def usage_chunk(self, used: dict[str, int]) -> bytes:
        """See `Shape`."""
        return self._head.usage_chunk("text_completion", used)


class ChatShape:
    """`chat.completion` and `chat.completion.chunk` objects; the first chunk of a choice tells the role."""

    def __init__(self, model: str, with_usage: bool) -> None:
        self._head = _Head(model, with_usage, "chatcmpl")
        self._begun: set[int] = set()

    def whole(self, texts: list[str], reasons: list[str], used: dict[str, int]) -> bytes:
        """See `Shape`."""
        choices = [_message_choice(i, *said) for i, said in enumerate(zip(texts, reasons, strict=True))]
        return msgspec.json.encode({**self._head.body("chat.completion", choices), "usage": used})

    def chunk(self, piece: Piece) -> bytes:
        """See `Shape`."""
        delta: dict[str, str] = {"content": piece.text} if piece.text else {}
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            delta = {"role": "assistant", "content": piece.text}
        choice = {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": piece.finish_reason}
        return self._head.chunk("chat.completion.chunk", choice)

    def usage_chunk(self, used: dict[str, int]) -> bytes:
        """See `Shape`."""
        return self._head.usage_chunk("chat.completion.chunk", used)


def _text_choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _message_choice(index: int, text: str, reason: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}
