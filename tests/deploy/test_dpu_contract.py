"""What the DOCA Platform Framework asks of a service's chart, and its own objects."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.deploy.charts import ALL, CHARTS, DEPLOY, Object, objects, one, pods, rendered, with_values
from tests.deploy.tools import KUBERNETES
from tests.deploy.validation import errors_of

DPF = sorted((DEPLOY / "dpf").glob("*.yaml"))
HANDED_IN = yaml.safe_load((ALL["blink-dpu.dpf"].values or CHARTS).read_text())["serviceDaemonSet"]


def dpf_objects() -> list[Object]:
    return [each for path in DPF for each in objects(path.read_text())]


@pytest.mark.parametrize("case", [name for name in ALL if name.startswith("blink-dpu")])
def test_exactly_one_daemonset_for_arm64(case: str) -> None:
    found = rendered(case)
    daemonset = one(found, "DaemonSet")
    assert not {"Deployment", "StatefulSet", "Job", "Pod"} & {each["kind"] for each in found}
    terms = daemonset["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    for term in terms["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]:
        assert {"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]} in term["matchExpressions"]


def test_the_chart_names_the_versions_of_doca() -> None:
    chart = yaml.safe_load((CHARTS / "blink-dpu" / "Chart.yaml").read_text())
    assert chart["annotations"] == {"dpu.nvidia.com/doca-version": ">= 2.9"}
    schema = json.loads((CHARTS / "blink-dpu" / "values.schema.json").read_text())
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"


def test_labels_and_annotations_arrive_unchanged() -> None:
    (pod,) = pods(rendered("blink-dpu.dpf"))
    assert HANDED_IN["labels"].items() <= pod["metadata"]["labels"].items()
    assert HANDED_IN["annotations"].items() <= pod["metadata"]["annotations"].items()


def test_the_services_label_comes_from_the_framework_or_the_id(tmp_path) -> None:
    name = "svc.dpu.nvidia.com/service"
    (pod,) = pods(rendered("blink-dpu.full"))
    assert pod["metadata"]["labels"][name] == "blink"
    both = {"serviceID": "mine", "serviceDaemonSet": {"labels": {name: "handed-in"}}}
    (pod,) = pods(with_values("blink-dpu", tmp_path, both))
    assert pod["metadata"]["labels"][name] == "handed-in"


def test_labels_cannot_break_the_selector(tmp_path) -> None:
    """A DaemonSet whose pods do not have its selector's labels is refused by Kubernetes."""
    values = {"serviceDaemonSet": {"labels": {"app.kubernetes.io/instance": "other"}}}
    daemonset = one(with_values("blink-dpu", tmp_path, values), "DaemonSet")
    labels = daemonset["spec"]["template"]["metadata"]["labels"]
    assert daemonset["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_node_selector_terms_are_required_affinity() -> None:
    daemonset = one(rendered("blink-dpu.dpf"), "DaemonSet")
    affinity = daemonset["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    given = HANDED_IN["nodeSelector"]["nodeSelectorTerms"]
    assert len(terms) == len(given) == 2
    assert given[0]["matchExpressions"][0] in terms[0]["matchExpressions"]
    assert terms[1]["matchFields"] == given[1]["matchFields"]


def test_resources_and_update_strategy_are_passed_on(tmp_path) -> None:
    daemonset = one(rendered("blink-dpu.dpf"), "DaemonSet")
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"requests": HANDED_IN["resources"], "limits": HANDED_IN["resources"]}
    assert daemonset["spec"]["updateStrategy"] == HANDED_IN["updateStrategy"]
    other = with_values("blink-dpu", tmp_path, {"serviceDaemonSet": {"upgradeStrategy": {"type": "OnDelete"}}})
    assert one(other, "DaemonSet")["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_ports_are_exposed_by_a_local_nodeport_service() -> None:
    assert [each for each in rendered("blink-dpu.defaults") if each["kind"] == "Service"] == []
    service = one(rendered("blink-dpu.dpf"), "Service")
    spec = service["spec"]
    assert (spec["type"], spec["internalTrafficPolicy"], spec["externalTrafficPolicy"]) == (
        "NodePort",
        "Local",
        "Local",
    )
    assert [port["name"] for port in spec["ports"]] == ["https"]
    assert service["metadata"]["labels"]["svc.dpu.nvidia.com/exposed-port"] == "true"


def test_a_pod_finds_its_address_by_its_interface() -> None:
    (pod,) = pods(rendered("blink-dpu.dpf"))
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python", "-m", "blink_deploy.on_link", "blink_if", "blink-dpu"]
    assert container["args"][container["args"].index("--rdma-address") + 1] == "@link"


@pytest.mark.parametrize("path", DPF, ids=lambda path: path.name)
def test_the_frameworks_objects_are_valid(path) -> None:
    assert [error for each in objects(path.read_text()) for error in errors_of(each, KUBERNETES[-1])] == []


def test_the_frameworks_objects_fit_together() -> None:
    found = dpf_objects()
    template, configuration = one(found, "DPUServiceTemplate"), one(found, "DPUServiceConfiguration")
    deployment = one(found, "DPUDeployment")
    assert len(deployment["metadata"]["name"]) <= 20
    ((key, service),) = deployment["spec"]["services"].items()
    assert key == template["spec"]["deploymentServiceName"] == configuration["spec"]["deploymentServiceName"]
    assert service["serviceTemplate"] == template["metadata"]["name"]
    assert service["serviceConfiguration"] == configuration["metadata"]["name"]
    (interface,) = configuration["spec"]["interfaces"]
    assert interface["network"] == one(found, "DPUServiceNAD")["metadata"]["name"]
    ((inner, host),) = [switch["ports"] for switch in deployment["spec"]["serviceChains"]["switches"]]
    assert inner["service"]["name"] == key
    assert inner["service"]["interface"] == interface["name"]
    pool = one(found, "DPUServiceIPAM")["spec"]["metadata"]["labels"]
    assert inner["service"]["ipam"]["matchLabels"] == pool
    link = one(found, "DPUServiceInterface")["spec"]["template"]["spec"]["template"]["metadata"]["labels"]
    assert host["serviceInterface"]["matchLabels"] == link


def test_the_frameworks_values_are_values_of_the_chart(tmp_path) -> None:
    """As the framework merges them: template, then configuration."""
    found = dpf_objects()
    template = one(found, "DPUServiceTemplate")["spec"]["helmChart"]
    assert template["source"]["chart"] == "blink-dpu"
    configuration = one(found, "DPUServiceConfiguration")["spec"]["serviceConfiguration"]
    values = _merged(template["values"], configuration["helmChart"]["values"])
    values = _merged(values, {"serviceDaemonSet": configuration["serviceDaemonSet"]})
    rendered_ = with_values("blink-dpu", tmp_path, values)
    exposed = {port["name"]: port["port"] for port in one(rendered_, "Service")["spec"]["ports"]}
    assert exposed == {port["name"]: port["port"] for port in configuration["configPorts"]["ports"]}
    (container,) = pods(rendered_)[0]["spec"]["containers"]
    needed = one(found, "DPUServiceTemplate")["spec"]["resourceRequirements"]
    limits = container["resources"]["limits"]
    assert (needed["cpu"], needed["memory"]) == (limits["cpu"], limits["memory"])
    assert needed["nvidia.com/sf"] == limits["nvidia.com/bf_sf"]


def _merged(below: Object, above: Object) -> Object:
    both = {
        name: _merged(below[name], above[name]) for name in below.keys() & above.keys() if isinstance(below[name], dict)
    }
    return {**below, **above, **both}
