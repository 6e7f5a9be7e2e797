"""Whether runtimes that serve a model of one name serve the same one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

from dpu_service.channel.errors import ChannelError


@dataclass(frozen=True)
class Identity:
    """What replicas of a model have in common. Windows may differ, and sizes of the arena."""

    architecture: str
    parameters: int
    dtype: str
    vocabulary: int
    tokenizer: bytes
    """Digest of its files."""


def digest_of(files: dict[str, bytes]) -> bytes:
    """The same for the same names and contents only."""
    hashed = hashlib.sha256()
    for name, content in sorted(files.items()):
        hashed.update(hashlib.sha256(name.encode()).digest() + hashlib.sha256(content).digest())
    return hashed.digest()


class OtherModelError(ChannelError):
    """The runtime's model has the name of another one."""


class SameRuntimeError(ChannelError):
    """Two addresses lead to one runtime."""


class Identities:
    """What each runtime serves, by its number: its arena's nonce, the model's name, and what that is."""

    def __init__(self) -> None:
        self._served: dict[int, tuple[int, str, Identity]] = {}

    def claim(self, runtime: int, nonce: int, name: str, identity: Identity) -> None:
        """From now on the runtime serves this. If not, it serves nothing.

        Raises:
            OtherModelError: another runtime serves something else by this name.
            SameRuntimeError: it is another one of these.
        """
        self.drop(runtime)
        for other, (its_nonce, its_name, its) in self._served.items():
            if its_nonce == nonce:
                raise SameRuntimeError(f"it is the runtime that has number {other} already, by another address")
            different = _differences(identity, its)
            if its_name == name and different:
                raise OtherModelError(
                    f"its model {name!r} is not the one that runtime {other} serves by that name: other "
                    + ", ".join(different)
                )
        self._served[runtime] = (nonce, name, identity)

    def drop(self, runtime: int) -> None:
        """It serves nothing any more."""
        self._served.pop(runtime, None)


def _differences(one: Identity, other: Identity) -> list[str]:
    return [field.name for field in fields(Identity) if getattr(one, field.name) != getattr(other, field.name)]
