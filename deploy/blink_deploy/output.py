"""How `blinkctl` prints: tables for people, JSON for scripts, and one clear line for whatever went wrong.

What others named goes to the terminal as it is written, and nothing in it is taken for markup or moves the cursor.
"""

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
from rich.text import Text

from blink_proto import control_pb2

console = Console(markup=False, emoji=False)
errors = Console(stderr=True, markup=False, emoji=False, highlight=False)

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


def plain(text: str) -> str:
    """On one line, with escapes for all that is not printed as a character: control characters would reach the
    terminal, others turn the writing around.
    """
    return "".join(one if one.isprintable() else _shown(one) for one in text.strip())


def _shown(one: str) -> str:
    return " " if one in "\n\t" else one.encode("unicode_escape").decode()


class PlainTable(Table):
    """A table of plain text."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Cells that are strings are shown as they are written; one for each heading, where there are headings."""
        if any(column.header for column in self.columns) and len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells under {len(self.columns)} headings")
        super().add_row(*(Text(plain(cell)) if isinstance(cell, str) else cell for cell in cells), **options)


def as_dict(message: Any) -> dict[str, Any]:
    """A message as JSON sees it, with the field names of the contract."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def phase_name(state: control_pb2.State) -> str:
    """`serving` for PHASE_SERVING; the number of one that came with a later version."""
    known = control_pb2.Phase.values()
    return (
        control_pb2.Phase.Name(state.phase).removeprefix("PHASE_").lower() if state.phase in known else str(state.phase)
    )


def show(output: Output, value: Any, table: Callable[[], Table | str]) -> None:
    """Prints an answer in the chosen way."""
    if output is Output.JSON:
        print(json.dumps(value, indent=2))
    else:
        made = table()
        console.print(plain(made) if isinstance(made, str) else made, soft_wrap=True)


def say_error(text: str) -> None:
    """One line on standard error."""
    errors.print(plain(text), style="red", soft_wrap=True)


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
