"""What is shown: made of two states of the runtime and the front end's latencies, by arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from blink_deploy.output import phase_name
from blink_deploy.watching.histograms import Latency
from blink_proto import control_pb2

_ENDED = ("finished_stop", "finished_length", "finished_cancelled", "finished_error")


@dataclass(frozen=True)
class Sample:
    """A state and when it came, in seconds of a clock that never goes back."""

    time: float
    state: control_pb2.State


@dataclass(frozen=True)
class Rates:
    """Per second; `cached` is the share of prompt tokens that were in the prefix cache, None without any prompt."""

    generated: float
    prompt: float
    ended: float
    steps: float
    cached: float | None = None


@dataclass(frozen=True)
class View:
    """What is known now; None for what is not."""

    phase: str
    model: str
    epoch: int
    detail: str = ""
    rates: Rates | None = None
    running: int | None = None
    waiting: int | None = None
    step_tokens: int | None = None
    blocks: tuple[int, int] | None = None
    """Used and in all."""
    kept: int | None = None
    """Blocks that only the prefix cache holds."""
    queued: float | None = None
    first_token: Latency = field(default_factory=Latency)
    per_token: Latency = field(default_factory=Latency)
    fault: str = ""
    """Why there are no latencies."""


def rates(earlier: Sample | None, later: Sample) -> Rates | None:
    """From one sample to another; None between two lives of the chain, or without time between them."""
    if earlier is None or not _same_life(earlier.state, later.state) or later.time <= earlier.time:
        return None
    seconds, before, now = later.time - earlier.time, earlier.state.telemetry, later.state.telemetry
    counted = [now.generated_tokens - before.generated_tokens, now.prompt_tokens - before.prompt_tokens]
    counted += [sum(getattr(now, name) - getattr(before, name) for name in _ENDED), now.steps - before.steps]
    generated, prompt, ended, steps = (count / seconds for count in counted)
    queries, hits = now.prefix_queries - before.prefix_queries, now.prefix_hits - before.prefix_hits
    cached = hits / queries if queries > 0 else None
    return Rates(generated, prompt, ended, steps, cached) if min(*counted, queries, hits) >= 0 else None


def _same_life(one: control_pb2.State, other: control_pb2.State) -> bool:
    return (
        one.HasField("telemetry") and other.HasField("telemetry") and (one.epoch, one.life) == (other.epoch, other.life)
    )


def view_of(earlier: Sample | None, later: Sample) -> View:
    """Without latencies."""
    state = later.state
    phase = phase_name(state)
    if not state.HasField("telemetry"):
        return View(phase, state.model, state.epoch, state.detail)
    page = state.telemetry
    return View(
        phase,
        state.model,
        state.epoch,
        state.detail,
        rates(earlier, later),
        page.running,
        page.waiting,
        page.step_tokens,
        (page.blocks_used, page.blocks_total),
        page.blocks_cached,
    )
