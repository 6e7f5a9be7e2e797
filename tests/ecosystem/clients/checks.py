"""Runs the checks of a client program and prints one JSON line for each. Only the standard library is used here."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

MODEL = "tiny"
TEXT = "Hello 😀 wörld\nand on"


def told(say: str = TEXT, **order: Any) -> str:
    """A prompt that has the device say something."""
    return "@@" + json.dumps({"say": say, **order}) + "@@"


def raises(kind: type[BaseException], call: Callable[[], Any]) -> Any:
    """The exception that a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def run(module: dict[str, Any]) -> None:
    """Calls every `check_…` with the server's address, which is the program's argument."""
    for name, check in list(module.items()):
        if not name.startswith("check_"):
            continue
        error = ""
        try:
            check(sys.argv[1])
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"check": name, "error": error}), flush=True)
