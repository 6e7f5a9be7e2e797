"""What a program needs of its machine for RDMA, tried at its start: before it listens or loads anything."""

from __future__ import annotations

from collections.abc import Sequence

from blink_proto.links import LinkError, uses_rdma
from blink_proto.rdma.binding import RdmaError, open_device, refuse_reordering
from blink_proto.rdma.choice import RdmaChoice


def try_adapters(transports: Sequence[str], choice: RdmaChoice) -> None:
    """Loads what each transport is called by, opens its device by the chosen address, and closes it again.

    Settings of this process that undo the order of writes are refused first. The adapter's own (`PCI_WR_ORDERING`) are
    read through its PCI configuration, which takes root and NVIDIA's tools: `blinkctl doctor` looks at them.

    Raises:
        LinkError: something is missing, or on; it says what.
    """
    if not uses_rdma(transports):
        return
    try:
        refuse_reordering()
        if "verbs" in transports:
            open_device(choice.device, choice.address, choice.bindings).close()
    except RdmaError as error:
        raise LinkError(f"RDMA cannot be used: {error}") from error
    if "doca" in transports:
        _try_doca(choice)


def _try_doca(choice: RdmaChoice) -> None:
    from blink_proto.doca.device import Device
    from blink_proto.doca.errors import DocaError, DocaUnavailableError
    from blink_proto.doca.library import load_doca
    from blink_proto.doca.settings import DocaSettings

    try:
        Device(load_doca(), DocaSettings(choice.device, choice.address)).close()
    except (DocaError, DocaUnavailableError) as error:
        raise LinkError(f"DOCA cannot be used: {error}") from error
