"""One request to an OpenAI-compatible endpoint, measured.

Kinds of failure in `Record.error`: connect, cut (the connection ended in the middle), timeout, http_<status>,
error_event (an error inside a stream), error_answer, bad_answer (not what the API promises), no_done,
no_finish_reason, over_limit (never sent, see `load`), interrupted.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.bench.answer import Reader, RefusalReader, StreamReader, WholeReader
from tests.bench.connection import ConnectionLost, Pool, Target
from tests.bench.record import Record


@dataclass(frozen=True)
class Ask:
    """What every request asks; `extra` is merged into the body."""

    model: str
    api: Literal["completions", "chat"] = "completions"
    max_tokens: int = 64
    temperature: float = 0.0
    stream: bool = True
    timeout: float = 600.0
    api_key: str = field(default="", repr=False)
    extra: dict[str, Any] = field(default_factory=dict)


class Client:
    """Sends requests and gives back their records."""

    def __init__(self, target: Target, ask: Ask) -> None:
        self._target = target
        self._ask = ask
        self._pool = Pool(target)

    async def measure(self, prompt: str, due: float) -> Record:
        """Sends one request now, and gives its record when the answer has ended. Never raises but for cancellation."""
        now = asyncio.get_running_loop().time
        record = Record(due=due, sent=now())
        try:
            async with asyncio.timeout(self._ask.timeout):
                await self._exchange(self._request(prompt), record)
        except TimeoutError:
            _fail(record, "timeout", f"no complete answer within {self._ask.timeout:g} s")
        except ConnectionLost as error:
            _fail(record, "cut", str(error))
        except OSError as error:
            _fail(record, "connect", str(error))
        record.end = now()
        return record

    async def _exchange(self, request: bytes, record: Record) -> None:
        now = asyncio.get_running_loop().time
        readers: list[Reader] = []

        def on_status(status: int) -> None:
            record.status = status
            readers[:] = [self._reader(record)]

        await self._pool.exchange(request, on_status, lambda piece: readers[0].feed(piece, now()))
        readers[0].close()

    def _reader(self, record: Record) -> Reader:
        if record.status != 200:
            return RefusalReader(record)
        return StreamReader(record) if self._ask.stream else WholeReader(record)

    def _request(self, prompt: str) -> bytes:
        path = "/chat/completions" if self._ask.api == "chat" else "/completions"
        return http_request("POST", self._target, path, self._ask.api_key, json.dumps(self._body(prompt)).encode())

    def _body(self, prompt: str) -> dict[str, Any]:
        ask = self._ask
        body: dict[str, Any] = {"model": ask.model, "max_tokens": ask.max_tokens, "temperature": ask.temperature}
        if ask.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if ask.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | ask.extra

    def close(self) -> None:
        self._pool.close()


async def first_model(target: Target, api_key: str = "") -> str:
    """Name of the first model that the endpoint lists.

    Raises:
        ValueError: the answer lists none.
        ConnectionLost, OSError: no answer.
    """
    pool, body = Pool(target), bytearray()
    statuses: list[int] = []
    await pool.exchange(http_request("GET", target, "/models", api_key), statuses.append, body.extend)
    pool.close()
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"no model in the answer (status {statuses}) of {target.prefix}/models") from error


def http_request(method: str, target: Target, path: str, api_key: str = "", body: bytes = b"") -> bytes:
    """Bytes of one request."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    lines = [f"{method} {target.prefix}{path} HTTP/1.1", f"Host: {host}:{target.port}", "User-Agent: blink-bench"]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "\r\n"]).encode("latin-1") + body


def _fail(record: Record, kind: str, detail: str) -> None:
    if not record.error:
        record.error, record.detail = kind, detail[:200]
