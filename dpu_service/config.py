"""What the operator chooses for a worker."""

from __future__ import annotations

import msgspec

from blink_proto.rdma.choice import RdmaChoice


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Handed from the supervisor to each worker. Times in seconds."""

    queue_depth: int = 256
    """Sequences of one worker and runtime that may wait for their first token."""
    device_timeout: float = 10.0
    """Silence of the device after which it counts as lost."""
    keep_alive: float = 130.0
    """Idle time after which a connection is closed; longer than the pools of usual proxies (90 s)."""
    header_timeout: float = 20.0
    """Time that a client has for the head of its first request."""
    body_timeout: float = 60.0
    """Time that a client has for a request's body."""
    write_timeout: float = 60.0
    """Time that a client may leave what is sent to it unread."""
    max_body_bytes: int = 8 << 20
    max_connections: int = 8192
    """Open connections of one worker and socket."""
    http2_streams: int = 128
    """Requests that one HTTP/2 connection may have open."""
    access_log: bool = True
    guarded: bool = False
    """Whether requests need an API key."""
    open_metrics: bool = False
    """Whether /metrics needs none."""
    tool_parser: str = "auto"
    """How the model writes tool calls: one of `text.tools.formats.CHOICES`."""
    transport: str = "shm"
    """How workers reach the arena; see `transport.choose`."""
    rdma_device: str = ""
    """Empty: the one that has `rdma_address`."""
    rdma_address: str = ""
    """Of the interface whose network the operator declares private."""
    verbs_binding: str = "auto"
    """See `transport.choose`."""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    """PEM certificates; a client must have one that these have signed. Empty: no client certificates."""
    tls_min_version: str = "1.2"

    @property
    def rdma(self) -> RdmaChoice:
        """The RDMA device."""
        return RdmaChoice(self.rdma_device, self.rdma_address, self.verbs_binding)


class ModelInfo(msgspec.Struct, frozen=True):
    """The model that a session serves."""

    name: str
    architecture: str
    parameters: int
    loaded_unix_seconds: int
    dtype: str
