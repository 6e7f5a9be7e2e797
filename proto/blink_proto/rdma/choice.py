"""Which RDMA device a program uses, as its operator says."""

from __future__ import annotations

from dataclasses import dataclass

from blink_proto.rdma.binding import AUTO, BINDINGS


@dataclass(frozen=True)
class RdmaChoice:
    """By name, or if that is empty the one with the address. RoCE goes by the address.

    `binding`: the package that verbs are called by, or auto.
    """

    device: str = ""
    address: str = ""
    binding: str = AUTO

    @property
    def bindings(self) -> tuple[str, ...]:
        """Those to be tried, in this order."""
        return BINDINGS if self.binding == AUTO else (self.binding,)
