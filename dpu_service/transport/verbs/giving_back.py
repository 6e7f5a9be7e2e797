"""The end of what was had of an RDMA device, which may refuse it."""

from __future__ import annotations

import logging
from typing import Protocol

from blink_proto.rdma.binding import RdmaError

log = logging.getLogger(__name__)

_left_behind: list[object] = []
"""What a device has kept, and what lies below it: memory that it may still write must not be used for anything else."""


class Closable(Protocol):
    """Part of a connection."""

    def close(self) -> None:
        """Raises:
        RdmaError: the device refuses.
        """


def give_back(*parts: Closable) -> None:
    """Closes them in this order. From one that the device refuses on they are left alone, with a word in the log."""
    for at, part in enumerate(parts):
        try:
            part.close()
        except RdmaError as error:
            log.error("a part of an RDMA connection stays", extra={"fields": {"reason": str(error)}})
            _left_behind.append(parts[at:])
            return
