"""An RDMA context with its one connection."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

from blink_proto.doca.constants import TRANSPORT_RC, Access, ContextState, Status
from blink_proto.doca.device import Device
from blink_proto.doca.engine import ProgressEngine
from blink_proto.doca.library import DocaLibrary
from blink_proto.doca.signatures import ConnectionEvent, ConnectionRequested, TaskDone

CONNECT_SECONDS = 5.0
ESTABLISHED_SECONDS = 1.0
"""How long to wait for the word that the connection is established, which not all versions give."""
STOP_SECONDS = 5.0
_PAUSE_SECONDS = 0.0002

_not_idle: set[RdmaContext] = set()
"""Those that are to be closed and are not: the library may still call their callbacks, so they live on."""


@dataclass(frozen=True)
class Tasks:
    """What this end does through the connection.

    Args:
        writes, reads: that may be under way at once.
        done: called in `ProgressEngine.progress` with a task's own number and its status; must not raise.
    """

    writes: int
    reads: int
    done: Callable[[int, int], None]


class RdmaContext:
    """Started, and not yet connected. Some versions say that they run only once they are connected.

    Callbacks are referred to until the context is idle again.

    Args:
        access: what the peer may do through the connection, as far as it has keys: RDMA_READ, RDMA_WRITE.
        tasks: None for an end that only lets the peer in.
        on_lost: called with a reason when the connection fails or the peer ends it.

    Raises:
        DocaError: the device refuses.
    """

    def __init__(
        self,
        library: DocaLibrary,
        device: Device,
        engine: ProgressEngine,
        access: Access,
        tasks: Tasks | None = None,
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._library = library
        self._engine = engine
        self._on_lost = on_lost
        self._tasks = tasks
        self._connection = 0
        self._callbacks: list[Any] = []
        self._established = False
        self.handle = library.make("doca_rdma_create", device.handle)
        self._context = library.function("doca_rdma_as_ctx")(self.handle)
        try:
            self._set_up(access, device.gid_index)
            library.call("doca_ctx_start", self._context, also=Status.IN_PROGRESS)
        except BaseException:
            self.close()
            raise

    @property
    def connection(self) -> int:
        """The connection's handle, for tasks; 0 before `export`."""
        return self._connection

    def export(self) -> bytes:
        """This end of the connection, for the peer's `connect`. A secret."""
        blob, size, connection = c_void_p(), c_size_t(), c_void_p()
        self._library.call("doca_rdma_export", self.handle, byref(blob), byref(size), byref(connection))
        self._connection = connection.value or 0
        return ctypes.string_at(blob, size.value)

    def connect(self, exported: bytes, patience: float = ESTABLISHED_SECONDS) -> None:
        """Connects to the peer's end and waits until tasks may be submitted; the peer does the same, before or after.

        Args:
            patience: seconds to wait for the word that the connection is established.

        Raises:
            DocaError: the bytes are no export, or the device cannot reach whoever made them.
        """
        self._library.call("doca_rdma_connect", self.handle, exported, len(exported), self._connection)
        if not self._wait(lambda: self._state() is ContextState.RUNNING, CONNECT_SECONDS):
            raise self._library.error("doca_rdma_connect", Status.TIME_OUT)
        self._wait(lambda: self._established, patience)

    def close(self, timeout: float = STOP_SECONDS, reap: Callable[[], None] = lambda: None) -> bool:
        """Stops it, ending tasks that are under way with an error, and destroys it; False when it did not become idle
        in time. Then it is left alone, and so must be the memory that its tasks use. May be called again until it is
        True, as after an error.

        Args:
            reap: called again and again meanwhile; frees tasks that are done. All others were freed before.

        Raises:
            DocaError: the library refuses.
        """
        _not_idle.add(self)
        if self._state() not in (ContextState.IDLE, ContextState.STOPPING):
            self._library.call("doca_ctx_stop", self._context, also=Status.IN_PROGRESS)

        def is_idle() -> bool:
            reap()
            return self._state() is ContextState.IDLE

        if not self._wait(is_idle, timeout):
            return False
        self._library.call("doca_rdma_destroy", self.handle)
        self._callbacks.clear()
        _not_idle.discard(self)
        return True

    def _set_up(self, access: Access, gid_index: int | None) -> None:
        call, handle = self._library.call, self.handle
        call("doca_pe_connect_ctx", self._engine.handle, self._context)
        call("doca_rdma_set_permissions", handle, access)
        call("doca_rdma_set_transport_type", handle, TRANSPORT_RC)
        call("doca_rdma_set_max_num_connections", handle, 1)
        if gid_index is not None:
            call("doca_rdma_set_gid_index", handle, gid_index)
        if self._tasks is not None:
            done, failed = self._task_callbacks(self._tasks.done)
            for kind, count in (("write", self._tasks.writes), ("read", self._tasks.reads)):
                call(f"doca_rdma_task_{kind}_set_conf", handle, done, failed, count)
            # The queue's own size is not derived from that: by default it may be too short for so many tasks.
            call("doca_rdma_set_send_queue_size", handle, self._tasks.writes + self._tasks.reads)
        call("doca_rdma_set_connection_state_callbacks", handle, *self._connection_callbacks())
        call("doca_ctx_set_user_data", self._context, 0)

    def _task_callbacks(self, done: Callable[[int, int], None]) -> tuple[Any, Any]:
        status_of = self._library.function("doca_task_get_status")

        def succeeded(task: int, number: int, _: int) -> None:
            done(number, Status.SUCCESS)

        def failed(task: int, number: int, _: int) -> None:
            done(number, status_of(task) or Status.UNKNOWN)

        return self._keep(TaskDone(succeeded)), self._keep(TaskDone(failed))

    def _connection_callbacks(self) -> tuple[Any, ...]:
        def established(connection: int, own: int, context: int) -> None:
            self._established = True

        def failed(connection: int, own: int, context: int) -> None:
            self._on_lost("the connection failed")

        def ended(connection: int, own: int, context: int) -> None:
            self._on_lost("the peer ended the connection")

        return tuple(map(self._keep, (ConnectionRequested(), *map(ConnectionEvent, (established, failed, ended)))))

    def _keep(self, callback: Any) -> Any:
        self._callbacks.append(callback)
        return callback

    def _state(self) -> ContextState:
        state = c_int()
        self._library.call("doca_ctx_get_state", self._context, byref(state))
        return ContextState(state.value)

    def _wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() >= deadline:
                return False
            if not self._engine.progress():
                time.sleep(_PAUSE_SECONDS)
        return True
