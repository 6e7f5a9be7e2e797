"""Numbers of the DOCA API."""

from __future__ import annotations

from enum import IntEnum, IntFlag


class Status(IntEnum):
    """`doca_error_t`."""

    SUCCESS = 0
    UNKNOWN = 1
    NOT_PERMITTED = 2
    IN_USE = 3
    NOT_SUPPORTED = 4
    AGAIN = 5
    INVALID_VALUE = 6
    NO_MEMORY = 7
    INITIALIZATION = 8
    TIME_OUT = 9
    SHUTDOWN = 10
    CONNECTION_RESET = 11
    CONNECTION_ABORTED = 12
    CONNECTION_INPROGRESS = 13
    NOT_CONNECTED = 14
    NO_LOCK = 15
    NOT_FOUND = 16
    IO_FAILED = 17
    BAD_STATE = 18
    UNSUPPORTED_VERSION = 19
    OPERATING_SYSTEM = 20
    DRIVER = 21
    UNEXPECTED = 22
    ALREADY_EXIST = 23
    FULL = 24
    EMPTY = 25
    IN_PROGRESS = 26
    TOO_BIG = 27
    AUTHENTICATION = 28
    BAD_CONFIG = 29
    SKIPPED = 30
    DEVICE_FATAL_ERROR = 31


class Access(IntFlag):
    """`doca_access_flag`. The flag for relaxed PCIe ordering is left out on purpose: rings need the order."""

    LOCAL_READ_ONLY = 0
    LOCAL_READ_WRITE = 1
    RDMA_READ = 2
    RDMA_WRITE = 4


class ContextState(IntEnum):
    """`doca_ctx_states`."""

    IDLE = 0
    STARTING = 1
    RUNNING = 2
    STOPPING = 3


TRANSPORT_RC = 0
"""Reliable connection, of `doca_rdma_transport_type`."""
