"""One line of the final table, the table itself, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

REHEARSAL = "tiny"
"""Model of a run on the CPU: no figure of it is to be compared with anything."""


@dataclass(frozen=True)
class Row:
    """A figure. `value` is the median where there are many, `p99` beside it; `floor` and `peers` in the same unit.

    A row with an `error` has no value: what was to be measured failed, or was skipped with that reason.
    """

    part: str
    model: str
    what: str
    value: float | None = None
    p99: float | None = None
    unit: str = "ms"
    floor: float | None = None
    target: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    judged_by_p99: bool = False
    error: str = ""

    @property
    def best_peer(self) -> float | None:
        """The lowest of them."""
        return min(self.peers.values(), default=None)

    @property
    def verdict(self) -> str:
        """Beside the best peer or the target: how many times lower, or a warning."""
        bound = self.best_peer if self.best_peer is not None else self.target
        figure = self.p99 if self.judged_by_p99 else self.value
        if bound is None or not figure:
            return ""
        return f"{bound / figure:.2f}x" if figure <= bound else f"WORSE {bound / figure:.2f}x"


def to_lines(rows: Sequence[Row]) -> str:
    """A line of JSON for each."""
    return "".join(json.dumps(asdict(row)) + "\n" for row in rows)


def from_line(line: str) -> Row:
    """The reverse of one line."""
    return Row(**json.loads(line))


HEADS = ("part", "model", "what", "unit", "P50", "P99", "floor", "over floor", "peers or target", "better by")
TEXTS = 3
"""So many columns on the left hold words, the others numbers."""


def table(rows: Sequence[Row]) -> str:
    """One table as plain text, never wrapped: it may end up in a log."""
    cells = [HEADS, *((row.part, row.model, row.what, *_figures(row)) for row in rows if not row.error)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADS))]
    aligned = iter([_align(line, widths) for line in cells])
    lines = [next(aligned), "  ".join("-" * width for width in widths)]
    for row in rows:
        lines.append(f"{row.part}  {row.model}  {row.what}  {row.error}" if row.error else next(aligned))
    return "\n".join(lines)


def _align(cells: Sequence[str], widths: Sequence[int]) -> str:
    pairs = list(zip(cells, widths, strict=True))
    texts = [cell.ljust(width) for cell, width in pairs[:TEXTS]]
    return "  ".join(texts + [cell.rjust(width) for cell, width in pairs[TEXTS:]]).rstrip()


def _figures(row: Row) -> list[str]:
    over = f"{row.value / row.floor:.2f}x" if row.floor and row.value else ""
    bound = ", ".join(f"{engine} {_number(value)}" for engine, value in row.peers.items())
    if not bound and row.target is not None:
        bound = f"under {_number(row.target)}"
    return [row.unit, _number(row.value), _number(row.p99), _number(row.floor), over, bound, row.verdict]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.3f}"


def report(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """The JSON file."""
    return json.dumps({"format": 1, **facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
