"""Metrics of the front end. Names are a promise to dashboards and gateways: `blink_` first, base units, frozen in a
test, explained in METRICS.md.

Each worker counts in files of its own (prometheus-client's multiprocess mode, switched on by the supervisor through
PROMETHEUS_MULTIPROC_DIR); whichever worker answers a scrape adds all of them up. What the device says of itself is
read from its telemetry page at the time of the scrape.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import REGISTRY, Collector

from dpu_service.tally import Tally

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

HTTP_REQUESTS = Counter("blink_http_requests", "Answered HTTP requests", ["route", "status"])
COMPLETIONS = Counter("blink_completions", "Completion requests by how they ended", ["endpoint", "outcome"])
REQUEST_SECONDS = Histogram(
    "blink_request_seconds", "Whole completion requests", ["endpoint"], buckets=(*_LATENCIES, 120, 300)
)
FIRST_TOKEN_SECONDS = Histogram(
    "blink_time_to_first_token_seconds", "From a request's arrival to its first token", buckets=_LATENCIES
)
INTER_TOKEN_SECONDS = Histogram(
    "blink_inter_token_seconds", "Between two tokens of a sequence, as the worker sees them", buckets=_GAPS
)
INTER_TOKENS = Tally(INTER_TOKEN_SECONDS)
OUTPUT_TOKEN_SECONDS = Histogram(
    "blink_time_per_output_token_seconds", "Of a choice: mean time of the tokens after its first one", buckets=_GAPS
)
REQUEST_PROMPT_TOKENS = Histogram("blink_request_prompt_tokens", "Prompt tokens of a started request", buckets=_TOKENS)
REQUEST_COMPLETION_TOKENS = Histogram(
    "blink_request_completion_tokens", "Tokens of all choices of a started request", buckets=_TOKENS
)
PROMPT_TOKENS = Counter("blink_prompt_tokens", "Prompt tokens of started requests")
COMPLETION_TOKENS = Counter("blink_completion_tokens", "Tokens delivered to requests")
SEQUENCES_IN_FLIGHT = Gauge("blink_sequences_in_flight", "Sequences that have not ended", multiprocess_mode="livesum")
SEQUENCES_WAITING = Gauge("blink_sequences_waiting", "Sequences without a first token", multiprocess_mode="livesum")
SEQUENCES_UNSENT_NAME = "blink_sequences_unsent"
SEQUENCES_UNSENT = Gauge(
    SEQUENCES_UNSENT_NAME, "Sequences that the device has not taken yet", multiprocess_mode="livesum"
)
WORKER_READY = Gauge("blink_workers_ready", "Workers that take requests", multiprocess_mode="livesum")
LEASES = Counter("blink_channel_leases", "Leases taken on channels of the arena")
DEVICE_FAULTS = Counter("blink_device_faults", "Impossible records in token logs")
TENANT_REFUSALS = Counter("blink_tenant_refusals", "Requests over a tenant's limit", ["tenant", "limit"])
TENANT_TOKENS = Counter("blink_tenant_tokens", "Tokens of a tenant's started requests", ["tenant", "kind"])
TLS_RELOADS = Counter("blink_tls_reloads", "Times that certificate files changed", ["outcome"])
RUNTIME_REQUESTS = Counter(
    "blink_runtime_requests", "Requests that a runtime was chosen for, by why", ["runtime", "chosen"]
)
RUNTIME_RETRIES = Counter("blink_runtime_retries", "Requests that were tried once more, on another runtime")
UNKNOWN_RECORDS = Counter("blink_unknown_records", "Token records of sequences that the worker does not know")

_DEVICE_GAUGES = {
    "state": ("blink_device_state", "0 starting, 1 running, 2 draining, 3 stopped, 4 failed"),
    "running": ("blink_device_sequences_running", "Sequences that hold KV blocks"),
    "waiting": ("blink_device_sequences_waiting", "Sequences taken but not yet admitted"),
    "blocks_total": ("blink_device_kv_blocks", "KV blocks in the pool"),
    "blocks_used": ("blink_device_kv_blocks_used", "KV blocks that sequences hold"),
    "blocks_cached": ("blink_device_kv_blocks_cached", "KV blocks that only the prefix cache holds"),
    "step_tokens": ("blink_device_step_tokens", "Tokens of the step now running"),
}
_DEVICE_COUNTERS = {
    "steps": ("blink_device_steps", "Steps that ran"),
    "prompt_tokens": ("blink_device_prompt_tokens", "Prompt tokens computed"),
    "prefix_queries": ("blink_device_prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    "prefix_hits": ("blink_device_prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    "generated_tokens": ("blink_device_generated_tokens", "Tokens generated"),
    "rejected": ("blink_device_rejected", "Submissions refused"),
    "protocol_errors": ("blink_device_protocol_errors", "Impossible cursors, leases and cancel targets"),
    "log_stalls": ("blink_device_log_stalls", "Times a sequence waited for room in its token log"),
}
_FINISHES = ("stop", "length", "cancelled", "error")


def show(in_flight: int, waiting: int, unsent: int) -> None:
    """What a worker counts otherwise than here: its sequences at this moment."""
    SEQUENCES_IN_FLIGHT.set(in_flight)
    SEQUENCES_WAITING.set(waiting)
    SEQUENCES_UNSENT.set(unsent)
    INTER_TOKENS.flush()


@dataclass(frozen=True)
class Device:
    """What a scrape finds of one runtime.

    Attributes:
        telemetry: the device's page by field name, or None without a session.
        up: whether the device takes submissions.
        lost: whether it is gone: what its page says of the present is void.
        seconds_silent: since the last heartbeat.
    """

    telemetry: dict[str, int] | None
    up: bool
    lost: bool
    seconds_silent: float

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that sequences hold."""
        page = self.telemetry
        return page["blocks_used"] / page["blocks_total"] if page is not None and page["blocks_total"] else 0.0


class Page(Collector):
    """Everything of one scrape.

    Args:
        devices: of every runtime, in order of their numbers.
    """

    def __init__(self, devices: list[Device]) -> None:
        self._devices = devices

    def collect(self) -> Iterator[Metric]:
        """See prometheus-client."""
        unsent = 0.0
        for family in _workers().collect():
            if family.name == SEQUENCES_UNSENT_NAME:
                unsent = sum(sample.value for sample in family.samples)
            yield family
        seen = [one for one in self._devices if one.telemetry is not None]
        whole = _together(seen)
        waiting = whole["waiting"] if whole else 0
        yield GaugeMetricFamily(
            "blink_sequences_queued", "Sequences without KV blocks, in workers and on devices", unsent + waiting
        )
        up = any(one.up for one in self._devices)
        yield GaugeMetricFamily("blink_device_up", "1 while any device takes submissions", float(up))
        if whole:
            silent = max(one.seconds_silent for one in seen)
            yield from self._device(Device(whole, up, False, silent))
        yield from self._runtimes()

    def _device(self, device: Device) -> Iterator[Metric]:
        telemetry = device.telemetry or {}
        yield GaugeMetricFamily("blink_device_heartbeat_age_seconds", "Since the last heartbeat", device.seconds_silent)
        yield GaugeMetricFamily(
            "blink_device_kv_usage_ratio", "Share of the KV blocks that sequences hold", device.kv_usage
        )
        for name, (metric, about) in _DEVICE_GAUGES.items():
            yield GaugeMetricFamily(metric, about, telemetry[name])
        for name, (metric, about) in _DEVICE_COUNTERS.items():
            yield CounterMetricFamily(metric, about, telemetry[name])
        finished = CounterMetricFamily("blink_device_finished", "Sequences by how they ended", labels=["reason"])
        for reason in _FINISHES:
            finished.add_metric([reason], telemetry[f"finished_{reason}"])
        yield finished

    def _runtimes(self) -> Iterator[Metric]:
        """The same for each, of what differs between them; by names of their own, so that sums stay sums."""
        values: dict[str, Callable[[Device, dict[str, int]], float]] = {
            "heartbeat_age_seconds": lambda device, page: device.seconds_silent,
            "sequences_running": lambda device, page: page["running"],
            "sequences_waiting": lambda device, page: page["waiting"],
            "kv_usage_ratio": lambda device, page: device.kv_usage,
            "state": lambda device, page: page["state"],
        }
        up = GaugeMetricFamily("blink_runtime_up", "1 while a runtime takes submissions", labels=["runtime"])
        for number, one in enumerate(self._devices):
            up.add_metric([str(number)], float(one.up))
        yield up
        for name, value in values.items():
            family = GaugeMetricFamily(f"blink_runtime_{name}", f"blink_device_{name} of a runtime", labels=["runtime"])
            for number, one in enumerate(self._devices):
                if one.telemetry is not None:
                    family.add_metric([str(number)], value(one, one.telemetry))
            yield family


def _together(devices: list[Device]) -> dict[str, int]:
    """Sums; of gauges over those that are not lost, if there are any; of states the worst one. Empty without a page."""
    pages = [one.telemetry for one in devices if one.telemetry is not None]
    if not pages:
        return {}
    whole = {name: sum(page[name] for page in pages) for name in pages[0]}
    present = [one.telemetry for one in devices if one.telemetry is not None and not one.lost] or pages
    gauges = {name: sum(page[name] for page in present) for name in _DEVICE_GAUGES}
    return {**whole, **gauges, "state": max(page["state"] for page in pages)}


def _workers() -> CollectorRegistry:
    """What the workers count: all of them together, or this process alone where there is no supervisor."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
    return registry


def render(page: Page) -> bytes:
    """In Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(page)
    return generate_latest(registry)
