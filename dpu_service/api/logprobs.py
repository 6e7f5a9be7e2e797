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
class Asked:
    """Log-probabilities that a request wants. Counts are 0 for none, or 1 + number of most likely tokens.

    Attributes:
        shown: with each token of the answer, and of the prompt where it is echoed.
        of_prompt: with each token of the prompt, in the field `prompt_logprobs`.
        echoed: the prompt is echoed.
        ranked: the choices are compared.
    """

    shown: int = 0
    of_prompt: int = 0
    echoed: bool = False
    ranked: bool = False

    @property
    def of_device(self) -> int:
        """What the device is asked for with each token."""
        return max(self.shown, self.of_prompt, int(self.ranked))

    @property
    def scores_prompt(self) -> bool:
        """Whether the device is to give those of the prompt."""
        return self.of_prompt > 0 or (self.echoed and self.shown > 0)


@dataclass(frozen=True)
class Entry:
    """One token of a choice's text: where its own text begins, and its own and the most likely tokens'
    log-probabilities in this order; none for a token that nothing precedes."""

    offset: int
    token: int
    logprobs: list[Logprob]


@dataclass(frozen=True)
class Naming:
    """How tokens are written: as their text or, with `as_ids`, as `token_id:` and their id."""

    spelling: Spelling
    as_ids: bool = False

    def text(self, token: int, mark: str) -> str:
        """Args: mark: in front of a token that is no whole text."""
        return f"token_id:{token}" if self.as_ids else _text(self.spelling(token), mark)


def asked_of_completion(request: CompletionRequest, geometry: Geometry, ranked: bool) -> Asked:
    """Checks both fields.

    Raises:
        ApiError: 400: out of range.
    """
    shown = 0 if request.logprobs is None else 1 + _top("logprobs", request.logprobs, geometry)
    hint = "; use 'echo' with 'logprobs'"
    return Asked(shown, _of_prompt(request, geometry, hint), bool(request.echo), ranked)


def asked_of_chat(request: ChatRequest, geometry: Geometry) -> Asked:
    """See `asked_of_completion`.

    Raises:
        ApiError: 400: out of range, or `top_logprobs` without `logprobs`.
    """
    top = _top("top_logprobs", request.top_logprobs or 0, geometry)
    if top and not request.logprobs:
        raise bad_value("top_logprobs", "'logprobs' must be true when 'top_logprobs' is given")
    return Asked(1 + top if request.logprobs else 0, _of_prompt(request, geometry))


def _of_prompt(request: ChatRequest | CompletionRequest, geometry: Geometry, hint: str = "") -> int:
    if request.prompt_logprobs is None:
        return 0
    if request.stream:
        raise bad_value("prompt_logprobs", f"'prompt_logprobs' cannot be streamed{hint}")
    return 1 + _top("prompt_logprobs", request.prompt_logprobs, geometry)


def completion_object(naming: Naming, entries: list[Entry]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions."""
    return {
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": [_value(entry.logprobs[0]) if entry.logprobs else None for entry in entries],
        "tokens": [naming.text(entry.token, "bytes:") for entry in entries],
        "top_logprobs": [_by_text(entry, naming) if entry.logprobs else None for entry in entries],
    }


def chat_object(naming: Naming, entries: list[Entry]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions."""
    content = []
    for entry in entries:
        own, *likely = (_chat_token(one, naming) for one in entry.logprobs)
        content.append({**own, "top_logprobs": likely})
    return {"content": content, "refusal": None}


def prompt_object(naming: Naming, found: list[list[Logprob]]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` of a choice, as vLLM has it: null for the first token, then an object by token id each."""
    return [None, *({str(one.token): _ranked(one, naming) for one in logprobs} for logprobs in found)]


def _top(param: str, given: int, geometry: Geometry) -> int:
    """What the device takes: a token's records must fit into its log together."""
    most = min(arena.MAX_TOP_LOGPROBS, geometry.vocab_size, geometry.log_slots - 2)
    if not 0 <= given <= most:
        raise bad_value(param, f"'{param}' must be between 0 and {most}")
    return given


def _by_text(entry: Entry, naming: Naming) -> dict[str, float]:
    """The most likely tokens, then the token's own where it is not among them. Of several tokens with the same text
    the most likely one counts."""
    values: dict[str, float] = {}
    for one in [*entry.logprobs[1:], entry.logprobs[0]]:
        values.setdefault(naming.text(one.token, "bytes:"), _value(one))
    return values


def _chat_token(one: Logprob, naming: Naming) -> dict[str, Any]:
    data = naming.spelling(one.token)
    return {"token": naming.text(one.token, ""), "logprob": _value(one), "bytes": list(data) or None}


def _ranked(one: Logprob, naming: Naming) -> dict[str, Any]:
    return {"logprob": _value(one), "rank": one.rank, "decoded_token": naming.text(one.token, "bytes:")}


def _text(data: bytes, mark: str) -> str:
    r"""The text of a token; for one that is no whole text, OpenAI's notation: `mark`, and `\xNN` for odd bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return mark + data.decode("utf-8", "backslashreplace")


def _value(one: Logprob) -> float:
    return max(one.logprob, LEAST)
