"""What each route takes and answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from dpu_service.api.openapi import answers
from dpu_service.api.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or unknown, where keys are required.",
    403: "The API key does not open this.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "A limit of this key is reached. `Retry-After` says when to try again.",
    500: "The device could not finish the request, or the server failed.",
    503: "Not now: the queue is full, no model is served, or the server shuts down. `Retry-After` says when.",
    504: "The time that the client gives by `X-Request-Timeout` (seconds) is over.",
}
BODY_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503, 504)


@dataclass(frozen=True)
class Operation:
    """One route.

    Attributes:
        answer: of status 200; None for one that has no schema.
        event: of a stream, where the route can answer with one.
        errors: statuses with an error object.
        others: further statuses with objects of their own.
        open: asked without a key.
        deadline: heeds the header with the client's time.
    """

    name: str
    summary: str
    answer: type[Struct] | None
    method: str = "get"
    request: type[Struct] | None = None
    event: type[Struct] | None = None
    errors: tuple[int, ...] = (401, 429, 500)
    others: dict[int, type[Struct]] = field(default_factory=dict)
    open: bool = False
    deadline: bool = False
    media: str = "application/json"
    example: dict[str, Any] | None = None


_MODEL = "smollm2-135m-instruct"

OPERATIONS: dict[str, Operation] = {
    "/v1/completions": Operation(
        "createCompletion",
        "Continue a text.",
        answers.CompletionAnswer,
        "post",
        CompletionRequest,
        answers.CompletionChunk,
        BODY_ERRORS,
        example={"model": _MODEL, "prompt": "Once upon a time", "max_tokens": 32},
        deadline=True,
    ),
    "/v1/chat/completions": Operation(
        "createChatCompletion",
        "Answer in a conversation.",
        answers.ChatAnswer,
        "post",
        ChatRequest,
        answers.ChatChunk,
        BODY_ERRORS,
        example={"model": _MODEL, "messages": [{"role": "user", "content": "Hello"}]},
        deadline=True,
    ),
    "/tokenize": Operation(
        "tokenize",
        "The tokens of a prompt.",
        answers.TokenizeAnswer,
        "post",
        TokenizeRequest,
        errors=BODY_ERRORS,
        example={"prompt": "Once upon a time"},
    ),
    "/detokenize": Operation(
        "detokenize",
        "The text of tokens.",
        answers.DetokenizeAnswer,
        "post",
        DetokenizeRequest,
        errors=BODY_ERRORS,
        example={"tokens": [1, 2, 3]},
    ),
    "/v1/models": Operation("listModels", "List the served models.", answers.ModelList),
    "/v1/models/{model}": Operation(
        "retrieveModel", "Describe a model.", answers.ModelCard, errors=(401, 404, 429, 500)
    ),
    "/health": Operation("getHealth", "Whether the process lives.", answers.Health, errors=(500,), open=True),
    "/ready": Operation(
        "getReadiness",
        "Whether completions are taken.",
        answers.Ready,
        errors=(500,),
        others={503: answers.NotReady},
        open=True,
    ),
    "/metrics": Operation(
        "getMetrics",
        "Prometheus metrics of all workers and the device.",
        None,
        errors=(401, 403, 500),
        media="text/plain",
    ),
    "/version": Operation("getVersion", "The server's version.", answers.Version),
    "/openapi.json": Operation("getDocument", "This document.", None),
}
