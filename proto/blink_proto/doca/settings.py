"""How a program uses DOCA."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DocaSettings:
    """Which device, and where the libraries are.

    Args:
        device: name of the RDMA device (`mlx5_2`) or of its network interface, or its PCI address; empty: any that has
            the address. On a BlueField, take a scalable function.
        address: IP address of the interface that carries the connection, for RoCE v2.
        libraries: see `load_doca`.
    """

    device: str = ""
    address: str = ""
    libraries: str | None = None
