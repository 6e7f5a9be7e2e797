"""For schemathesis: 1.0 is a whole number to JSON Schema, and to the decoder it is none, as the document says."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Writes whole numbers without a decimal point."""
    if isinstance(body, list):
        return [map_body(context, item) for item in body]
    if isinstance(body, dict):
        return {key: map_body(context, value) for key, value in body.items()}
    return int(body) if isinstance(body, float) and body.is_integer() else body
