"""Log-probabilities: what a request may ask for, and the objects of the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blink_proto import arena
from dpu_service.api.errors import bad_value
from dpu_service.api.requests import ChatRequest, CompletionRequest
from dpu_service.channel.geometry import Geometry
from dpu_service.channel.logprobs import Logprob
from dpu_service.text.spelling import Spelling

LEAST = -9999.0
"""OpenAI's value for what is hardly possible; JSON has no minus infinity."""


@dataclass(frozen=True)
class Entry:
    """One generated token: where its text begins in the choice's, and its own and the most likely tokens'
    log-probabilities in this order."""

    offset: int
    logprobs: list[Logprob]


def asked_of_completion(request: CompletionRequest, geometry: Geometry) -> int:
    """Log-probabilities for each token: 0, or 1 + number of most likely tokens.

    Raises:
        ApiError: 400: out of range.
    """
    return 0 if request.logprobs is None else 1 + _top("logprobs", request.logprobs, geometry)


def asked_of_chat(request: ChatRequest, geometry: Geometry) -> int:
    """See `asked_of_completion`.

    Raises:
        ApiError: 400: out of range, or `top_logprobs` without `logprobs`.
    """
    top = _top("top_logprobs", request.top_logprobs or 0, geometry)
    if top and not request.logprobs:
        raise bad_value("top_logprobs", "'logprobs' must be true when 'top_logprobs' is given")
    return 1 + top if request.logprobs else 0


def completion_object(spelling: Spelling, entries: list[Entry]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions."""
    own = [entry.logprobs[0] for entry in entries]
    return {
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": [_value(one) for one in own],
        "tokens": [_text(spelling(one.token), "bytes:") for one in own],
        "top_logprobs": [_by_text(entry, spelling) for entry in entries],
    }


def chat_object(spelling: Spelling, entries: list[Entry]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions."""
    content = []
    for entry in entries:
        own, *likely = (_chat_token(one, spelling) for one in entry.logprobs)
        content.append({**own, "top_logprobs": likely})
    return {"content": content, "refusal": None}


def _top(param: str, given: int, geometry: Geometry) -> int:
    """What the device takes: a token's records must fit into its log together."""
    most = min(arena.MAX_TOP_LOGPROBS, geometry.vocab_size, geometry.log_slots - 2)
    if not 0 <= given <= most:
        raise bad_value(param, f"'{param}' must be between 0 and {most}")
    return given


def _by_text(entry: Entry, spelling: Spelling) -> dict[str, float]:
    """The most likely tokens, then the token's own where it is not among them. Of several tokens with the same text
    the most likely one counts."""
    values: dict[str, float] = {}
    for one in [*entry.logprobs[1:], entry.logprobs[0]]:
        values.setdefault(_text(spelling(one.token), "bytes:"), _value(one))
    return values


def _chat_token(one: Logprob, spelling: Spelling) -> dict[str, Any]:
    data = spelling(one.token)
    return {"token": _text(data, ""), "logprob": _value(one), "bytes": list(data) or None}


def _text(data: bytes, mark: str) -> str:
    r"""The text of a token; for one that is no whole text, OpenAI's notation: `mark`, and `\xNN` for odd bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return mark + data.decode("utf-8", "backslashreplace")


def _value(one: Logprob) -> float:
    return max(one.logprob, LEAST)
