"""Every command line in deploy/ is one that the programs take."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import blink_deploy.ctl
import blink_deploy.main
import dpu_service.main
import gpu_runtime.main
from gpu_runtime.config import make_config
from tests.deploy.charts import ALL, DEPLOY, Case, Object, arguments_of, objects, pods, rendered, run_helm

EVERY = pytest.mark.parametrize("case", ALL.values(), ids=ALL)


def _gpu_command() -> Any:
    app = typer.Typer(add_completion=False)
    app.command()(gpu_runtime.main.run)
    return typer.main.get_command(app)


COMMANDS: dict[str, Any] = {
    "blink-gpu": _gpu_command(),
    "blink-dpu": typer.main.get_command(dpu_service.main.app),
    "blink": typer.main.get_command(blink_deploy.main.app),
    "blinkctl": typer.main.get_command(blink_deploy.ctl.app),
}


def parsed(program: str, arguments: list[str]) -> dict[str, Any]:
    """The options as the program understands them; an error of its own when it would not."""
    return COMMANDS[program].make_context(program, list(arguments)).params


def command_line(container: Object) -> tuple[str, list[str]]:
    """Program and arguments, with variables in their places and without what puts in an address."""
    words = [*container["command"], *container.get("args", [])]
    if words[:3] == ["python", "-m", "blink_deploy.on_link"]:
        words = ["192.0.2.7" if word == "@link" else word for word in words[4:]]
    variables = {entry["name"]: entry.get("value", "192.0.2.9") for entry in container.get("env", [])}
    return words[0], [re.sub(r"\$\((\w+)\)", lambda match: variables[match.group(1)], word) for word in words[1:]]


@EVERY
def test_charts_use_options_that_exist(case: Case) -> None:
    for pod in pods(rendered(case)):
        for container in pod["spec"]["containers"]:
            program, arguments = command_line(container)
            if program == "blink":
                assert arguments[0] == "up"
                COMMANDS["blink"].commands["up"].make_context("up", arguments[1:])
                continue
            assert parsed(program, arguments)
            for word in arguments:
                assert "$(" not in word


def test_the_init_container_uses_options_that_exist() -> None:
    (pod,) = pods(rendered("blink-gpu.full"))
    (container,) = pod["spec"]["initContainers"]
    program, subcommand, _, *rest = container["command"]
    assert (program, subcommand) == ("hf", "download")
    hf = Path(sys.executable).with_name("hf")
    said = subprocess.run([hf, "download", "--help"], capture_output=True, text=True, check=True).stdout
    assert all(word in said for word in rest if word.startswith("--"))


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("blink-single")])
def test_notes_tell_a_preflight_that_can_be_run(name: str) -> None:
    case = ALL[name]
    done = run_helm("4", "install", "acme", *arguments_of(case), "--dry-run=client", "--namespace", "serving")
    (line,) = [line for line in done.stdout.splitlines() if " doctor " in line]
    program, *words = shlex.split(line.partition(" -- ")[2])
    context = COMMANDS[program].make_context(program, words)
    _, command, rest = COMMANDS[program].resolve_command(
        context, [*getattr(context, "_protected_args", []), *context.args]
    )
    told = command.make_context("doctor", rest, parent=context).params
    (container,) = pods(rendered(case))[0]["spec"]["containers"]
    wanted = parsed(*command_line(container))
    by_interface = "blink_deploy.on_link" in container["command"]
    assert told["role"] == case.chart.removeprefix("blink-")
    assert told["transport"] == wanted["transport"]
    address = re.sub(r"\$\(\w+\)", "192.0.2.9", told["rdma_address"])
    assert address == ("" if by_interface else wanted["rdma_address"])
    assert f"acme-{case.chart}" in line
    if case.chart == "blink-dpu":
        given = context.params
        assert (given["ca"], given["cert"], given["key"]) == tuple(
            wanted[f"runtime_{part}"] for part in ("ca", "cert", "key")
        )
        assert re.sub(r"\$\(\w+\)", "192.0.2.9", given["runtime"]) == wanted["runtime"][0]
        assert told["https_cert"] == wanted["tls_cert"]
        assert given["insecure"] == wanted["runtime_insecure"]
        assert given["server_name"] == wanted["runtime_server_name"]


def unit_command() -> list[str]:
    """What the systemd unit starts."""
    text = (DEPLOY / "systemd" / "blink-dpu.service").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    return line.split()


def test_the_unit_uses_options_that_exist() -> None:
    program, *arguments = unit_command()
    options = parsed(Path(program).name, arguments)
    assert (options["rdma_address"], options["transport"]) == ("192.168.200.2", "verbs")
    # The same front end as the static pod's.
    (pod,) = objects((DEPLOY / "static-pod" / "blink-dpu.yaml").read_text())
    other = parsed(*command_line(pod["spec"]["containers"][0]))
    assert {name for name in options if options[name] != other[name]} == {"data_dir"}


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    program, *_ = unit_command()
    text = (DEPLOY / "systemd" / "blink-dpu.service").read_text()
    unit = tmp_path / "blink-dpu.service"

    def verify(content: str) -> tuple[int, str]:
        unit.write_text(content.replace(program, sys.executable))
        done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
        return done.returncode, "".join(line for line in done.stderr.splitlines() if str(unit) in line)

    assert verify(text) == (0, "")
    assert verify(text.replace("LimitMEMLOCK=infinity", "LimitMEMLOCK=much"))[1] != ""
    assert "TimeoutStopSec=55" in text  # grace 30, unready 5, and 20 as the chart gives


def test_the_static_pod_uses_options_that_exist() -> None:
    (pod,) = objects((DEPLOY / "static-pod" / "blink-dpu.yaml").read_text())
    program, arguments = command_line(pod["spec"]["containers"][0])
    assert parsed(program, arguments)["rdma_address"] == "192.168.200.2"


def test_a_wrong_option_is_noticed() -> None:
    for arguments in (["--no-such-option", "1"], ["--channels", "65"]):
        with pytest.raises(Exception, match=r"No such option|less than or equal to 64"):
            parsed("blink-gpu", arguments)


def test_probes_call_blinkctl_as_it_is() -> None:
    (pod,) = pods(rendered("blink-gpu.full"))
    program, *arguments = pod["spec"]["containers"][0]["readinessProbe"]["exec"]["command"]
    context = COMMANDS[program].make_context(program, arguments)
    name, command, rest = COMMANDS[program].resolve_command(
        context, [*getattr(context, "_protected_args", []), *context.args]
    )
    assert name == "health"
    assert command.make_context(name, rest, parent=context).params["service"] == "llama"


def test_values_arrive_at_the_programs() -> None:
    gpu = parsed(*command_line(pods(rendered("blink-gpu.full"))[0]["spec"]["containers"][0]))
    wanted = {
        "device": "cuda", "listen": "0.0.0.0:50051", "model": "/models/llama", "name": "llama", "dtype": "bfloat16",
        "memory_share": 0.85, "kv_tokens": 400000, "token_budget": 512, "max_running": 128, "max_sequences": 512,
        "max_model_tokens": 8192, "channels": 16, "lease_timeout": 10.0, "grace": 60.0, "transport": "verbs",
        "rdma_device": "mlx5_2", "insecure": False, "client_ca": "/etc/blink/control/ca.crt",
    }  # fmt: skip
    assert {name: gpu[name] for name in wanted} == wanted
    dpu = parsed(*command_line(pods(rendered("blink-dpu.full"))[0]["spec"]["containers"][0]))
    wanted = {
        "https": "0.0.0.0:8443", "http": "0.0.0.0:8000", "workers": 6, "tls_min_version": "1.3", "transport": "doca",
        "tls_client_ca": "/etc/blink/client-ca/ca.crt", "api_keys": "/etc/blink/keys/keys.toml", "access_log": False,
        "tool_parser": "hermes", "runtime_ca": "/etc/blink/control/ca.crt", "runtime_insecure": False,
        "runtime": ["192.0.2.9.link.internal:50051", "192.0.2.9.link.internal:50052"],
    }  # fmt: skip
    assert {name: dpu[name] for name in wanted} == wanted


def test_the_default_is_a_gpu_that_is_reached_by_rdma() -> None:
    """And `blink-gpu` takes that choice, as far as it can be judged without device and adapter."""
    options = parsed(*command_line(pods(rendered("blink-gpu.defaults"))[0]["spec"]["containers"][0]))
    choices = ("channels", "memory_share", "rdma_device", "rdma_address")
    config = make_config(
        options["device"],
        transports=tuple(options["transport"].split(",")),
        **{name: options[name] for name in choices},
    )
    assert (config.device, config.transports, config.rdma_address) == ("cuda", ("verbs",), "192.168.200.1")
    assert config.uses_rdma
    assert not config.serves_local


@pytest.mark.parametrize("case", ["blink-gpu.defaults", "blink-dpu.defaults"])
def test_the_programs_trust_each_other_by_certificates_unless_told_otherwise(case: str) -> None:
    options = parsed(*command_line(pods(rendered(case))[0]["spec"]["containers"][0]))
    assert not options.get("insecure")
    assert not options.get("runtime_insecure")
    assert options.get("client_ca") or options.get("runtime_ca")


def test_channels_suffice_for_the_workers() -> None:
    gpu = parsed(*command_line(pods(rendered("blink-gpu.defaults"))[0]["spec"]["containers"][0]))
    dpu = parsed(*command_line(pods(rendered("blink-dpu.defaults"))[0]["spec"]["containers"][0]))
    assert gpu["channels"] >= dpu["workers"]


def test_mounted_files_are_those_that_the_options_name() -> None:
    for name, case in ALL.items():
        (pod,) = pods(rendered(case))
        (container,) = pod["spec"]["containers"]
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        for word in container["args"]:
            if word.startswith("/"):
                assert any(word.startswith(f"{mount}/") for mount in mounts) or "/models" in word, (name, word)
