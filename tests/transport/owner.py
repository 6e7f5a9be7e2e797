"""A process that owns an arena in memory of its own, which no other process maps, and registers parts of it when asked:
`python -m tests.transport.owner DESCRIPTOR INBOUND_BYTES OUTBOUND_BYTES`.

It lends the arena as a chain's process lends device memory with nvidia-peermem. Over its standard input it is told
`write REGION OFFSET HEX` and `read REGION OFFSET BYTES` (answered on standard output), and `end`.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
import sys

from gpu_runtime.registration.handover import PAGE, RegionAddress, send_addresses
from gpu_runtime.registration.peermem_owner import Owner


class Region:
    """Memory that begins on a page as a GPU has them, and is followed by one that is not of the arena."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        self._memory = mmap.mmap(-1, self.size + 2 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._begin = -start % PAGE
        self.address = RegionAddress(start + self._begin, self.size)

    def write(self, offset: int, content: bytes) -> None:
        at = self._begin + offset
        self._memory[at : at + len(content)] = content

    def read(self, offset: int, size: int) -> bytes:
        return self._memory[self._begin + offset : self._begin + offset + size]


def main() -> None:
    """See the module."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    regions = {"inbound": Region(int(sys.argv[2])), "outbound": Region(int(sys.argv[3]))}
    inbound, outbound = (one.address for one in regions.values())
    send_addresses(connection, inbound, outbound)
    owner = Owner(connection, {True: inbound, False: outbound})
    owner.start()
    print("lent", flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        if command == "end":
            break
        region, offset = regions[words[0]], int(words[1])
        if command == "write":
            region.write(offset, bytes.fromhex(words[2]))
        print(region.read(offset, int(words[2]) if command == "read" else 1).hex(), flush=True)
    owner.wait_end(10)


if __name__ == "__main__":
    main()
