"""Reads answers of completion endpoints, streamed or whole, into records."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.bench.record import Record
from tests.bench.sse import SseDecoder, SseError


class Delta(msgspec.Struct):
    """Text of a chat chunk or message; reasoning counts as text."""

    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    """A choice of either API, streamed or not."""

    text: str | None = None
    delta: Delta | None = None
    message: Delta | None = None
    finish_reason: str | None = None

    def has_text(self) -> bool:
        part = self.delta or self.message
        return bool(self.text or (part and (part.content or part.reasoning_content)))


class Usage(msgspec.Struct):
    """Token counts by the server."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Answer(msgspec.Struct):
    """A whole answer or one chunk of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decode_answer = msgspec.json.Decoder(Answer).decode


class Reader:
    """Takes the body of one answer and fills in its record."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def feed(self, piece: bytes, now: float) -> None:
        """Takes a piece of the body that arrived at `now`."""
        raise NotImplementedError

    def close(self) -> None:
        """Judges the answer after its last byte."""
        raise NotImplementedError

    def _fail(self, kind: str, detail: str) -> None:
        if not self._record.error:
            self._record.error, self._record.detail = kind, detail[:200]

    def _take(self, payload: bytes, now: float, streamed: bool) -> None:
        try:
            answer = decode_answer(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail("bad_answer", str(error))
            return
        if answer.error is not None:
            self._fail("error_event" if streamed else "error_answer", str(answer.error))
        if answer.usage is not None:
            self._record.prompt_tokens = answer.usage.prompt_tokens
            self._record.output_tokens = answer.usage.completion_tokens
            self._record.tokens_counted = True
        for choice in answer.choices:
            if streamed and choice.has_text():
                self._record.chunk_times.append(now)
            if choice.finish_reason:
                self._record.finish_reason = choice.finish_reason

    def _judge_finish(self) -> None:
        if not self._record.finish_reason:
            self._fail("no_finish_reason", "the answer ended without a finish_reason")


class StreamReader(Reader):
    """A stream of events that `[DONE]` ends."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self._decoder = SseDecoder()
        self._done = False

    def feed(self, piece: bytes, now: float) -> None:
        try:
            payloads = self._decoder.feed(piece)
        except SseError as error:
            self._fail("bad_answer", str(error))
            return
        for payload in payloads:
            if payload == b"[DONE]":
                self._done = True
            else:
                self._take(payload, now, streamed=True)

    def close(self) -> None:
        if not self._done:
            self._fail("no_done", "the stream ended without [DONE]")
        self._judge_finish()
        if not self._record.tokens_counted:
            self._record.output_tokens = len(self._record.chunk_times)


class WholeReader(Reader):
    """One JSON object."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self._pieces: list[bytes] = []

    def feed(self, piece: bytes, now: float) -> None:
        self._pieces.append(piece)

    def close(self) -> None:
        self._take(b"".join(self._pieces), 0.0, streamed=False)
        self._judge_finish()


class RefusalReader(WholeReader):
    """The body of an answer whose status is not 200."""

    def close(self) -> None:
        body = b"".join(self._pieces)
        self._fail(f"http_{self._record.status}", body.decode("utf-8", "replace"))
