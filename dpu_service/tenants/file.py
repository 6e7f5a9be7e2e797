"""The keys file: TOML, one table for each tenant.

[tenants.acme]
keys = ["sha256:…", "sha256:…"]     # several while a key is replaced; none: shut out for now
concurrent_sequences = 64           # this and the following may be left out: no limit
queued_sequences = 32
requests_per_minute = 600
tokens_per_minute = 200_000
metrics = false                     # may read /metrics
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec

from dpu_service.tenants.keys import read_digest
from dpu_service.tenants.page import SLOTS
from dpu_service.tenants.tenant import Limits, Tenant

MAX_FILE_BYTES = 8 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**40)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[str]
    concurrent_sequences: Positive | None = None
    queued_sequences: Positive | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    metrics: bool = False

    def limits(self) -> Limits:
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: dict[str, _Entry]


class KeysFile:
    """Reads the file again and again, and gives each name its slot once and for all."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._slots: dict[str, int] = {}

    def read(self) -> list[Tenant]:
        """The tenants.

        Raises:
            ValueError: what is wrong with the file, without any part of a key.
            OSError: it cannot be read.
        """
        entries = _decode(self.path).tenants
        if not entries:
            raise ValueError("it holds no tenant")
        tenants = [self._tenant(name, entry) for name, entry in entries.items()]
        digests = [one for tenant in tenants for one in tenant.digests]
        if len(digests) != len(set(digests)):
            raise ValueError("a key is there twice")
        return tenants

    def _tenant(self, name: str, entry: _Entry) -> Tenant:
        if not NAME.fullmatch(name):
            raise ValueError("a tenant's name is not of letters, digits, '.', '_' and '-', or is too long")
        try:
            digests = [read_digest(text) for text in entry.keys]
        except ValueError as error:
            raise ValueError(f"tenant {name}: {error}") from None
        slot = self._slots.setdefault(name, len(self._slots))
        if slot >= SLOTS:
            raise ValueError(f"there were over {SLOTS} names since the start")
        return Tenant(name=name, slot=slot, digests=digests, limits=entry.limits(), metrics=entry.metrics)


def _decode(path: str) -> _File:
    with Path(path).open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"it is over {MAX_FILE_BYTES} bytes")
    try:
        return msgspec.toml.decode(content, type=_File)
    except msgspec.ValidationError as error:  # names the place, not the content
        raise ValueError(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ValueError("it is not TOML") from None
