"""What a binding has made of a package's objects, and closes again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from blink_proto.rdma.binding import RdmaError


class Made:
    """Objects that are closed in the reverse order of their making. One that cannot be stays, and is tried again.

    Args:
        called: calls a function of the package, and makes an RdmaError of its failure.
    """

    def __init__(self, called: Callable[..., Any]) -> None:
        self._called = called
        self._objects: list[Any] = []

    def add(self, made: Any) -> Any:
        """The object itself."""
        self._objects.append(made)
        return made

    def close(self) -> None:
        """Closes what is open.

        Raises:
            RdmaError: something refuses; what was made before it is open too.
        """
        while self._objects:
            self._called(self._objects[-1].close)
            self._objects.pop()

    def abandon(self) -> None:
        """Closes what can be, after another error."""
        with suppress(RdmaError):
            self.close()
