"""Roles of the control plane's callers, as their certificates name them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

_PREFIX = "spiffe://blink/role/"


class Role(StrEnum):
    """What a certificate may be used for."""

    FRONT_END = "front-end"
    """Opens sessions and fetches tokenizers."""
    ADMINISTRATOR = "administrator"
    """Loads, unloads and drains."""
    READER = "reader"
    """Looks."""

    @property
    def uri(self) -> str:
        """How a certificate names it: a subject alternative name of type URI."""
        return _PREFIX + self.value


def role_of(uris: Iterable[str]) -> Role | None:
    """The role that a certificate's URIs name; None when they name none, an unknown one, or several."""
    named = {uri.removeprefix(_PREFIX) for uri in uris if uri.startswith(_PREFIX)}
    if len(named) != 1:
        return None
    try:
        return Role(named.pop())
    except ValueError:
        return None
