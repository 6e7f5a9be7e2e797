"""Bodies of answers, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from dpu_service.api.logprobs import Entry
from dpu_service.channel.logprobs import Logprob
from dpu_service.text.tools.pieces import CallPiece

DONE = b"data: [DONE]\n\n"
_CHAT_CHUNK = "chat.completion.chunk"


def event(body: Any) -> bytes:
    """A server-sent event with a JSON body."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


Usage = dict[str, int | dict[str, int]]


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> Usage:
    """OpenAI's `usage` object. Details are there when some of the prompt was in the device's prefix cache."""
    used: Usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return {**used, "prompt_tokens_details": {"cached_tokens": cached_tokens}} if cached_tokens else used


Render = Callable[[list[Entry]], dict[str, Any]]
"""The object `logprobs` of a choice."""
RenderPrompt = Callable[[list[list[Logprob]]], list[dict[str, Any] | None]]
"""The list `prompt_logprobs`."""


def of_prompt(piece: Piece, render: RenderPrompt) -> dict[str, Any]:
    """The field of that name, where the client asked for it."""
    found = piece.prompt_logprobs
    return {} if found is None else {"prompt_logprobs": render(found)}


class Piece(msgspec.Struct):
    """News of one choice: text, the tokens whose log-probabilities were asked for, and in the last piece a reason.

    `prompt_logprobs`: those of the prompt's tokens but the first, for the field of this name.
    """

    index: int
    text: str = ""
    finish_reason: str | None = None
    entries: list[Entry] = []
    prompt_logprobs: list[list[Logprob]] | None = None
    calls: list[CallPiece] = []

    @property
    def says_something(self) -> bool:
        """Whether there is any news."""
        return bool(self.text or self.finish_reason or self.entries or self.calls)

    @property
    def tokens_described(self) -> int:
        """Tokens that come with log-probabilities."""
        return len(self.entries) + len(self.prompt_logprobs or ())

    def add(self, later: Piece) -> None:
        """Appends what came later."""
        self.text += later.text
        self.finish_reason = later.finish_reason
        self.entries += later.entries
        self.calls += later.calls
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs


class Shape(Protocol):
    """How an endpoint words its answers."""

    def whole(self, choices: list[Piece], used: Usage) -> bytes:
        """The body of an answer in one piece."""

    def chunk(self, piece: Piece) -> bytes:
        """One event of a stream."""

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and behind the JSON string in events that bring text and nothing else of a choice, from
        its second one on."""

    def usage_chunk(self, used: Usage) -> bytes:
        """The last event before [DONE], when usage was asked for."""


@dataclass
class _Head:
    """What every body of one answer begins with.

    Args:
        with_usage: chunks carry `"usage": null`, as they do when usage was asked for.
        render: None where no log-probabilities were asked for.
    """

    model: str
    with_usage: bool
    render: Render | None
    prefix: str
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    _chunk_around: tuple[bytes, bytes] | None = None

    def body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def chunk(self, kind: str, choice: dict[str, Any]) -> bytes:
        if not self._chunk_around:
            self._chunk_around = self._around(kind)
        return b"%b%b%b" % (self._chunk_around[0], msgspec.json.encode(choice), self._chunk_around[1])

    def around_text(self, kind: str, choice: Callable[[str], dict[str, Any]]) -> tuple[bytes, bytes]:
        """The same of the text of chunks that are equal but for it."""
        mark = secrets.token_hex()
        before, behind = self.chunk(kind, choice(mark)).split(msgspec.json.encode(mark))
        return before, behind

    def _around(self, kind: str) -> tuple[bytes, bytes]:
        """What stands before and behind the choice in every chunk."""
        usage = {"usage": None} if self.with_usage else {}
        before, behind = event({**self.body(kind, []), **usage}).split(b'"choices":[]', 1)
        return before + b'"choices":[', b"]" + behind

    def logprobs(self, piece: Piece, whole: bool = False) -> dict[str, Any] | None:
        """Null in chunks without tokens."""
        return self.render(piece.entries) if self.render and (whole or piece.entries) else None

    def usage_chunk(self, kind: str, used: Usage) -> bytes:
        return event({**self.body(kind, []), "usage": used})


class CompletionShape:
    """`text_completion` objects.

    Args:
        render_prompt: makes `prompt_logprobs` of choices that have them; never in chunks.
    """

    def __init__(self, model: str, with_usage: bool, render: Render | None, render_prompt: RenderPrompt) -> None:
        self._head = _Head(model, with_usage, render, "cmpl")
        self._render_prompt = render_prompt

    def whole(self, choices: list[Piece], used: Usage) -> bytes:
        """See `Shape`."""
        said = [
            {**self._choice(one, self._head.logprobs(one, whole=True)), **of_prompt(one, self._render_prompt)}
            for one in choices
        ]
        return msgspec.json.encode({**self._head.body("text_completion", said), "usage": used})

    def chunk(self, piece: Piece) -> bytes:
        """See `Shape`."""
        return self._head.chunk("text_completion", self._choice(piece, self._head.logprobs(piece)))

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """See `Shape`."""
        return self._head.around_text("text_completion", lambda text: self._choice(Piece(index, text), None))

    def usage_chunk(self, used: Usage) -> bytes:
        """See `Shape`."""
        return self._head.usage_chunk("text_completion", used)

    @staticmethod
    def _choice(piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}


class ChatShape:
    """`chat.completion` and `chat.completion.chunk` objects; the first chunk of a choice tells the role.

    Args:
        render_prompt: makes `prompt_logprobs`, which an answer has once, beside its choices.
        call_id: makes the id of a tool call.
        echo: stands in front of every answer.
    """

    def __init__(
        self,
        model: str,
        with_usage: bool,
        render: Render | None,
        render_prompt: RenderPrompt,
        call_id: Callable[[], str],
        echo: str = "",
    ) -> None:
        self._head = _Head(model, with_usage, render, "chatcmpl")
        self._render_prompt = render_prompt
        self._call_id = call_id
        self._echo = echo
        self._begun: set[int] = set()

    def whole(self, choices: list[Piece], used: Usage) -> bytes:
        """See `Shape`."""
        said = [self._message(one) for one in choices]
        scored = of_prompt(choices[0], self._render_prompt)
        return msgspec.json.encode({**self._head.body("chat.completion", said), **scored, "usage": used})

    def chunk(self, piece: Piece) -> bytes:
        """See `Shape`."""
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            delta = {"role": "assistant", "content": self._content(piece)}
        if piece.calls:
            delta["tool_calls"] = self._calls(piece)
        return self._head.chunk(_CHAT_CHUNK, self._delta(piece, delta, self._head.logprobs(piece)))

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """See `Shape`."""
        return self._head.around_text(_CHAT_CHUNK, lambda text: self._delta(Piece(index), {"content": text}, None))

    def usage_chunk(self, used: Usage) -> bytes:
        """See `Shape`."""
        return self._head.usage_chunk(_CHAT_CHUNK, used)

    @staticmethod
    def _delta(piece: Piece, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _message(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._content(piece), "refusal": None}
        if piece.calls:
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in self._calls(piece)
            ]
        logprobs = self._head.logprobs(piece, whole=True)
        return {"index": piece.index, "message": message, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _content(self, piece: Piece) -> str | None:
        """Null where there are calls and nothing else."""
        text = self._echo + piece.text
        return None if piece.calls and not text else text

    def _calls(self, piece: Piece) -> list[dict[str, Any]]:
        """One object for each call, with id, type and name where it begins."""
        found: dict[int, dict[str, Any]] = {}
        for one in piece.calls:
            if one.name is not None:
                function = {"name": one.name, "arguments": ""}
                found[one.index] = {
                    "index": one.index,
                    "id": self._call_id(),
                    "type": "function",
                    "function": function,
                }
            call = found.setdefault(one.index, {"index": one.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += one.arguments
        return list(found.values())
