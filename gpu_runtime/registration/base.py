"""What the control plane needs from a transport: to let a front end in, and to shut it out again."""

from __future__ import annotations

from typing import Protocol


class RegistrationError(Exception):
    """The front end's offer cannot be used, or the device or its settings do not allow it."""


class NotNowError(RegistrationError):
    """The chain's process, which is needed for it, does not answer."""


class Registration(Protocol):
    """What one front end was given. Of the session that it belongs to, and no longer."""

    @property
    def answer(self) -> bytes:
        """The session's transport blob. A secret."""

    def revoke(self) -> None:
        """Shuts the front end out: from its return on no access through the answer succeeds. May be called again.

        Raises:
            RegistrationError: the device does not, so that some may; what is left is tried at the next call.
        """


class Registrar(Protocol):
    """Lets front ends into one arena by one transport. What it gives and itself are called from any thread, one call at
    a time, and may take seconds.
    """

    def register(self, offer: bytes, channels: tuple[int, ...]) -> Registration:
        """Gives a front end the least that it needs: to write the inbound memory of these channels, and to read their
        outbound memory, the header and the telemetry page.

        Raises:
            RegistrationError: the offer is not one of this transport, or the device refuses.
            NotNowError: it may be tried again.
        """

    def close(self) -> None:
        """Ends with the arena; every registration was revoked before."""
