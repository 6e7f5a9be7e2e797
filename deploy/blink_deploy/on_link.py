"""Runs a program with the address of a network interface, for pods that do not know theirs before they start.

    python -m blink_deploy.on_link net1 blink-dpu --rdma-address @link …

`@link`, as an argument of its own, becomes the interface's first IPv4 address.
"""

from __future__ import annotations

import os
import socket
import sys

import psutil

PLACE = "@link"


def address_of(interface: str) -> str:
    """The interface's first IPv4 address.

    Raises:
        LookupError: there is no such interface, or it has none; says which there are.
    """
    found = psutil.net_if_addrs()
    for one in found.get(interface, []):
        if one.family == socket.AF_INET:
            return str(one.address)
    reason = "has no IPv4 address" if interface in found else "is not here"
    raise LookupError(f"interface {interface!r} {reason}; interfaces: {', '.join(sorted(found))}")


def main(arguments: list[str]) -> None:
    """Becomes the program. Status 1, with the reason, where it cannot."""
    if len(arguments) < 2:
        raise SystemExit("usage: python -m blink_deploy.on_link INTERFACE PROGRAM [ARGUMENT…]")
    interface, *command = arguments
    try:
        address = address_of(interface)
    except LookupError as error:
        raise SystemExit(f"error: {error}") from None
    command = [address if part == PLACE else part for part in command]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
