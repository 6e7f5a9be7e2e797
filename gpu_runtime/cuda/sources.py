"""What a kernel is compiled from: its own text and every header of ours that it includes."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def include_roots() -> list[Path]:
    """Where our own headers are looked for."""
    import blink_proto

    return [PACKAGE, Path(blink_proto.__file__).resolve().parents[1]]


def included_files(source: Path) -> list[Path]:
    """The source and the headers that it includes by quotes, directly or not, in the order of their first mention.

    Raises:
        FileNotFoundError: a header is in none of the include roots.
    """
    found: list[Path] = []
    waiting = [source]
    while waiting:
        path = waiting.pop(0)
        if path in found:
            continue
        found.append(path)
        waiting += [_resolve(name, path.parent) for name in _INCLUDE.findall(path.read_text())]
    return found


def _resolve(name: str, folder: Path) -> Path:
    for root in (folder, *include_roots()):
        if (root / name).is_file():
            return (root / name).resolve()
    raise FileNotFoundError(f"header {name} of a kernel is missing")
