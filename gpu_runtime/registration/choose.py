"""The transports that a runtime can offer, by name."""

from __future__ import annotations

from blink_proto.doca.settings import DocaSettings
from blink_proto.rdma.choice import RdmaChoice
from gpu_runtime.registration.base import Registrar, RegistrationError
from gpu_runtime.registration.parts import ArenaMemory
from gpu_runtime.registration.shm import ShmRegistrar
from gpu_runtime.shared_arena import SharedArena


def doca_settings(rdma: RdmaChoice) -> DocaSettings:
    """The same choice as that binding wants it."""
    return DocaSettings(rdma.device, rdma.address)


def make_registrar(transport: str, shared: SharedArena, memory: ArenaMemory, rdma: RdmaChoice) -> Registrar:
    """A registrar for an arena.

    Args:
        shared: as local front ends see it.
        memory: as RDMA devices reach it.

    Raises:
        RegistrationError: there is no such transport, or this machine does not have what it needs.
    """
    if transport == "shm":
        return ShmRegistrar(shared)
    if transport == "verbs":
        from gpu_runtime.registration.verbs import VerbsRegistrar

        return VerbsRegistrar(memory, shared.sizes, rdma)
    if transport == "doca":
        from gpu_runtime.registration.doca import DocaRegistrar

        return DocaRegistrar(memory, shared.sizes, doca_settings(rdma))
    raise RegistrationError(f"this runtime has no transport named {transport!r}")
