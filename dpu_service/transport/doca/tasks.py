"""Tasks that are made once and submitted again and again, each with its own place in local memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from blink_proto.doca.constants import Status
from blink_proto.doca.context import RdmaContext
from blink_proto.doca.library import DocaLibrary
from blink_proto.doca.memory import Mmap, Place
from dpu_service.transport.doca.buffers import Buffer, BufferInventory
from dpu_service.transport.doca.local import LocalBlock


@dataclass(frozen=True)
class _Task:
    made: int
    """As a task of its kind."""
    handle: int
    """As a task of any kind."""
    source: Buffer
    target: Buffer


class TaskPool:
    """Tasks of one kind between local memory and one range of the peer's.

    Args:
        kind: `write` or `read`.
        numbers: of its tasks, by which completions name them; no other pool of the context has them.
        local_offset: where the pool's part of `local` begins.
        unit: bytes that one task moves at most.
    """

    def __init__(
        self,
        library: DocaLibrary,
        context: RdmaContext,
        inventory: BufferInventory,
        kind: str,
        numbers: range,
        local: LocalBlock,
        local_offset: int,
        unit: int,
        remote: Mmap,
    ) -> None:
        self._library = library
        self._submit = library.function("doca_task_submit")
        self._as_task, self._set_source, self._set_target = (
            library.function(f"doca_rdma_task_{kind}_{what}") for what in ("as_task", "set_src_buf", "set_dst_buf")
        )
        self._kind = kind
        self._local = local
        self._local_offset = local_offset
        self._numbers = numbers
        self.unit = unit
        self.place = remote.place()
        self._tasks: dict[int, _Task] = {}
        self._free: deque[int] = deque()
        self.under_way = 0
        for number in numbers:
            at = Place(local.place.address + self._at(number), unit)
            mine, theirs = inventory.buffer(local.memory, at), inventory.buffer(remote, self.place)
            source, target = (mine, theirs) if kind == "write" else (theirs, mine)
            made = library.make(
                f"doca_rdma_task_{kind}_allocate_init",
                context.handle,
                context.connection,
                source.handle,
                target.handle,
                number,
            )
            self._tasks[number] = _Task(made, self._as_task(made), source, target)
            self._free.append(number)

    @property
    def free(self) -> int:
        """Tasks that may be submitted."""
        return len(self._free)

    def write(self, offset: int, payload: bytes | memoryview) -> None:
        """Submits a write of up to `unit` bytes to `offset` of the peer's range; a task is free.

        Raises:
            DocaError: the library does not take it.
        """
        number = self._free.popleft()
        task = self._tasks[number]
        self._local.store(self._at(number), payload)
        task.source.aim_source(0, len(payload))
        task.target.aim_target(offset)
        self._start(task)

    def read(self, offset: int, size: int) -> int:
        """Submits a read of up to `unit` bytes; the task's number (errors: see `write`)."""
        number = self._free.popleft()
        task = self._tasks[number]
        task.source.aim_source(offset, size)
        task.target.aim_target(0)
        self._start(task)
        return number

    def landed(self, number: int, size: int) -> bytes:
        """What a read that is done has brought."""
        return self._local.load(self._at(number), size)

    def done(self, number: int) -> bool:
        """Takes back a task that is done; False when it is not one of this pool."""
        if number not in self._numbers:
            return False
        self.under_way -= 1
        self._free.append(number)
        return True

    def free_idle(self) -> None:
        """Frees the tasks that are not under way, for good."""
        while self._free:
            self._library.function("doca_task_free")(self._tasks.pop(self._free.popleft()).handle)

    def _at(self, number: int) -> int:
        return self._local_offset + (number - self._numbers.start) * self.unit

    def _start(self, task: _Task) -> None:
        self._set_source(task.made, task.source.handle)  # anew for each use: it may look at them now, or later
        self._set_target(task.made, task.target.handle)
        status = self._submit(task.handle)
        if status != Status.SUCCESS:
            raise self._library.error(f"doca_task_submit ({self._kind})", status)
        self.under_way += 1
