"""Files that are replaced while the program runs: by their names, or by the link above them as Kubernetes does."""

from __future__ import annotations

import os
from collections.abc import Sequence

LOOK_SECONDS = 1.0
_Look = tuple[tuple[int, int, int, int] | None, ...]


class FileWatch:
    """Looks at what the names lead to; `changed` costs one stat for each.

    Args:
        paths: names of files; empty ones are left out.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = [path for path in paths if path]
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether any of them is another file, or has other content, than at the last call."""
        now = self._look()
        changed, self._seen = now != self._seen, now
        return changed

    def _look(self) -> _Look:
        return tuple(map(_identity, self._paths))


def _identity(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
