"""Memory that the supervisor makes and its workers share."""

from __future__ import annotations

import os
import tempfile


def new_memory(name: str, size: int) -> int:
    """A descriptor of so many bytes, all zero, that children may inherit."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
