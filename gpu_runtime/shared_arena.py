"""The arena as POSIX shared memory: made by the control process, mapped by the soft GPU and by `shm` front ends."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blink_proto import arena
from blink_proto.secret import SecretBytes
from gpu_runtime.config import BLOCK_TOKENS

SHM_FOLDER = Path("/dev/shm")
_PREFIX = "blink-arena-"


@dataclass(frozen=True)
class ArenaName:
    """Where an arena lies: the names of its two files in /dev/shm. A secret between the programs."""

    inbound: str
    outbound: str

    def transport_blob(self) -> SecretBytes:
        """What a front end with the `shm` transport needs to find the arena (JSON)."""
        return SecretBytes(json.dumps({"inbound": f"/{self.inbound}", "outbound": f"/{self.outbound}"}).encode())

    def __repr__(self) -> str:
        return "ArenaName(redacted)"


@dataclass(frozen=True)
class ArenaLimits:
    """What the header says beside the sizes."""

    nonce: int = field(repr=False)
    epoch: int
    vocab_size: int
    max_model_tokens: int
    max_sequence_tokens: int
    block_tokens: int = BLOCK_TOKENS


class SharedArena:
    """Both regions of an arena, mapped writable into this process.

    `inbound` and `outbound` are uint8 arrays over the whole regions, page-aligned.
    """

    def __init__(self, name: ArenaName, sizes: arena.Sizes, descriptors: tuple[int, int]) -> None:
        self.name = name
        self.sizes = sizes
        self.inbound_layout = arena.InboundLayout(sizes)
        self.outbound_layout = arena.OutboundLayout(sizes)
        self._descriptors = descriptors
        self.inbound = _map(descriptors[0], self.inbound_layout.total_bytes)
        self.outbound = _map(descriptors[1], self.outbound_layout.total_bytes)

    @classmethod
    def create(cls, sizes: arena.Sizes, limits: ArenaLimits) -> SharedArena:
        """Makes the files (mode 0600, zero) and writes the header.

        Raises:
            OSError: /dev/shm has no room.
        """
        remove_stale_arenas()
        token = secrets.token_hex(16)
        name = ArenaName(f"{_PREFIX}{token}-in", f"{_PREFIX}{token}-out")
        made = cls(name, sizes, _create_both(name, sizes))
        made._write_header(limits)
        return made

    @classmethod
    def attach(cls, name: ArenaName, sizes: arena.Sizes) -> SharedArena:
        """Maps an arena that another process made.

        Raises:
            OSError: it is gone.
        """
        flags = os.O_RDWR | os.O_CLOEXEC
        descriptors = (os.open(SHM_FOLDER / name.inbound, flags), os.open(SHM_FOLDER / name.outbound, flags))
        return cls(name, sizes, descriptors)

    @property
    def header(self) -> NDArray[np.void]:
        """ArenaHeader [1]."""
        return self._outbound_record(self.outbound_layout.header_offset, arena.ArenaHeader)

    @property
    def telemetry(self) -> NDArray[np.void]:
        """Telemetry [1]."""
        return self._outbound_record(self.outbound_layout.telemetry_offset, arena.Telemetry)

    def channel_out(self, channel: int) -> NDArray[np.void]:
        """ChannelOut [1] of a channel."""
        layout = self.outbound_layout
        return self._outbound_record(layout.channel_offset(channel) + layout.channel_control_offset, arena.ChannelOut)

    def unlink(self) -> None:
        """Removes the names; mappings stay valid."""
        for name in (self.name.inbound, self.name.outbound):
            (SHM_FOLDER / name).unlink(missing_ok=True)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = ()  # type: ignore[assignment]

    def _outbound_record(self, offset: int, kind: np.dtype[np.void]) -> NDArray[np.void]:
        return self.outbound[offset : offset + kind.itemsize].view(kind)

    def _write_header(self, limits: ArenaLimits) -> None:
        header = self.header[0]
        header["version"] = arena.VERSION
        header["byte_order"] = arena.BYTE_ORDER_MARK
        header["layout_hash"] = arena.LAYOUT_HASH
        for name, value in {**asdict(limits), **asdict(self.sizes)}.items():
            header[name] = value
        header["inbound_bytes"] = self.inbound_layout.total_bytes
        header["outbound_bytes"] = self.outbound_layout.total_bytes
        header["magic"] = arena.MAGIC


def remove_stale_arenas() -> None:
    """Removes arenas whose maker has died: a living one holds a lock on its files."""
    for path in SHM_FOLDER.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            pass
        finally:
            os.close(descriptor)


def arena_bytes(sizes: arena.Sizes) -> int:
    """What an arena takes in /dev/shm."""
    return arena.InboundLayout(sizes).total_bytes + arena.OutboundLayout(sizes).total_bytes


def free_room() -> int:
    """Bytes that /dev/shm has left."""
    found = os.statvfs(SHM_FOLDER)
    return found.f_bavail * found.f_frsize


def _create_both(name: ArenaName, sizes: arena.Sizes) -> tuple[int, int]:
    with ExitStack() as undo:
        inbound = _create(name.inbound, arena.InboundLayout(sizes).total_bytes, undo)
        outbound = _create(name.outbound, arena.OutboundLayout(sizes).total_bytes, undo)
        undo.pop_all()
        return inbound, outbound


def _create(name: str, size: int, undo: ExitStack) -> int:
    path = SHM_FOLDER / name
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    undo.callback(os.close, descriptor)
    undo.callback(path.unlink)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.posix_fallocate(descriptor, 0, size)
    return descriptor


def _map(descriptor: int, size: int) -> NDArray[np.uint8]:
    if os.fstat(descriptor).st_size < size:
        raise OSError("the arena's file is smaller than its layout")
    return np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)
