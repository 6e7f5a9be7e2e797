"""Where chat templates run: Jinja2's immutable sandbox with what published templates expect, bounded in time.

The names and filters are those of `transformers`: `raise_exception`, `strftime_now`, `tojson` without HTML escapes,
`break` and `continue`, and `{% generation %}` blocks, which mark the assistant's text for training and mean nothing
here.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_SECONDS = 2.0
"""CPU time of one rendering at most; a thousand messages take a few hundredths."""
_CLOCK_EVERY = 64
"""Accesses between two looks at the clock."""
_MOST_REPEATED = 1 << 20
_MOST_EXPONENT = 64


_BREAKS = (TemplateError, SyntaxError, ValueError, OverflowError, RecursionError, MemoryError)
"""What compiling may end in. Python compiles what Jinja2 makes of the source: thirty loops in each other are a
SyntaxError, a number of thousands of digits is a ValueError."""


class BrokenTemplateError(Exception):
    """The source does not compile; the message says why."""


class _Budget(threading.local):
    """What the rendering of this thread may still use."""

    until: float | None = None
    accesses = 0


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`: its content, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 (the type of the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """See the module. Every attribute, item and call of a template goes through here, so a loop cannot run for ever."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = _now
        self._budget = _Budget()

    def compiled(self, source: str) -> tuple[Template, frozenset[str]]:
        """A template, and the names that it expects to be given.

        Raises:
            BrokenTemplateError: see there.
        """
        try:
            return self.from_string(source), frozenset(meta.find_undeclared_variables(self.parse(source)))
        except _BREAKS as error:
            raise BrokenTemplateError(str(error) or type(error).__name__) from error

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Within it, rendering ends with a `TemplateError` once it has used `RENDER_SECONDS`."""
        budget = self._budget
        budget.until, budget.accesses = time.thread_time() + RENDER_SECONDS, 0
        try:
            yield
        finally:
            budget.until = None

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See Jinja2."""
        self._spend()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """See Jinja2."""
        self._spend()
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """See Jinja2."""
        __self._spend()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses products and powers that would fill the memory."""
        if operator == "**" and not (_small(left, 1 << 32) and _small(right, _MOST_EXPONENT)):
            raise TemplateError("a power in the template is too large")
        if operator == "*" and not (_repeats(left, right) and _repeats(right, left)):
            raise TemplateError("a repetition in the template is too long")
        return super().call_binop(context, operator, left, right)

    def _spend(self) -> None:
        budget = self._budget
        budget.accesses += 1
        if budget.accesses % _CLOCK_EVERY == 0 and budget.until is not None and time.thread_time() > budget.until:
            raise TemplateError("it takes too long")


def _small(value: Any, most: int) -> bool:
    return isinstance(value, int | float) and abs(value) <= most


def _repeats(value: Any, times: Any) -> bool:
    """Whether `value` may be repeated so often; true of what cannot be repeated."""
    if not isinstance(value, str | list | tuple) or not isinstance(times, int):
        return True
    return len(value) * times <= _MOST_REPEATED


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
