"""How both ends of the control plane set gRPC up. They stand together because they must agree: a server ends the
connection of a client that pings more often than it allows (GOAWAY, too_many_pings).
"""

from __future__ import annotations

import ipaddress

Options = list[tuple[str, int]]

CLIENT_PING_MS = 30_000
"""A client asks so often whether a silent runtime is still there."""
CLIENT_PING_TIMEOUT_MS = 10_000
LEAST_PING_MS = 10_000
"""A server takes pings no more often than this for abuse."""
SERVER_PING_MS = 60_000
SERVER_PING_TIMEOUT_MS = 20_000
MAX_REQUEST_BYTES = 1 << 20
MAX_ANSWER_BYTES = 4 << 20
MAX_METADATA_BYTES = 16 << 10
MAX_STREAMS = 32
"""Calls of one connection at a time."""
MAX_CALLS = 1024
"""Calls of all connections at a time; more get RESOURCE_EXHAUSTED. What of it anybody may have the runtime says."""

SERVER_OPTIONS: Options = [
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", SERVER_PING_MS),
    ("grpc.keepalive_timeout_ms", SERVER_PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", SERVER_PING_TIMEOUT_MS),  # of keep-alive too; 60 s if nothing is said
    ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PING_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
]

CLIENT_OPTIONS: Options = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", CLIENT_PING_MS),
    ("grpc.keepalive_timeout_ms", CLIENT_PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", CLIENT_PING_TIMEOUT_MS),  # of pings that gRPC sends for other reasons
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new handshake, with the files as they are then
]


def is_local(address: str) -> bool:
    """Whether nobody outside this machine can reach a gRPC address: loopback, or a Unix socket."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].removeprefix("dns:").removeprefix("///").removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
