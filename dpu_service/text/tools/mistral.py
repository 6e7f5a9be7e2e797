"""Calls as Mistral models write them: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and newer ones
`[TOOL_CALLS]name[ARGS]{…}`, once for each call. A `[CALL_ID]…` behind the name is passed over."""

from __future__ import annotations

import re

from dpu_service.text.tools.call_object import ArgumentsObject
from dpu_service.text.tools.calls_parser import CallsParser
from dpu_service.text.tools.pieces import MOST_HELD

_NAME_AND_MORE = re.compile(r"[A-Za-z0-9_.:/-]{0,128}\s*(?:\[[^{]*)?", re.ASCII)
"""What may come before the arguments, or its beginning."""
_HEAD = re.compile(r"([A-Za-z0-9_.:/-]{1,128})\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*", re.ASCII)


class MistralParser(CallsParser):
    """See the module."""

    marker = "[TOOL_CALLS]"
    closers = ("]",)
    separator = ","

    def _open(self) -> bool:
        if not self._hold_space():
            return False
        if self._held.strip() != self.marker or self._buffer[0] == "{":
            return super()._open()
        if self._buffer[0] == "[":
            self._held, self._buffer = self._held + "[", self._buffer[1:]
            return True
        return self._name()

    def _name(self) -> bool:
        """A name, up to the arguments."""
        brace = self._buffer.find("{", 0, MOST_HELD)
        head = self._buffer[:brace] if brace >= 0 else self._buffer[:MOST_HELD]
        match = _HEAD.fullmatch(head) if brace >= 0 else None
        if match:
            self._held, self._buffer = self._held + head, self._buffer[brace:]
            self._begin(ArgumentsObject(match[1]))
        elif brace < 0 and len(head) < MOST_HELD and _NAME_AND_MORE.fullmatch(head):
            return False
        else:
            self._fail()
        return True
