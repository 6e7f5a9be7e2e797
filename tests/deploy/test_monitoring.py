"""Dashboard and alerts ask for metrics that exist, in expressions that Prometheus can read."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.deploy.charts import DEPLOY, one, rendered
from tests.deploy.tools import import_folder
from tests.unit.test_dpu_metrics import PROMISED

SERIES = {
    f"{name}{suffix}": labels + (("le",) if suffix == "_bucket" else ())
    for name, (kind, labels) in PROMISED.items()
    for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
}
SCRAPED = {"job", "pod", "node", "namespace", "instance"}
"""What Prometheus adds to every series."""


@pytest.fixture(scope="module")
def promql() -> Iterator[Any]:
    folder = str(import_folder("promql-parser==0.12.0"))
    sys.path.insert(0, folder)
    yield importlib.import_module("promql_parser")
    sys.path.remove(folder)


def dashboard_expressions() -> list[str]:
    config = one(rendered("blink-dpu.full"), "ConfigMap", "-dashboard")
    (text,) = config["data"].values()
    return [target["expr"] for panel in json.loads(text)["panels"] for target in panel.get("targets", [])]


def alerts() -> list[dict[str, Any]]:
    (group,) = one(rendered("blink-dpu.full"), "PrometheusRule")["spec"]["groups"]
    return group["rules"]


def selectors(promql: Any, node: Any) -> list[Any]:
    """Every selection of series in a parsed expression."""
    if isinstance(node, promql.VectorSelector):
        return [node]
    inner = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "param")]
    inner += list(getattr(node, "args", None) or [])
    return [found for each in inner if each is not None for found in selectors(promql, each)]


def check(promql: Any, expression: str) -> None:
    text = expression.replace("$__rate_interval", "1m")
    found = selectors(promql, promql.parse(text))
    assert len(found) == len(re.findall(r"\b(?:blink_\w+|up)\{", text)), "a selector was not looked at"
    for each in found:
        if each.name != "up":
            labels = {matcher.name for matcher in each.matchers.matchers}
            assert labels <= SCRAPED | set(SERIES[each.name]), (each.name, labels)
    for names in re.findall(r"(?:by|on|without) \(([^)]*)\)", text):
        known = SCRAPED.union(*(SERIES.get(each.name, ()) for each in found))
        assert {name.strip() for name in names.split(",")} <= known, expression


def test_the_dashboard_asks_for_what_is_there(promql: Any) -> None:
    expressions = dashboard_expressions()
    assert len(expressions) > 30
    for expression in expressions:
        check(promql, expression)


def test_alerts_ask_for_what_is_there(promql: Any) -> None:
    assert len(alerts()) >= 10
    for rule in alerts():
        check(promql, rule["expr"])


def test_a_wrong_expression_is_noticed(promql: Any) -> None:
    for wrong in ('sum(rate(blink_no_such_total{job="a"}[1m]))', 'blink_device_up{tenant="a"}', "sum(blink_device_up{"):
        with pytest.raises((AssertionError, KeyError, ValueError)):
            check(promql, wrong)


def test_counters_are_asked_for_their_rate() -> None:
    """And nothing else is: the rate of a gauge means nothing."""
    for expression in [*dashboard_expressions(), *(rule["expr"] for rule in alerts())]:
        for before, name in re.findall(r"(\w+\()?(blink_\w+)\{", expression):
            counts = name.endswith(("_total", "_bucket", "_count", "_sum"))
            assert (before in ("rate(", "increase(")) == counts, expression


def test_quantiles_keep_the_bounds_of_buckets() -> None:
    for expression in [*dashboard_expressions(), *(rule["expr"] for rule in alerts())]:
        if "histogram_quantile" in expression:
            assert re.search(r"sum by \(le\b", expression), expression


def test_label_values_of_alerts_and_panels_are_labels_of_their_series() -> None:
    for rule in alerts():
        names = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        first = re.search(r"\b(blink_\w+)\{", rule["expr"])
        assert names <= SCRAPED.union(SERIES[first[1]] if first else ())
        for by in re.findall(r"by \(([^)]*)\)", rule["expr"]):
            assert names <= {name.strip() for name in by.split(",")}
    assert len({rule["alert"] for rule in alerts()}) == len(alerts())


def test_panels_do_not_lie_on_each_other() -> None:
    text = (DEPLOY / "charts" / "blink-dpu" / "files" / "dashboard.json").read_text()
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_scraping_finds_the_service_and_the_port() -> None:
    found = rendered("blink-dpu.full")
    monitor, service = one(found, "ServiceMonitor")["spec"], one(found, "Service", "-metrics")
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    others = [each for each in found if each["kind"] == "Service" and each is not service]
    assert all(not monitor["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items() for each in others)
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["authorization"]["credentials"] == {"name": "scrape", "key": "key"}
    # Alerts and dashboard go by the name of the service, which becomes the job.
    assert all(f'job="{service["metadata"]["name"]}"' in rule["expr"] for rule in alerts())


def test_the_endpoint_pickers_metrics_exist() -> None:
    picker = yaml.safe_load((DEPLOY / "gateway" / "endpoint-picker.yaml").read_text())
    (config,) = [plugin["parameters"] for plugin in picker["plugins"] if "parameters" in plugin]
    (engine,) = config["engineConfigs"]
    assert engine.pop("name") == config["defaultEngine"] == "blink"
    assert {PROMISED[name][0] for name in engine.values()} == {"gauge"}
    text = (DEPLOY.parent / "dpu_service" / "METRICS.md").read_text()
    assert all(f"{key}: {value}" in text for key, value in engine.items())
