"""What can go wrong with DOCA."""

from __future__ import annotations

from blink_proto.doca.constants import Status


class DocaError(Exception):
    """A call failed.

    Args:
        call: the function.
        status: the value of `doca_error_t`.
        name: of the status.
        text: what the library says of it.
    """

    def __init__(self, call: str, status: int, name: str, text: str) -> None:
        self.call = call
        self.status = status
        super().__init__(f"{call}: {name}" + (f" ({text})" if text else ""))


class DocaUnavailableError(Exception):
    """This machine does not have what the `doca` transport needs."""


def status_name(status: int) -> str:
    """`DOCA_ERROR_…`, also for values that are newer than this table."""
    if status == Status.SUCCESS:
        return "DOCA_SUCCESS"
    return f"DOCA_ERROR_{Status(status).name}" if status in Status._value2member_map_ else f"DOCA_ERROR_{status}"
