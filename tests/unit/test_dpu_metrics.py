"""What `/metrics` promises: names, types, labels, units, and values, of all workers and the device together."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import pytest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from blink_proto import arena
from blink_proto.arena import Finish
from dpu_service import metrics
from dpu_service.tally import Tally
from tests import tiny_text
from tests.front_end import MODEL, FrontEnd, eventually, front_end
from tests.replay import Script

ROOT = Path(__file__).resolve().parent.parent.parent

# A promise to dashboards and gateways: change it only with a note to operators.
PROMISED = {
    "blink_channel_leases_total": ("counter", ()),
    "blink_completion_tokens_total": ("counter", ()),
    "blink_completions_total": ("counter", ("endpoint", "outcome")),
    "blink_device_faults_total": ("counter", ()),
    "blink_device_finished_total": ("counter", ("reason",)),
    "blink_device_generated_tokens_total": ("counter", ()),
    "blink_device_heartbeat_age_seconds": ("gauge", ()),
    "blink_device_kv_blocks": ("gauge", ()),
    "blink_device_kv_blocks_cached": ("gauge", ()),
    "blink_device_kv_blocks_used": ("gauge", ()),
    "blink_device_kv_usage_ratio": ("gauge", ()),
    "blink_device_log_stalls_total": ("counter", ()),
    "blink_device_prefix_cache_hits_total": ("counter", ()),
    "blink_device_prefix_cache_queries_total": ("counter", ()),
    "blink_device_prompt_tokens_total": ("counter", ()),
    "blink_device_protocol_errors_total": ("counter", ()),
    "blink_device_rejected_total": ("counter", ()),
    "blink_device_sequences_running": ("gauge", ()),
    "blink_device_sequences_waiting": ("gauge", ()),
    "blink_device_state": ("gauge", ()),
    "blink_device_step_tokens": ("gauge", ()),
    "blink_device_steps_total": ("counter", ()),
    "blink_device_up": ("gauge", ()),
    "blink_http_requests_total": ("counter", ("route", "status")),
    "blink_inter_token_seconds": ("histogram", ()),
    "blink_prompt_tokens_total": ("counter", ()),
    "blink_request_completion_tokens": ("histogram", ()),
    "blink_request_prompt_tokens": ("histogram", ()),
    "blink_request_seconds": ("histogram", ("endpoint",)),
    "blink_runtime_heartbeat_age_seconds": ("gauge", ("runtime",)),
    "blink_runtime_kv_usage_ratio": ("gauge", ("runtime",)),
    "blink_runtime_requests_total": ("counter", ("chosen", "runtime")),
    "blink_runtime_retries_total": ("counter", ()),
    "blink_runtime_sequences_running": ("gauge", ("runtime",)),
    "blink_runtime_sequences_waiting": ("gauge", ("runtime",)),
    "blink_runtime_state": ("gauge", ("runtime",)),
    "blink_runtime_up": ("gauge", ("runtime",)),
    "blink_sequences_in_flight": ("gauge", ()),
    "blink_sequences_queued": ("gauge", ()),
    "blink_sequences_unsent": ("gauge", ()),
    "blink_sequences_waiting": ("gauge", ()),
    "blink_tenant_refusals_total": ("counter", ("limit", "tenant")),
    "blink_tenant_tokens_total": ("counter", ("kind", "tenant")),
    "blink_time_per_output_token_seconds": ("histogram", ()),
    "blink_time_to_first_token_seconds": ("histogram", ()),
    "blink_tls_reloads_total": ("counter", ("outcome",)),
    "blink_unknown_records_total": ("counter", ()),
    "blink_workers_ready": ("gauge", ()),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[FrontEnd]:
    with front_end("--workers", "2", "--no-access-log") as running:
        yield running


@pytest.fixture
def front(shared: FrontEnd) -> Iterator[FrontEnd]:
    says(shared, "hello there")
    yield shared
    shared.device.taking = True
    eventually(lambda: shared.device.playing == 0)


def says(front: FrontEnd, text: str, **how: Any) -> None:
    front.device.script = lambda s: Script([*tiny_text.ids(text), tiny_text.special(tiny_text.END)], **how)


def complete(front: FrontEnd, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 100, **fields}
    return httpx.post(front.http + "/v1/completions", json=body, timeout=20)


def scrape(front: FrontEnd) -> dict[str, Metric]:
    """By name as exposed, that is with `_total` for counters."""
    answer = httpx.get(front.http + "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answer.text))
    named = {family.name + "_total" * (family.type == "counter"): family for family in families}
    assert len(named) == len(families)
    return named


def value(front: FrontEnd, name: str, **labels: str) -> float:
    """Of one sample, 0 when it is not there."""
    samples = [sample for family in scrape(front).values() for sample in family.samples]
    found = [sample.value for sample in samples if sample.name == name and sample.labels == labels]
    return found[0] if found else 0.0


def test_names_types_labels_and_units_are_frozen(front: FrontEnd) -> None:
    assert complete(front).status_code == complete(front, stream=True).status_code == 200
    found = {}
    for name, family in scrape(front).items():
        assert family.documentation
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, tuple(sorted(labels)))
    assert PROMISED.items() >= found.items()
    assert PROMISED.keys() - found.keys() == {
        *("blink_tenant_refusals_total", "blink_tenant_tokens_total", "blink_tls_reloads_total")
    }


def test_what_is_declared_is_promised() -> None:
    declared = {}
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            declared[family.name + "_total" * (family.type == "counter")] = (
                family.type,
                tuple(sorted(metric._labelnames)),
            )
    assert PROMISED.items() >= declared.items()
    read = {name for name in PROMISED.keys() - declared.keys() if "_device_" not in name and "_runtime_" not in name}
    assert read == {"blink_sequences_queued"}


def test_tenants_by_name(tmp_path: Path) -> None:
    keys = {name: f"blink-test-key-of-{name}" for name in ("alpha", "beta")}
    limits = {"alpha": "", "beta": "concurrent_sequences = 1"}
    file = tmp_path / "keys.toml"
    file.write_text(
        "".join(
            f'[tenants.{name}]\nkeys = ["sha256:{hashlib.sha256(key.encode()).hexdigest()}"]\n{limits[name]}\n'
            for name, key in keys.items()
        )
    )
    with front_end("--workers", "1", "--api-keys", str(file), "--open-metrics") as front:
        says(front, "hello")
        headers = {name: {"authorization": f"Bearer {key}"} for name, key in keys.items()}
        body = {"model": MODEL, "prompt": "hi", "n": 2}
        answers = [httpx.post(front.http + "/v1/completions", json=body, headers=headers[name]) for name in keys]
        assert [answer.status_code for answer in answers] == [200, 400]
        used = answers[0].json()["usage"]
        eventually(lambda: value(front, "blink_tenant_tokens_total", tenant="alpha", kind="prompt") > 0)
        for kind in ("prompt", "completion"):
            assert value(front, "blink_tenant_tokens_total", tenant="alpha", kind=kind) == used[f"{kind}_tokens"]
        page = httpx.get(front.http + "/metrics").text
        for key in keys.values():
            assert key not in page + front.log.read_text()
            assert hashlib.sha256(key.encode()).hexdigest()[:12] not in page + front.log.read_text()


def test_names_are_legal_and_in_base_units() -> None:
    for name, (kind, _) in PROMISED.items():
        assert re.fullmatch(r"blink_[a-z_]+[a-z]", name)  # legal to Prometheus; colons are for its recording rules
        assert name.endswith("_total") == (kind == "counter")
        assert not re.search(r"_(ms|milliseconds|us|micros|minutes|percent|perc|kb|mb|kib|mib)(_|$)", name)


def test_what_is_documented_is_what_is_exposed() -> None:
    page = (ROOT / "dpu_service" / "METRICS.md").read_text()
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| `blink_")]
    documented = {}
    for names, kind, _ in rows:
        for name in re.findall(r"`(blink_\w+)`", names):
            type_name, *labels = re.findall(r"\w+", kind)
            documented[name] = (type_name, tuple(sorted(labels)))
    assert documented == PROMISED
    assert set(re.findall(r"blink_\w+", page)) == set(PROMISED)


def test_labels_are_bounded(front: FrontEnd) -> None:
    for path in ("/v1/x1", "/v1/x2", "/v1/models/a", "/v1/models/b"):
        httpx.get(front.http + path)
    httpx.post(front.http + "/v1/completions", json={"model": "another"})
    requests = scrape(front)["blink_http_requests_total"]
    assert {sample.labels["route"] for sample in requests.samples} <= {
        *("unknown", "/v1/models/{model}", "/v1/completions", "/metrics", "/health", "/ready")
    }
    outcomes = {sample.labels["outcome"] for sample in scrape(front)["blink_completions_total"].samples}
    assert outcomes <= {"ok", "refused", "client_gone", "not_ready"}


def test_values_of_a_request(front: FrontEnd) -> None:
    def counts() -> dict[str, float]:
        names = ("blink_prompt_tokens_total", "blink_completion_tokens_total", "blink_request_prompt_tokens_sum")
        more = ("blink_request_completion_tokens_sum", "blink_time_to_first_token_seconds_count")
        last = ("blink_inter_token_seconds_count", "blink_time_per_output_token_seconds_count")
        return {name: value(front, name) for name in names + more + last}

    says(front, "hello there", every=0.02)
    tokens = len(tiny_text.ids("hello there")) + 1
    before = counts()
    used = complete(front, n=2).json()["usage"]
    assert used["completion_tokens"] == 2 * tokens
    prompt = used["prompt_tokens"]
    expected = dict(zip(before, (prompt, 2 * tokens, prompt, 2 * tokens, 2, 2 * (tokens - 1), 2), strict=True))
    grown = before

    def has_grown() -> bool:
        nonlocal grown
        grown = {name: after - before[name] for name, after in counts().items()}
        return grown == expected

    eventually(has_grown)
    mean = value(front, "blink_time_per_output_token_seconds_sum") / value(
        front, "blink_time_per_output_token_seconds_count"
    )
    assert 0 < mean < 0.2


def test_gauges_of_the_gateways(front: FrontEnd) -> None:
    says(front, "hello there hello there", every=0.1)
    body = {"model": MODEL, "prompt": "hi", "n": 3, "stream": True}
    with httpx.stream("POST", front.http + "/v1/completions", json=body):
        eventually(lambda: value(front, "blink_device_kv_usage_ratio") == pytest.approx(0.03))  # of 100 blocks
        assert value(front, "blink_device_sequences_running") == 3
        assert value(front, "blink_sequences_queued") == 0
    eventually(lambda: value(front, "blink_device_sequences_running") == 0)


def test_queued_are_those_that_the_device_has_not_taken(front: FrontEnd) -> None:
    front.device.taking = False
    body = {"model": MODEL, "prompt": "hi", "n": 2}
    with httpx.Client(timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post(front.http + "/v1/completions", json=body)
    with httpx.Client(timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post(front.http + "/v1/completions", json={**body, "n": 5})
    eventually(lambda: value(front, "blink_sequences_queued") >= 7)  # cancels wait until the device takes them
    assert value(front, "blink_sequences_unsent") == 7
    front.device.taking = True
    eventually(lambda: value(front, "blink_sequences_queued") == 0)


def test_counters_go_on_when_workers_are_replaced_and_gauges_do_not() -> None:
    with front_end("--workers", "2", "--no-access-log") as front:
        says(front, "hello")
        for _ in range(10):
            assert complete(front).status_code == 200
        before = value(front, "blink_prompt_tokens_total")
        assert before > 0
        front.device.script = lambda s: Script(tiny_text.ids("a" * 50), Finish.NONE, every=0.5)
        with httpx.stream(
            "POST", front.http + "/v1/completions", json={"model": MODEL, "prompt": "hi", "stream": True}
        ):
            eventually(lambda: value(front, "blink_sequences_in_flight") == 1)
            first = front.workers()
            for pid in first:
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(set(front.workers()) - set(first)) == 2, timeout=10)

        def ready() -> bool:
            try:
                return value(front, "blink_workers_ready") == 2
            except httpx.HTTPError:
                return False

        eventually(ready, timeout=10)
        assert value(front, "blink_prompt_tokens_total") > before
        assert value(front, "blink_sequences_in_flight") == 0
        assert value(front, "blink_channel_leases_total") == 4


def test_several_devices_are_summed_and_told_apart() -> None:
    """Each field of a page gets a value of its own; the third device is lost, the fourth has no session."""
    names = [name for name in arena.TELEMETRY_OFFSETS if not name.startswith("pad")]
    pages = [{name: 100 * number + place for place, name in enumerate(names)} for number in (1, 2, 3)]
    for page, state in zip(pages, (1, 2, 4), strict=True):
        page["state"] = state
    devices = [
        metrics.Device(pages[0], True, False, 0.1),
        metrics.Device(pages[1], False, False, 0.2),
        metrics.Device(pages[2], False, True, 9.0),
        metrics.Device(None, False, True, 0.0),
    ]
    found = {
        (sample.name, sample.labels.get("runtime", "")): sample.value
        for family in metrics.Page(devices).collect()
        for sample in family.samples
    }
    place = names.index

    def present(name: str) -> int:
        return 300 + 2 * place(name)

    assert found["blink_device_sequences_running", ""] == present("running")
    assert found["blink_device_kv_usage_ratio", ""] == present("blocks_used") / present("blocks_total")
    assert found["blink_device_steps_total", ""] == 600 + 3 * place("steps"), "counters of one that is gone stay"
    assert found["blink_sequences_queued", ""] == present("waiting")
    assert found["blink_device_state", ""] == 4
    assert found["blink_device_up", ""] == 1
    assert found["blink_device_heartbeat_age_seconds", ""] == 9
    assert [found["blink_runtime_up", number] for number in "0123"] == [1, 0, 0, 0]
    assert [found["blink_runtime_sequences_waiting", number] for number in "012"] == [
        *(100 * number + place("waiting") for number in (1, 2, 3))
    ]
    assert ("blink_runtime_state", "3") not in found


def test_a_tally_equals_observations() -> None:
    registry = prometheus_client.CollectorRegistry()
    observed = prometheus_client.Histogram("a", "a", buckets=(1, 2, 4), registry=registry)
    tallied = prometheus_client.Histogram("b", "b", buckets=(1, 2, 4), registry=registry)
    tally = Tally(tallied)
    for number, times in ((0.5, 1), (1, 3), (1.5, 2), (4, 1), (9, 2)):
        tally.add(number, times)
        for _ in range(times):
            observed.observe(number)
    tally.flush()
    tally.flush()  # adds nothing
    text = prometheus_client.generate_latest(registry).decode()

    def lines(name: str) -> list[str]:
        return [line[1:] for line in text.splitlines() if line.startswith(name) and "created" not in line]

    assert lines("a") == lines("b")
    assert lines("a")
