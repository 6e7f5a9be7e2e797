"""How `blinkctl` prints: tables for people, JSON for scripts, and one clear line for whatever went wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

console = Console()
errors = Console(stderr=True)

REFUSED, USAGE, UNREACHABLE, FORBIDDEN = 1, 2, 3, 4
"""Exit statuses."""
_STATUSES = {
    grpc.StatusCode.UNAVAILABLE: UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: UNREACHABLE,
    grpc.StatusCode.UNAUTHENTICATED: FORBIDDEN,
    grpc.StatusCode.PERMISSION_DENIED: FORBIDDEN,
}


class Output(StrEnum):
    """How answers are printed."""

    TABLE = "table"
    JSON = "json"


def as_dict(message: Any) -> dict[str, Any]:
    """A message as JSON sees it, with the field names of the contract."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def show(output: Output, value: Any, table: Callable[[], Table | str]) -> None:
    """Prints an answer in the chosen way."""
    if output is Output.JSON:
        print(json.dumps(value, indent=2))
    else:
        console.print(table(), soft_wrap=True)


def say_error(text: str) -> None:
    """One line on standard error, with nothing in it taken for markup."""
    errors.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def explain(error: grpc.RpcError, address: str, *, secure: bool) -> int:
    """Says what the runtime refused or why it was not reached; the exit status."""
    code: grpc.StatusCode = error.code()
    details = (error.details() or "").strip()
    if code is grpc.StatusCode.UNAVAILABLE:
        hint = "" if secure else " (if it uses TLS, give --certs or --ca, --cert and --key)"
        say_error(f"cannot reach the runtime at {address}: {code.name}: {details}{hint}")
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
        say_error(f"no answer from the runtime at {address} in time: {code.name}")
    else:
        say_error(f"{code.name}: {details}")
    return _STATUSES.get(code, REFUSED)


def flush() -> None:
    """For streams that somebody follows."""
    sys.stdout.flush()
