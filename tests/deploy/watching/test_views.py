"""What `blinkctl watch` shows, from states and scrapes made by hand, against values worked out by hand."""

from __future__ import annotations

import io
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from rich.console import Console

from blink_deploy.watching.command import Follower
from blink_deploy.watching.histograms import (
    FIRST_TOKEN,
    PER_TOKEN,
    QUEUED,
    Latency,
    Scrape,
    Window,
    between,
    parse,
    quantile,
)
from blink_deploy.watching.render import as_json, bar, history, line, screen
from blink_deploy.watching.view import Rates, Sample, View, rates, view_of
from blink_proto import control_pb2
from tests.unit.test_dpu_metrics import PROMISED

INFINITE = float("inf")


def state(life: int = 7, phase: int = control_pb2.PHASE_SERVING, **counted: int) -> control_pb2.State:
    made = control_pb2.State(phase=phase, epoch=2, model="tiny", life=life)  # type: ignore[arg-type]
    if counted:
        made.telemetry.CopyFrom(control_pb2.Telemetry(**counted))
    return made


FIRST = state(
    generated_tokens=1000, prompt_tokens=300, finished_stop=4, finished_length=2, steps=50, prefix_queries=100,
    prefix_hits=20,
)  # fmt: skip
SECOND = state(
    generated_tokens=1640, prompt_tokens=300, finished_stop=5, finished_length=2, finished_cancelled=3, steps=90,
    running=3, waiting=1, blocks_used=12, blocks_total=96, step_tokens=4, prefix_queries=180, prefix_hits=50,
)  # fmt: skip


def test_rates_are_differences_over_time() -> None:
    assert rates(Sample(10.0, FIRST), Sample(12.0, SECOND)) == Rates(
        generated=320.0, prompt=0.0, ended=2.0, steps=20.0, cached=30 / 80
    )
    assert rates(Sample(12.0, SECOND), Sample(13.0, SECOND)) == Rates(0.0, 0.0, 0.0, 0.0, None)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (None, Sample(1.0, SECOND)),
        (Sample(0.0, state(life=6, generated_tokens=1)), Sample(1.0, SECOND)),
        (Sample(0.0, state()), Sample(1.0, SECOND)),
        (Sample(0.0, FIRST), Sample(1.0, state())),
        (Sample(1.0, FIRST), Sample(1.0, SECOND)),
        (Sample(0.0, SECOND), Sample(1.0, FIRST)),  # counters never go back
    ],
)
def test_no_rates_without_two_looks_at_one_chain(earlier: Sample | None, later: Sample) -> None:
    assert rates(earlier, later) is None


def test_a_line() -> None:
    view = view_of(Sample(10.0, FIRST), Sample(12.0, SECOND))
    assert line(view) == (
        "epoch 2  serving  tiny  out 320.0/s  in 0.0/s  ended 2.0/s  running 3  waiting 1  kv 12.5 % (12/96)  "
        "cached 37.5 %"
    )
    assert line(view_of(None, Sample(0.0, FIRST))).startswith("epoch 2  serving  tiny  out –/s  in –/s")


def test_a_line_of_a_state_alone() -> None:
    """As it was before there were rates."""
    failed = control_pb2.State(phase=control_pb2.PHASE_FAILED, epoch=3, model="tiny", detail="the chain ended")
    assert line(view_of(None, Sample(0.0, failed))) == "epoch 3  failed  tiny  the chain ended"
    assert line(view_of(None, Sample(0.0, control_pb2.State(phase=control_pb2.PHASE_IDLE)))) == "epoch 0  idle"


def test_a_line_with_latencies() -> None:
    view = View("serving", "tiny", 1, queued=4.0, first_token=Latency(0.0125, 1.5), per_token=Latency())
    assert line(view) == "epoch 1  serving  tiny  queued 4  first token 12.5/1,500.0 ms  per token –/– ms"
    assert as_json(view)["first_token"] == {"p50": 0.0125, "p99": 1.5}
    assert line(View("serving", "tiny", 1, fault="metrics: status 401")).endswith("tiny  metrics: status 401")


def test_a_screen() -> None:
    view = View(
        "serving", "tiny", 2, "", Rates(320.0, 0.0, 2.0, 20.0, 0.25), 3, 1, 4, (12, 96), 7, 5.0, Latency(0.1, 0.2),
        Latency(0.004, 0.009), "",
    )  # fmt: skip
    output = io.StringIO()
    Console(file=output, width=100, color_system=None).print(screen(view, [160.0, 320.0], 30.0))
    shown = [row.split("  ") for row in output.getvalue().splitlines()]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in shown]
    assert rows == [
        ["tiny", "serving", "epoch 2"],
        ["generated tokens/s", "320.0", "▄█"],
        ["prompt tokens/s", "0.0"],
        ["sequences ended/s", "2.0"],
        ["steps/s", "20.0", "4 tokens in this step"],
        ["running", "3"],
        ["waiting on the device", "1"],
        ["KV blocks", "12.5 % (12/96)", "███"],
        ["prompts in the cache", "25.0 %", "7 blocks kept"],
        ["queued in all", "5"],
        ["first token P50/P99", "100.0/200.0 ms", "last 30 s"],
        ["per token P50/P99", "4.0/9.0 ms", "last 30 s"],
    ]


def test_bars() -> None:
    assert [bar(share, 2) for share in (-1, 0, 0.5, 0.75, 1, 9)] == ["  ", "  ", "█ ", "█▄", "██", "██"]
    assert history([]) == ""
    assert history([0.0, 0.0]) == "  "
    assert history([0.0, 1.0, 4.0, 8.0]) == " ▁▄█"


@pytest.mark.parametrize(
    ("share", "wanted"),
    [
        (0.5, 0.1 + 0.1 * 10 / 20),  # 30 of 60: 20 are below 0.1, 20 between 0.1 and 0.2
        (1 / 3, 0.1),
        (0.25, 0.1 * 15 / 20),
        (0.99, 0.2),  # beyond the last finite bound
    ],
)
def test_quantiles(share: float, wanted: float) -> None:
    assert quantile({0.1: 20.0, 0.2: 40.0, INFINITE: 60.0}, share) == pytest.approx(wanted)


def test_quantiles_without_values() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({0.1: 0.0, INFINITE: 0.0}, 0.5) is None


def test_quantiles_pass_over_empty_buckets() -> None:
    assert quantile({0.1: 0.0, 0.2: 0.0, 0.4: 8.0, INFINITE: 8.0}, 0.5) == pytest.approx(0.3)


def test_differences_of_histograms() -> None:
    assert between({0.1: 1.0, INFINITE: 2.0}, {0.1: 4.0, INFINITE: 6.0}) == {0.1: 3.0, INFINITE: 4.0}
    assert between({0.1: 9.0, INFINITE: 9.0}, {0.1: 1.0, INFINITE: 1.0}) == {0.1: 1.0, INFINITE: 1.0}  # restarted


def test_the_window_moves() -> None:
    window = Window(10.0)
    assert (window.first_token(), window.queued()) == (Latency(), None)

    def scrape(fast: float, slow: float) -> Scrape:
        return Scrape({1.0: fast, 2.0: fast + slow, INFINITE: fast + slow}, {}, fast)

    window.add(0.0, scrape(0, 0))
    window.add(5.0, scrape(10, 0))
    assert window.first_token().p50 == pytest.approx(0.5)
    window.add(20.0, scrape(10, 10))  # what came in the first five seconds is no longer in it
    assert window.first_token().p50 == pytest.approx(1.5)
    assert window.queued() == 10
    window.add(31.0, scrape(10, 10))
    assert window.first_token() == Latency()


def test_prometheus_text_is_read() -> None:
    """As Prometheus' own package writes it."""
    registry = CollectorRegistry()
    first = Histogram(FIRST_TOKEN, "", ["model"], buckets=(0.1, 0.5), registry=registry)
    Histogram(PER_TOKEN, "", buckets=(0.01,), registry=registry).observe(0.005)
    Histogram("blink_request_seconds", "", buckets=(1.0,), registry=registry).observe(1)
    Gauge(QUEUED, "", registry=registry).set(3)
    for model, value in (("a", 0.05), ("a", 0.3), ("b", 0.3), ("b", 7.0)):
        first.labels(model).observe(value)
    found = parse(generate_latest(registry).decode())
    assert found == Scrape({0.1: 1.0, 0.5: 3.0, INFINITE: 4.0}, {0.01: 1.0, INFINITE: 1.0}, 3.0)
    assert parse("") == Scrape()
    with pytest.raises(ValueError, match="many"):
        parse(f"{QUEUED} many")


def test_the_front_end_has_these_metrics() -> None:
    assert {FIRST_TOKEN, PER_TOKEN, QUEUED} <= set(PROMISED)


def test_a_follower_keeps_the_rates() -> None:
    times = iter([10.0, 12.0, 13.0])
    follower = Follower(None, clock=lambda: next(times))
    views: list[Any] = [follower.take(each) for each in (FIRST, SECOND, SECOND)]
    assert views[0].rates is None
    assert list(follower.generated) == [320.0, 0.0]


def test_every_counter_is_one_of_the_telemetry_page() -> None:
    from blink_proto import arena

    names = {field.name for field in control_pb2.Telemetry.DESCRIPTOR.fields}
    assert names <= set(arena.Telemetry.names or ())
