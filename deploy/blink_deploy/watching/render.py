"""A view as a line, as a screen, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from blink_deploy.output import plain
from blink_deploy.watching.histograms import Latency
from blink_deploy.watching.view import View

NOTHING = "–"
_BARS = " ▁▂▃▄▅▆▇█"
_BAR_CELLS = 24


def line(view: View) -> str:
    """For logs and pipes."""
    parts = [f"epoch {view.epoch}", view.phase, view.model, view.detail]
    if view.running is not None:
        parts += [f"out {rate(view, 'generated')}/s", f"in {rate(view, 'prompt')}/s", f"ended {rate(view, 'ended')}/s"]
        parts += [f"running {view.running}", f"waiting {view.waiting}", f"kv {kv(view)}", f"cached {cached(view)}"]
    if view.queued is not None:
        parts += [f"queued {view.queued:.0f}", f"first token {latency(view.first_token)}"]
        parts += [f"per token {latency(view.per_token)}"]
    return "  ".join(plain(part) for part in [*parts, view.fault] if part)


def rate(view: View, name: str) -> str:
    """One of the rates."""
    return NOTHING if view.rates is None else f"{getattr(view.rates, name):,.1f}"


def kv(view: View) -> str:
    """Used share of the KV cache, and blocks."""
    if view.blocks is None or not view.blocks[1]:
        return NOTHING
    used, all_ = view.blocks
    return f"{100 * used / all_:.1f} % ({used:,}/{all_:,})"


def cached(view: View) -> str:
    """Share of prompt tokens that were in the prefix cache."""
    return NOTHING if view.rates is None or view.rates.cached is None else f"{100 * view.rates.cached:.1f} %"


def latency(found: Latency) -> str:
    """Both quantiles in milliseconds."""
    return "/".join(NOTHING if value is None else f"{value * 1000:,.1f}" for value in (found.p50, found.p99)) + " ms"


def bar(share: float, cells: int = _BAR_CELLS) -> str:
    """A share of one as a bar."""
    eighths = round(min(max(share, 0.0), 1.0) * cells * 8)
    full, rest = divmod(eighths, 8)
    return (_BARS[8] * full + (_BARS[rest] if rest else "")).ljust(cells)


def history(values: Sequence[float]) -> str:
    """A column for each value, the largest one full."""
    most = max(values, default=0.0)
    return "".join(_BARS[round(value / most * 8)] if most > 0 else _BARS[0] for value in values)


def screen(view: View, generated: Sequence[float], seconds: float) -> Group:
    """For a terminal.

    Args:
        generated: the latest rates of generated tokens, oldest first.
        seconds: what the latencies are of.
    """
    head = Text(f"{plain(view.model) or 'no model'}  {view.phase}  epoch {view.epoch}", style="bold")
    body = Table(show_header=False, box=None, pad_edge=False)
    body.add_row("generated tokens/s", rate(view, "generated"), history(generated))
    body.add_row("prompt tokens/s", rate(view, "prompt"))
    body.add_row("sequences ended/s", rate(view, "ended"))
    body.add_row("steps/s", rate(view, "steps"), f"{view.step_tokens} tokens in this step" if view.step_tokens else "")
    body.add_row("running", _number(view.running))
    body.add_row("waiting on the device", _number(view.waiting))
    used, all_ = view.blocks or (0, 0)
    body.add_row("KV blocks", kv(view), bar(used / all_) if all_ else "")
    body.add_row("prompts in the cache", cached(view), f"{view.kept:,} blocks kept" if view.kept else "")
    if view.queued is not None:
        body.add_row("queued in all", f"{view.queued:.0f}")
        body.add_row("first token P50/P99", latency(view.first_token), f"last {seconds:.0f} s")
        body.add_row("per token P50/P99", latency(view.per_token), f"last {seconds:.0f} s")
    notes = [Text(plain(text), style="yellow") for text in (view.detail, view.fault) if text]
    return Group(head, body, *notes)


def _number(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"


def as_json(view: View) -> dict[str, Any]:
    """What is shown beside the state."""
    shown = asdict(view)
    return {name: shown[name] for name in ("rates", "queued", "first_token", "per_token", "fault")}
