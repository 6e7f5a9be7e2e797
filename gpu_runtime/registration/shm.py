"""Registration for the `shm` transport: the files' names are all that a front end needs, and all of them get the same.

Whoever may open them is of the same user on the same machine, so nothing is gained by giving parts of them. What was
mapped cannot be taken away again; a lease that has ended is what keeps a late writer out.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.shared_arena import SharedArena


@dataclass(frozen=True)
class ShmRegistration:
    """See `Registration`."""

    answer: bytes

    def revoke(self) -> None:
        """Nothing to take away (see the module)."""

    def __repr__(self) -> str:
        return "ShmRegistration(redacted)"


class ShmRegistrar:
    """See `Registrar`."""

    def __init__(self, shared: SharedArena) -> None:
        self._arena = shared

    def register(self, offer: bytes, channels: tuple[int, ...]) -> ShmRegistration:
        """The names of both files."""
        if offer:
            raise RegistrationError("the shm transport takes no offer")
        return ShmRegistration(self._arena.name.transport_blob())

    def close(self) -> None:
        """Holds nothing."""
