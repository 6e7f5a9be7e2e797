"""One chain for the tests of a module."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.bench.gpu.chains import LocalChain, local_chain


class SharedChain:
    """Runs from its first use on. While it does, nothing may be freed on its device, and so no other one set up.

    Args:
        options: of `local_chain`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._stack = ExitStack()
        self._chain: LocalChain | None = None

    def chain(self, folder: Path, device: str) -> LocalChain:
        """Started where it does not run."""
        if self._chain is None:
            self._chain = self._stack.enter_context(local_chain(folder, device, **self._options))
        return self._chain

    def stop(self) -> None:
        """Ends it, if it runs."""
        self._chain = None
        self._stack.close()
