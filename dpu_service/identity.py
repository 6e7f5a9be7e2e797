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


class Identities:
    """What each runtime serves, by its number."""

    def __init__(self) -> None:
        self._served: dict[int, tuple[str, Identity]] = {}

    def claim(self, runtime: int, name: str, identity: Identity) -> None:
        """From now on the runtime serves this.

        Raises:
            OtherModelError: another runtime serves something else by this name; nothing has changed then, but that the
                runtime serves nothing.
        """
        self.drop(runtime)
        for other, (its_name, its) in self._served.items():
            different = _differences(identity, its)
            if its_name == name and different:
                raise OtherModelError(
                    f"its model {name!r} is not the one that runtime {other} serves by that name: other "
                    + ", ".join(different)
                )
        self._served[runtime] = (name, identity)

    def drop(self, runtime: int) -> None:
        """It serves nothing any more."""
        self._served.pop(runtime, None)


def _differences(one: Identity, other: Identity) -> list[str]:
    return [field.name for field in fields(Identity) if getattr(one, field.name) != getattr(other, field.name)]
