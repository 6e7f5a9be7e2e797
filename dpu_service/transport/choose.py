"""The transports by name."""

from __future__ import annotations

from blink_proto.rdma.choice import RdmaChoice
from dpu_service.transport.base import Connector, TransportError

WITHOUT_OFFER = ("shm",)
"""Transports for which the runtime needs to know nothing of the front end: their sessions outlive a worker."""


def make_connector(transport: str, rdma: RdmaChoice) -> Connector:
    """A connector of its own for each session.

    Raises:
        TransportError: there is no such transport, or this machine does not have what it needs.
    """
    if transport == "shm":
        from dpu_service.transport.shm import ShmConnector

        return ShmConnector()
    if transport == "verbs":
        from dpu_service.transport.verbs.transport import VerbsConnector

        return VerbsConnector(rdma)
    if transport == "doca":
        from blink_proto.doca.settings import DocaSettings
        from dpu_service.transport.doca.connector import DocaConnector

        return DocaConnector(DocaSettings(rdma.device, rdma.address))
    raise TransportError(f"this front end has no transport named {transport!r}")
