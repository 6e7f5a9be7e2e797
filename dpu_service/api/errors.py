"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

from typing import Any

import msgspec

from dpu_service.sequences.errors import (
    DeadlinePassedError,
    DeviceUnavailableError,
    DrainTimeoutError,
    QueueFullError,
    SequencesError,
)

RETRY_SECONDS = 1


class ApiError(Exception):
    """An answer other than success.

    Args:
        status: of HTTP.
        message: for people; never contains prompt text.
        kind: `type` of the error object.
        param: the request's field that is at fault.
        code: for programs.
        retry_after: seconds for the Retry-After header.
        allow: methods for the Allow header.
        challenge: for the WWW-Authenticate header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
        challenge: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.allow = allow
        self.challenge = challenge

    def headers(self) -> dict[bytes, bytes]:
        """What the answer says beside its body."""
        given = {b"retry-after": self.retry_after, b"allow": self.allow}
        made = {name: str(value).encode() for name, value in given.items() if value is not None}
        return made if self.challenge is None else {**made, b"www-authenticate": self.challenge}

    def body(self) -> bytes:
        """The error object as JSON."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def bad_value(param: str, message: str) -> ApiError:
    """400 for a field whose value is of the wrong type or out of range."""
    return ApiError(400, message, param=param, code="invalid_value")


def invalid_json(error: Exception) -> ApiError:
    """400 for a body that is not JSON."""
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")


def unsupported(param: str, message: str = "") -> ApiError:
    """400 for a field that would change the answer and is not built."""
    text = message or f"'{param}' is not supported by this server; leave it out or at its default"
    return ApiError(400, text, param=param, code="unsupported_parameter")


def shortened(text: str, most: int) -> str:
    """A text for an error, which must not grow with the request."""
    return text if len(text) <= most else text[:most] + "…"


def model_not_found(name: str) -> ApiError:
    """404 for a model that is not served here."""
    shown = shortened(name, 100)
    return ApiError(404, f"there is no model '{shown}' here", param="model", code="model_not_found")


def context_length(message: str, param: str) -> ApiError:
    """400 for a prompt, or a prompt and its answer, over the context window. LiteLLM knows it by the words "this
    model's maximum context length is", LangChain by "prompt is too long"."""
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unavailable(message: str, code: str = "service_unavailable") -> ApiError:
    """503 that a client may try again."""
    return ApiError(503, message, kind="server_error", code=code, retry_after=RETRY_SECONDS)


def deadline_passed() -> ApiError:
    """504 for a request whose client gave it less time than it takes."""
    message = "the time that X-Request-Timeout gives is over"
    return ApiError(504, message, kind="server_error", code="deadline_exceeded")


def internal() -> ApiError:
    """500 without particulars; they are in the log."""
    return ApiError(500, "the server failed to answer this request", kind="server_error", code="internal_error")


def from_sequences(error: SequencesError) -> ApiError:
    """The answer to a request that got no sequence or lost it."""
    if isinstance(error, QueueFullError):
        return unavailable(str(error), "queue_full")
    if isinstance(error, DeviceUnavailableError):
        return unavailable(str(error), "device_unavailable")
    if isinstance(error, DeadlinePassedError):
        return deadline_passed()
    if isinstance(error, DrainTimeoutError):
        return unavailable(str(error), "shutting_down")
    return ApiError(500, str(error), kind="server_error", code="device_error")
