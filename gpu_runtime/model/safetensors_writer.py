"""Writes a safetensors file tensor by tensor, so that a conversion never holds the whole model in memory."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64


class SafetensorsWriter:
    """Float32 tensors of known shapes, written in the order of `shapes`.

    Format: 8 bytes little-endian header length, JSON header, data (the format's own documentation). The header is
    padded with spaces so that the data starts aligned and can be memory-mapped as float32.
    """

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, shape in shapes.items():
            size = 4 * int(np.prod(shape))
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        self._pending = list(shapes.items())
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, name: str, tensor: NDArray[np.float32]) -> None:
        """The next tensor.

        Raises:
            ValueError: it is not the next one, or has another shape or type.
        """
        expected, shape = self._pending.pop(0)
        if name != expected or tensor.shape != shape or tensor.dtype != np.float32:
            raise ValueError(f"expected {expected} {shape}, got {name} {tensor.shape} {tensor.dtype}")
        self._file.write(np.ascontiguousarray(tensor).data)
