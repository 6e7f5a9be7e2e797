"""One connection with everything that it needs, made in order and taken down in the reverse order."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import ExitStack

from blink_proto import arena
from blink_proto.doca.blobs import Answer, BlobError
from blink_proto.doca.constants import Access
from blink_proto.doca.context import RdmaContext, Tasks
from blink_proto.doca.device import Device
from blink_proto.doca.engine import ProgressEngine
from blink_proto.doca.errors import DocaError
from blink_proto.doca.library import DocaLibrary
from blink_proto.doca.memory import Mmap
from blink_proto.doca.settings import DocaSettings
from dpu_service.transport.base import TransportError
from dpu_service.transport.doca.buffers import BufferInventory
from dpu_service.transport.doca.local import LocalBlock
from dpu_service.transport.doca.tasks import TaskPool

log = logging.getLogger(__name__)

WRITES, WRITE_BYTES = 64, 16 << 10
READS, READ_BYTES = 16, 64 << 10
HEAD_READS, HEAD_BYTES = 4, 4 << 10
_TASKS = WRITES + READS + HEAD_READS

_left_behind: list[object] = []
"""Sessions whose memory the device may still write: it must not be used for anything else."""


class DocaSession:
    """This end of a connection, and after `connect` the tasks over it.

    Raises:
        DocaError: the device refuses.
        DocaUnavailableError: there is no such device.
    """

    writes: TaskPool
    channel_reads: TaskPool
    head_reads: TaskPool
    inbound_offset: int
    outbound_offset: int

    def __init__(self, library: DocaLibrary, settings: DocaSettings) -> None:
        self.library = library
        self.done: deque[tuple[int, int]] = deque()
        """(number, status) of tasks that are done and not yet looked at."""
        self.lost = ""
        """Why the connection is gone."""
        self._pools: list[TaskPool] = []
        self._memory = ExitStack()
        with ExitStack() as undo:
            self._device = Device(library, settings)
            undo.callback(self._device.close)
            self.engine = ProgressEngine(library)
            undo.callback(self.engine.close)
            tasks = Tasks(WRITES, READS + HEAD_READS, lambda number, status: self.done.append((number, status)))
            # What the peer may do here comes to nothing: no memory of this end is ever exported.
            rights = Access.RDMA_READ | Access.RDMA_WRITE
            self._context = RdmaContext(library, self._device, self.engine, rights, tasks, self._lose)
            try:
                self.exported = self._context.export()
            except DocaError:
                self._context.close()
                raise
            self._base = undo.pop_all()

    def connect(self, answer: bytes, sizes: arena.Sizes, channel: int) -> None:
        """Connects, and makes the tasks.

        Raises:
            TransportError: the answer is not one of this transport, or not of this arena.
            DocaError: the device refuses.
        """
        try:
            granted = Answer.decode(answer)
            keys = granted.channels[channel]
        except (BlobError, KeyError) as error:
            raise TransportError("the session's transport blob is not one of the doca transport") from error
        self._context.connect(granted.connection)
        inbound, outbound = arena.InboundLayout(sizes), arena.OutboundLayout(sizes)
        self.inbound_offset = inbound.channel_offset(channel)
        self.outbound_offset = outbound.channel_offset(channel)
        wanted = (
            (keys.inbound, inbound.channel_bytes),
            (keys.outbound, outbound.channel_bytes),
            (granted.head, outbound.channels_offset),
        )
        self._make_tasks(*(self._import(exported, size) for exported, size in wanted))

    def close(self) -> None:
        """Takes everything down. What the device still uses is left alone, with a word in the log."""
        for pool in self._pools:
            pool.free_idle()
        if not self._is_idle():
            log.error("a DOCA context did not become idle; it is left behind with its memory")
            _left_behind.append(self)
            return
        for part in (self._memory, self._base):
            try:
                part.close()
            except DocaError as error:
                _log_refusal(error)

    def _is_idle(self) -> bool:
        try:
            return self._context.close(reap=self._reap)
        except DocaError as error:
            _log_refusal(error)
            return False

    def _import(self, exported: bytes, size: int) -> Mmap:
        memory = Mmap.of_peer(self.library, self._device, exported)
        self._memory.callback(memory.close)
        if memory.place().size != size:
            raise TransportError("the memory behind the session is not of the arena's sizes")
        return memory

    def _make_tasks(self, inbound: Mmap, outbound: Mmap, head: Mmap) -> None:
        kinds = (
            ("write", WRITES, WRITE_BYTES, inbound),
            ("read", READS, READ_BYTES, outbound),
            ("read", HEAD_READS, HEAD_BYTES, head),
        )
        local = LocalBlock(self.library, self._device, sum(count * unit for _, count, unit, _ in kinds))
        self._memory.callback(local.close)
        inventory = BufferInventory(self.library, 2 * _TASKS)
        self._memory.callback(inventory.close)
        first = at = 0
        for kind, count, unit, remote in kinds:
            numbers = range(first, first + count)
            self._pools.append(TaskPool(self.library, self._context, inventory, kind, numbers, local, at, unit, remote))
            first, at = first + count, at + count * unit
        self.writes, self.channel_reads, self.head_reads = self._pools

    def _reap(self) -> None:
        while self.done:
            number, _ = self.done.popleft()
            for pool in self._pools:
                if pool.done(number):
                    pool.free_idle()

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason


def _log_refusal(error: DocaError) -> None:
    log.error("a DOCA object could not be given back", extra={"fields": {"reason": str(error)}})
