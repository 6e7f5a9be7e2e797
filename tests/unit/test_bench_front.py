"""The front end's benchmark measures what was said and when: a rehearsal with few streams."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from tests.bench.front import servers, stages, text, tokenising
from tests.bench.front.streams import Scenario, measure


@pytest.mark.parametrize(
    "scenario",
    [Scenario("step", 8, 50, chat=True), Scenario("spread", 8, 50, phases=4, tls=False)],
    ids=["tls-chat", "plain-spread"],
)
def test_streams(scenario: Scenario) -> None:
    got = measure(scenario, 0.5)  # raises where a token is lost, out of order, or there before it was written
    assert got.offered == 400
    assert 100 < got.tokens_per_second < 500
    assert 0 < got.delay_p50 <= got.delay_p99 <= got.delay_max < 1000
    assert got.tokens_per_event >= 1
    assert all(value >= 0 for value in dataclasses.asdict(got).values())


@pytest.mark.parametrize("server", servers.SERVERS, ids=lambda server: server.name)
def test_servers_side_by_side(server: servers.Server) -> None:
    """The reader raises where an event is lost."""
    program = server.command.split()[0]
    if "." not in program and importlib.util.find_spec(program) is None:
        pytest.skip(f"{program} is not installed (the extra bench)")
    got = servers.measure(server, 0.3, streams=4)
    assert all(value > 0 for value in dataclasses.asdict(got).values())


def test_tick_tokens_have_their_numbers_as_text() -> None:
    bundle = tokenising.TextBundle(text.files())
    for tick in (0, 1, 0xABCD, text.TICKS - 1):
        assert bundle.detokenizer(True).feed([text.first_tick() + tick]) == f"{tick:04x}"


def test_stages_do_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "ROUNDS", 2)
    assert min(stages.measure().values()) > 0
