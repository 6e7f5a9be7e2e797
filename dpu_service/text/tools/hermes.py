"""Calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one by one."""

from __future__ import annotations

from dpu_service.text.tools.calls_parser import CallsParser


class HermesParser(CallsParser):
    """See the module."""

    marker = "<tool_call>"
    closers = ("</tool_call>",)
