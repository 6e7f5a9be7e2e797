"""What can go wrong in the control plane, with the gRPC status that says so."""

from __future__ import annotations

import grpc


class ControlError(Exception):
    """Refused for a reason that the caller is told."""

    code = grpc.StatusCode.INTERNAL


class NotReadyError(ControlError):
    """The runtime is in the wrong state for the call."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class TakenError(ControlError):
    """It belongs to another caller."""

    code = grpc.StatusCode.PERMISSION_DENIED


class NoSuchModelError(ControlError):
    """No model of that name."""

    code = grpc.StatusCode.NOT_FOUND


class NoSuchSessionError(ControlError):
    """No session of that name."""

    code = grpc.StatusCode.NOT_FOUND


class BadRequestError(ControlError):
    """The request itself is wrong."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class StalledError(ControlError):
    """Nothing was heard of it for too long."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class ExhaustedError(ControlError):
    """Too little memory, or no channel is free."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


LONGEST_NAME = 128


def check_name(what: str, name: str) -> None:
    """Names go to logs, terminals and metrics.

    Raises:
        BadRequestError: it is empty, too long, or has characters that are not printed.
    """
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise BadRequestError(f"{what} must be a name of 1 to {LONGEST_NAME} printable characters")
