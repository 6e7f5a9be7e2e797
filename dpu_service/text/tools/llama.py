"""Calls as Llama 3 models write them: `{"name": …, "parameters": {…}}`, several with `;` between them.

Without `<|python_tag|>` in front such an object is a call only where it begins the answer and names a function that the
request has, because an answer may be JSON for other reasons.
"""

from __future__ import annotations

from dpu_service.text.tools.call_object import CallObject
from dpu_service.text.tools.calls_parser import CallsParser


class LlamaParser(CallsParser):
    """See the module."""

    marker = "<|python_tag|>"
    separator = ";"

    def __init__(self, names: frozenset[str], parallel: bool = True) -> None:
        super().__init__(parallel)
        self._names = names
        self._bare = False
        self._stage = self._start

    def _start(self) -> bool:
        """At the beginning of an answer."""
        rest = self._buffer.lstrip()
        self._space += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if rest.startswith("{"):
            self._bare = True
            self._begin(CallObject())
        elif rest:
            self._stage = self._text
        return bool(rest)

    def _text(self) -> bool:
        self._bare = False
        return super()._text()

    def _is_function(self, name: str | None) -> bool:
        return name is not None and (not self._bare or name in self._names)
