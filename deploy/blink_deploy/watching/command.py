"""`blinkctl watch` itself."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.live import Live

from blink_deploy.output import Output, as_dict, console, flush
from blink_deploy.watching.histograms import Window
from blink_deploy.watching.render import as_json, line, screen
from blink_deploy.watching.scrape import Metrics, ScrapeError
from blink_deploy.watching.view import Sample, View, view_of
from blink_proto import control_pb2

WINDOW_SECONDS = 30.0
"""What latencies are of."""
_COLUMNS = 40


class Follower:
    """Makes views of the states that come."""

    def __init__(self, metrics: Metrics | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._window = Window(WINDOW_SECONDS)
        self._last: Sample | None = None
        self.generated: deque[float] = deque(maxlen=_COLUMNS)

    def take(self, state: control_pb2.State) -> View:
        """The view after this state."""
        sample = Sample(self._clock(), state)
        view = view_of(self._last, sample)
        self._last = sample
        if view.rates is not None:
            self.generated.append(view.rates.generated)
        return view if self._metrics is None else self._with_latencies(view, self._metrics)

    def _with_latencies(self, view: View, metrics: Metrics) -> View:
        try:
            self._window.add(self._clock(), metrics.fetch())
        except ScrapeError as error:
            return replace(view, fault=str(error))
        first, per = self._window.first_token(), self._window.per_token()
        return replace(view, queued=self._window.queued(), first_token=first, per_token=per)


@contextmanager
def shown(output: Output, follower: Follower, *, measured: bool) -> Iterator[Callable[[control_pb2.State], None]]:
    """How states are shown: a screen that is refreshed in a terminal, else a line each.

    Args:
        measured: whether rates were asked for.
    """
    if output is Output.JSON:
        yield lambda state: _say(json.dumps(_merged(state, follower, measured=measured)))
    elif measured and console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            yield lambda state: live.update(
                screen(follower.take(state), follower.generated, WINDOW_SECONDS), refresh=True
            )
    else:
        yield lambda state: _say(line(follower.take(state)))


def _merged(state: control_pb2.State, follower: Follower, *, measured: bool) -> dict[str, object]:
    return {**as_dict(state), **as_json(follower.take(state))} if measured else as_dict(state)


def _say(text: str) -> None:
    print(text)
    flush()
