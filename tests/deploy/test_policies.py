"""What every pod and policy must keep to."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.deploy.charts import (
    ALL,
    CHARTS,
    DEPLOY,
    Case,
    Object,
    is_hook,
    objects,
    one,
    pods,
    rendered,
    rendered_text,
    with_values,
)

EVERY = pytest.mark.parametrize("case", ALL.values(), ids=ALL)
STATIC_POD = DEPLOY / "static-pod" / "blink-dpu.yaml"


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def as_root(case: Case) -> bool:
    """Whether the values ask for a container that runs as root, for its capability."""
    return case.name in ("blink-gpu.full", "blink-dpu.full")


@EVERY
def test_containers_may_do_as_little_as_possible(case: Case) -> None:
    for pod in pods(rendered(case)):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["securityContext"]["runAsNonRoot"] is not as_root(case)
        assert (spec["securityContext"]["runAsUser"] == 0) == as_root(case)
        assert not {"hostPID", "hostIPC", "shareProcessNamespace", "serviceAccountName"} & spec.keys()
        for container in containers(pod):
            security = container["securityContext"]
            assert security["privileged"] is False
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            allowed = ["IPC_LOCK"] if as_root(case) and container["name"] != "download" else []
            assert security["capabilities"].get("add", []) == allowed


@EVERY
def test_pods_of_tests_may_do_nothing_either(case: Case) -> None:
    hooks = [each for each in rendered(case) if is_hook(each)]
    assert len(hooks) == (case.chart == "blink-single")
    for each in hooks:
        (container,) = containers(each)
        assert each["spec"]["automountServiceAccountToken"] is False
        assert each["spec"]["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        (pod,) = pods(rendered(case))
        assert container["image"] == pod["spec"]["containers"][0]["image"]
        # It is no pod of the service, and the policy lets it in.
        service = one(rendered(case), "Service")
        assert not service["spec"]["selector"].items() <= each["metadata"]["labels"].items()
        assert f"https://{service['metadata']['name']}." in container["args"][1]
        (rule,) = one(rendered(case), "NetworkPolicy")["spec"]["ingress"]
        peers = [peer.get("podSelector", {}).get("matchLabels", {}) for peer in rule.get("from", [{"podSelector": {}}])]
        assert any(peer.items() <= each["metadata"]["labels"].items() for peer in peers)


@EVERY
def test_the_host_is_reached_only_when_asked_for(case: Case) -> None:
    values = yaml.safe_load(case.values.read_text()) if case.values else {}
    for pod in pods(rendered(case)):
        assert pod["spec"].get("hostNetwork", False) == values.get("hostNetwork", False)
        paths = [volume for volume in pod["spec"]["volumes"] if "hostPath" in volume]
        assert len(paths) == ("hostPath" in str(values))


@EVERY
def test_images_are_pinned(case: Case) -> None:
    for pod in pods(rendered(case)):
        for container in containers(pod):
            assert re.search(r"(@sha256:[0-9a-f]{64}|:\d+\.\d+\.\d+)$", container["image"]), container["image"]


@EVERY
def test_pods_say_what_they_need_and_how_they_are(case: Case) -> None:
    for pod in pods(rendered(case)):
        assert pod["spec"]["terminationGracePeriodSeconds"] > 30
        for container in pod["spec"]["containers"]:
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
        for container in containers(pod):
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
            # Kubernetes wants the same on both sides for what is not cpu and memory.
            extended = [
                {name: value for name, value in side.items() if "/" in name}
                for side in (container["resources"]["requests"], container["resources"]["limits"])
            ]
            assert extended[0] == extended[1]
            if extended[0]:
                assert container["name"] != "download"


@EVERY
def test_pods_outlive_the_end_of_their_programs(case: Case) -> None:
    """Kubernetes kills later than the program has drained; `blink up` ends one program after the other."""
    (pod,) = pods(rendered(case))
    words = pod["spec"]["containers"][0]["args"]
    said = {name: float(words[words.index(name) + 1]) for name in ("--grace", "--unready") if name in words}
    programs = 2 if case.chart == "blink-single" else 1
    needed = programs * said["--grace"] + said.get("--unready", 0.0)
    assert pod["spec"]["terminationGracePeriodSeconds"] >= needed + 10


@EVERY
def test_what_is_written_to_is_a_volume_of_bounded_size(case: Case) -> None:
    for pod in pods(rendered(case)):
        for volume in pod["spec"]["volumes"]:
            if "emptyDir" in volume and volume["name"] != "extra":
                assert "sizeLimit" in volume["emptyDir"], volume
        for container in pod["spec"]["containers"]:
            places = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert {"/tmp", "/dev/shm"} <= places
            for entry in container["env"]:
                if entry["name"] in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "XDG_DATA_HOME"):
                    assert any(entry["value"].startswith(place) for place in places), entry


@EVERY
def test_liveness_is_the_process_and_readiness_the_device(case: Case) -> None:
    for pod in pods(rendered(case)):
        (container,) = pod["spec"]["containers"]
        live, ready = container["livenessProbe"], container["readinessProbe"]
        if case.chart == "blink-gpu":
            assert "tcpSocket" in live
            assert {"exec", "grpc", "tcpSocket"} & ready.keys()
        else:
            assert (live["httpGet"]["path"], ready["httpGet"]["path"]) == ("/health", "/ready")
            port = {entry["name"] for entry in container["ports"]}
            assert {live["httpGet"]["port"], ready["httpGet"]["port"]} <= port


@EVERY
def test_secrets_come_by_reference_only(case: Case) -> None:
    text = rendered_text(case)
    assert "kind: Secret\n" not in text
    assert "PRIVATE KEY" not in text
    # Digests only of images.
    assert all(match.group(1) == "@" for match in re.finditer(r"(.)sha256:", text))
    for pod in pods(rendered(case)):
        for container in containers(pod):
            for entry in container.get("env", []):
                if re.search("TOKEN|KEY|SECRET|PASSWORD", entry["name"]):
                    assert entry["valueFrom"].keys() == {"secretKeyRef"}
            for argument in container.get("args", []):
                assert not re.search(r"BEGIN|sk-|sha256:", argument)
        for volume in pod["spec"]["volumes"]:
            if "secret" in volume:
                # The pod's group may read it; 0o440.
                assert volume["secret"]["defaultMode"] == 288


@pytest.mark.parametrize("chart", ["blink-gpu", "blink-dpu", "blink-single"])
def test_no_value_takes_a_secret(chart: str) -> None:
    """Whatever has to do with keys, tokens and passwords is a name or a switch."""
    schema = (CHARTS / chart / "values.schema.json").read_text()
    loose: list[str] = []

    def look(node: Any, name: str) -> None:
        if isinstance(node, dict):
            if (
                re.search("(?i)token|password|secret|apikey", name)
                and node.get("type") == "string"
                and "pattern" not in node
            ):
                loose.append(name)
            for key, inner in node.items():
                look(inner, key)

    look(yaml.safe_load(schema)["properties"], "")
    # How many tokens is no secret.
    assert [name for name in loose if not name.endswith("Tokens")] == []


def rules_for(policy: Object, port: Any) -> list[Object]:
    return [rule for rule in policy["spec"]["ingress"] if port in [each["port"] for each in rule["ports"]]]


def test_the_control_plane_is_for_the_programs_and_administrators() -> None:
    policy = one(rendered("blink-gpu.full"), "NetworkPolicy")
    (rule,) = rules_for(policy, "control")
    assert rule["from"] == [
        {"ipBlock": {"cidr": "10.1.0.2/32"}},
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "admin"}},
            "podSelector": {"matchLabels": {"app": "blinkctl"}},
        },
    ]
    (link,) = rules_for(policy, 4791)
    assert link == {"from": [{"ipBlock": {"cidr": "10.1.0.0/30"}}], "ports": [{"port": 4791, "protocol": "UDP"}]}


@EVERY
def test_no_rule_is_open_by_accident(case: Case) -> None:
    """A rule without peers lets everybody in: only ports for clients may have one."""
    for each in rendered(case):
        if each["kind"] == "NetworkPolicy":
            assert each["spec"]["policyTypes"] == ["Ingress", "Egress"]
            for rule in each["spec"]["ingress"]:
                assert rule["ports"]
                if not rule.get("from"):
                    assert case.chart != "blink-gpu"
                    assert {port["port"] for port in rule["ports"]} <= {"https", "http"}
            for rule in each["spec"]["egress"]:
                assert rule["ports"]


def test_without_peers_nobody_gets_in() -> None:
    policy = one(rendered("blink-gpu.defaults"), "NetworkPolicy")
    assert policy["spec"]["ingress"] == []
    assert policy["spec"]["egress"] == []


def test_the_front_end_reaches_its_runtime_and_names_only(tmp_path) -> None:
    policy = one(rendered("blink-dpu.dpf"), "NetworkPolicy")
    names, runtime, link = policy["spec"]["egress"]
    assert {port["port"] for port in names["ports"]} == {53}
    assert runtime == {"ports": [{"port": 50051, "protocol": "TCP"}], "to": [{"ipBlock": {"cidr": "192.168.200.1/32"}}]}
    assert link["to"] == [{"ipBlock": {"cidr": "192.168.200.0/24"}}]


def test_every_runtimes_control_plane_is_reached(tmp_path) -> None:
    values = {"runtime": {"addresses": ["10.0.0.1:50051", "10.0.0.2:50051", "10.0.0.1:50052"]}}
    found = with_values("blink-dpu", tmp_path, values)
    _, runtime = one(found, "NetworkPolicy")["spec"]["egress"]
    assert [port["port"] for port in runtime["ports"]] == [50051, 50052]
    (container,) = pods(found)[0]["spec"]["containers"]
    words = container["args"]
    told = [words[at + 1] for at, word in enumerate(words) if word == "--runtime"]
    assert told == values["runtime"]["addresses"]


def test_plain_http_is_for_probes_unless_peers_are_named(tmp_path) -> None:
    closed = with_values("blink-dpu", tmp_path, {"plainHttp": {"enabled": True}})
    assert rules_for(one(closed, "NetworkPolicy"), "http") == []
    peers = [{"podSelector": {"matchLabels": {"app": "gateway"}}}]
    open_ = with_values("blink-dpu", tmp_path, {"plainHttp": {"enabled": True, "peers": peers}})
    assert [rule["from"] for rule in rules_for(one(open_, "NetworkPolicy"), "http")] == [peers]


@EVERY
def test_policies_services_and_budgets_mean_the_pods(case: Case) -> None:
    found = rendered(case)
    (pod,) = pods(found)
    labels = pod["metadata"]["labels"].items()
    for each in found:
        spec = each.get("spec", {})
        selector = {
            "NetworkPolicy": lambda spec=spec: spec["podSelector"]["matchLabels"],
            "PodDisruptionBudget": lambda spec=spec: spec["selector"]["matchLabels"],
            "Service": lambda spec=spec: spec["selector"],
        }.get(each["kind"])
        if selector:
            assert selector().items() <= labels
        if each["kind"] == "Service":
            ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in spec["ports"]} <= ports


def test_certificates_name_roles() -> None:
    front = one(rendered("blink-dpu.full"), "Certificate", "-control")["spec"]
    assert (front["uris"], front["usages"]) == (["spiffe://blink/role/front-end"], ["digital signature", "client auth"])
    gpu = rendered("blink-gpu.full")
    assert one(gpu, "Certificate", "-reader")["spec"]["uris"] == ["spiffe://blink/role/reader"]
    server = one(gpu, "Certificate", "-control")["spec"]
    assert "client auth" not in server["usages"]
    assert {"localhost", "gpu.internal"} <= set(server["dnsNames"])


def test_the_readiness_probe_calls_with_a_readers_certificate() -> None:
    (pod,) = pods(rendered("blink-gpu.full"))
    (container,) = pod["spec"]["containers"]
    command = container["readinessProbe"]["exec"]["command"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert command[command.index("--cert") + 1] == f"{mounts['reader-tls']}/tls.crt"
    assert volumes["reader-tls"]["secret"]["secretName"] == "acme-blink-gpu-reader"
    assert command[-2:] == ["health", "llama"]


def test_one_runtime_a_node_unless_told_otherwise() -> None:
    def spread(case: str) -> list[Object]:
        (pod,) = pods(rendered(case))
        affinity = pod["spec"].get("affinity", {})
        return affinity.get("podAntiAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])

    (term,) = spread("blink-gpu.full")
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert spread("blink-gpu.insecure") == []


def test_the_static_pod_is_privileged_and_says_why() -> None:
    (pod,) = objects(STATIC_POD.read_text())
    (container,) = pod["spec"]["containers"]
    assert container["securityContext"] == {"privileged": True, "readOnlyRootFilesystem": True}
    assert "privileged: true    # for /dev/infiniband" in STATIC_POD.read_text()
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert "@sha256:" in container["image"]
    assert {"livenessProbe", "readinessProbe", "resources"} <= container.keys()
    # A kubelet by itself knows none of these.
    assert not {"secret", "configMap", "projected"} & {key for volume in pod["spec"]["volumes"] for key in volume}
