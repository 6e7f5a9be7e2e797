"""What an operator says of the way between the two programs: transports by their names, and the interface for RDMA.

Payload crosses RDMA as plaintext, so an interface is used for it only when the operator has declared its network
private. That is done by naming one of the interface's addresses (`--rdma-address`): no interface is ever looked for,
and no address that is public, or that is no interface's, can be declared private.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

SHM = "shm"
TRANSPORTS = (SHM, "verbs", "doca")
DECLARED = "naming it declares that interface's network private"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class LinkError(ValueError):
    """The operator's choice cannot work, or this machine does not have what it takes."""


def check_link(transports: Sequence[str], rdma_address: str) -> None:
    """Refuses transports that there are not, and RDMA over an interface that is not declared private.

    Args:
        rdma_address: as the operator gave it; empty: not told. Of no meaning without RDMA.

    Raises:
        LinkError: says what is wrong, and what there is instead.
    """
    unknown = [repr(name) for name in transports if name not in TRANSPORTS]
    if unknown or not transports:
        what = f"knows no {', '.join(unknown)}" if unknown else "is empty"
        raise LinkError(f"--transport {what}; there are: {', '.join(TRANSPORTS)}")
    if uses_rdma(transports):
        check_declared(rdma_address)


def uses_rdma(transports: Sequence[str]) -> bool:
    """Whether one of them reaches other machines."""
    return bool(set(transports) - {SHM})


def check_declared(rdma_address: str) -> None:
    """Refuses an address that declares no interface's network private.

    Raises:
        LinkError: says why.
    """
    if not rdma_address:
        raise LinkError(f"RDMA needs --rdma-address: {DECLARED}")
    if reason := why_not_private(ip_address_of(rdma_address)):
        raise LinkError(f"--rdma-address {rdma_address} {reason}")


def ip_address_of(text: str) -> Address:
    """An interface's address; an IPv4 address that is written as one of IPv6 becomes what it is.

    Raises:
        LinkError: it is no IP address.
    """
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        raise LinkError(f"{text!r} is no IP address: --rdma-address is one of the interface's own") from None
    if isinstance(found, ipaddress.IPv6Address):
        if found.scope_id:
            raise LinkError(f"{text!r} has a zone; addresses of RDMA devices have none")
        return found.ipv4_mapped or found
    return found


def why_not_private(address: Address) -> str:
    """Why an interface's network cannot be declared private by this address; empty where it can."""
    if address.is_unspecified:
        return "stands for every interface; one has to be named"
    if address.is_multicast or (address.version == 4 and address.is_reserved):
        return "is no interface's own address"
    if address.is_global:
        return "is a public address, which cannot be declared private: payload crosses RDMA as plaintext"
    return ""
