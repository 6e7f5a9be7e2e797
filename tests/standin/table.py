"""What two processes have registered with one RDMA device without a kernel: a table in a file that both have open."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import struct
from typing import NamedTuple

from blink_proto.rdma.uverbs import Registered, UverbsError

_ROW = struct.Struct("<QQQQII")
_ROWS = 512
INBOUND, OUTBOUND = 0x7F00_0000_0000, 0x7F80_0000_0000
"""Where the chain's process has its arena, when it registers that itself."""


class Row(NamedTuple):
    """A region; `live` until it is given back."""

    address: int
    size: int
    access: int
    by: int
    """Process."""
    key: int
    live: int


class Table:
    """See `peermem_owner.DeviceFile`. Handles are numbers of rows; `key` is never 0."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(os.dup(descriptor), _ROW.size * _ROWS)

    @classmethod
    def make(cls) -> Table:
        """An empty one."""
        descriptor = os.memfd_create("standin-adapter")
        os.ftruncate(descriptor, _ROW.size * _ROWS)
        return cls(descriptor)

    def rows(self) -> list[Row]:
        """All that ever were."""
        found = [Row(*_ROW.unpack_from(self._memory, index * _ROW.size)) for index in range(_ROWS)]
        return [row for row in found if row.key]

    def register(self, domain: int, address: int, size: int, access: int) -> Registered:
        handle, key = len(self.rows()), secrets.randbits(31) + 1
        _ROW.pack_into(self._memory, handle * _ROW.size, address, size, access, os.getpid(), key, 1)
        return Registered(handle, key, key)

    def deregister(self, region: int) -> None:
        row = Row(*_ROW.unpack_from(self._memory, region * _ROW.size))
        if not row.live:
            raise UverbsError("deregister", errno.ENOENT)
        _ROW.pack_into(self._memory, region * _ROW.size, *row[:-1], 0)

    def close(self) -> None:
        """The file is another's, as with `UverbsFile`."""
        self._memory.close()
