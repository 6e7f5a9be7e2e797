"""A front end in a process of its own, to be killed: `python -m tests.transport.victim TRANSPORT CHANNEL SIZES`.

Says its offer in hex, reads the answer, says `ready`, and then submits records of its own for ever, each with a payload
that tells its number, through the channel's prompt heap and submit ring, without regard to what was taken.
"""

from __future__ import annotations

import json
import struct
import sys

from blink_proto import arena
from tests.transport.kinds import KINDS

RECORD_BYTES = arena.SubmitRecord.itemsize
PAYLOAD_BYTES = 4096


def payload_of(number: int) -> bytes:
    """What the heap holds before record `number` is committed."""
    return struct.pack("<I", number) * (PAYLOAD_BYTES // 4)


def main() -> None:
    """See the module."""
    name, channel, sizes = sys.argv[1], int(sys.argv[2]), arena.Sizes(**json.loads(sys.argv[3]))
    connector = KINDS[name].connector()
    sys.stdout.write(connector.offer.hex() + "\n")
    sys.stdout.flush()
    answer = bytes.fromhex(sys.stdin.readline())
    transport = connector.connect(answer, sizes, channel)
    layout = arena.InboundLayout(sizes)
    heap = layout.channel_offset(channel) + layout.channel_heap_offset
    ring = layout.channel_offset(channel) + layout.channel_submit_offset
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for number in range(1, 1 << 30):
        slot = number % sizes.submit_slots
        transport.write(heap + slot * PAYLOAD_BYTES, payload_of(number))
        transport.write(ring + slot * RECORD_BYTES, payload_of(number)[: RECORD_BYTES - 8])
        transport.commit(ring + slot * RECORD_BYTES + RECORD_BYTES - 8, number)
        if number % 8 == 0:
            transport.flush(20)


if __name__ == "__main__":
    main()
