"""However a stream ends, it ends whole: an error as an event, `[DONE]` once, and a clean end of the body."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from dpu_service.api.answers import CompletionShape, Piece
from dpu_service.api.bodies import BodyRoom
from dpu_service.api.completions import _stream
from dpu_service.api.exchange import Exchange
from dpu_service.api.generation import Generation, Plan
from dpu_service.api.prepare import Prepared
from dpu_service.sequences.errors import DeviceUnavailableError, DrainTimeoutError, SequenceLostError


class Failing:
    """Stands for a `Generation` that says three words and then fails."""

    over = False
    completion_tokens = 3

    def __init__(self, failure: Exception) -> None:
        self._words = [[Piece(0, word)] for word in ("a", "b", "c")]
        self._failure = failure

    async def next(self) -> list[Piece]:
        return self.take_now()

    def take_now(self) -> list[Piece]:
        if not self._words:
            raise self._failure
        return self._words.pop(0)

    def listen(self, listener: object) -> None:
        pass


def streamed(failure: Exception) -> tuple[list[dict[str, Any]], str]:
    """What is sent, and the outcome for the metrics."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def answer() -> str:
        exchange = Exchange(
            {"method": "POST", "path": "/v1/completions", "headers": []}, receive, send, BodyRoom(1 << 20)
        )
        shape = CompletionShape("tiny", False, None, lambda found: [])
        prepared = Prepared([Plan([])], shape, stream=True, with_usage=False)
        return await _stream(exchange, cast(Generation, Failing(failure)), prepared)

    return sent, asyncio.run(answer())


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (RuntimeError("a bug"), "internal_error"),
        (SequenceLostError("the device ended the sequence"), "device_error"),
        (DeviceUnavailableError("the device is gone"), "device_unavailable"),
        (DrainTimeoutError("shutting down"), "shutting_down"),
    ],
)
def test_a_failure_after_three_chunks(failure: Exception, code: str) -> None:
    sent, outcome = streamed(failure)
    assert outcome == "error"
    assert (sent[0]["type"], sent[0]["status"]) == ("http.response.start", 200)
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    *parts, done, nothing = b"".join(message["body"] for message in sent[1:]).decode().split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    *chunks, last = [json.loads(part.removeprefix("data: ")) for part in parts]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
    assert last["error"]["code"] == code
    assert "a bug" not in last["error"]["message"]
