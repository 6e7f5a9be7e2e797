"""`blinkctl doctor` as people and scripts call it, on this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from blink_deploy.doctor.checks import CHECKS
from blink_deploy.doctor.site import Part
from tests.control import ctl, make_certificates, secure_runtime
from tests.deploy.charts import DEPLOY, ROOT
from tests.deploy.doctor.driver.build import build_driver
from tests.deploy.test_options import COMMANDS
from tests.tiny import save_tiny
from tests.transport.doca.build import build_shim, shim_folder
from tests.transport.kinds import KINDS

GUIDE = (DEPLOY / "GUIDE.md").read_text()


def checks(*arguments: str, status: int, **environment: str) -> dict[str, dict[str, Any]]:
    """What it says in JSON."""
    said = json.loads(ctl("-o", "json", *arguments, status=status, **environment).stdout)
    assert said.keys() == {"role", "transport", "checks"}
    assert all(each.keys() == {"name", "result", "seen", "todo"} for each in said["checks"])
    return {each["name"]: each for each in said["checks"]}


def test_the_guide_explains_every_check_and_no_other() -> None:
    table = GUIDE.partition("## 3. Preflight")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| ([GDS, ]+) \|", table, re.MULTILINE)
    letters = {Part.GPU: "G", Part.DPU: "D", Part.SINGLE: "S"}
    wanted = [(check.name, ", ".join(letters[part] for part in Part if part in check.parts)) for check in CHECKS]
    assert rows == wanted


def test_a_machine_for_trying_out() -> None:
    """Whatever this machine has: nothing that the soft GPU needs may be missing."""
    said = ctl("doctor", "--role", "single").stdout
    assert "role single, transport shm" in said
    for check in CHECKS:
        assert (check.name in said) is (Part.SINGLE in check.parts)


def test_a_gpus_host_by_its_libraries(tmp_path: Path) -> None:
    """NVIDIA's and DOCA's libraries are stand-ins; the rest is this machine, which has no RDMA."""
    environment = {"LD_LIBRARY_PATH": str(build_driver(tmp_path, 1))}
    arguments = ["doctor", "--role", "gpu", "--transport", "doca", "--rdma-address", "127.0.0.1"]
    found = checks(*arguments, "--doca-libraries", str(shim_folder()), status=1, **environment)
    assert list(found) == [check.name for check in CHECKS if Part.GPU in check.parts]
    assert {name: found[name]["result"] for name in ("gpu-driver", "gpu-dma-buf", "gpu-write-order", "rdma-doca")} == {
        "gpu-driver": "ok", "gpu-dma-buf": "ok", "gpu-write-order": "ok", "rdma-doca": "ok",
    }  # fmt: skip
    assert found["gpu-driver"]["seen"] == "CUDA 13.1, NVIDIA Stand-in 0 (compute 9.0, 0000:1a:00.0)"
    assert found["gpu-clocks"]["result"] == "warn"
    assert "hardware slowdown" in found["gpu-clocks"]["seen"]
    assert found["gpu-bar1"]["seen"] == "NVIDIA Stand-in: BAR1 512 MiB"
    assert found["rdma-doca"]["seen"].startswith("DOCA 3.3.0109,")
    assert found["rdma-devices"]["result"] == "fail"
    lacking = build_shim(tmp_path / "lacking", "-Ddoca_mmap_create_from_export=gone")
    found = checks("doctor", "--role", "dpu", "--transport", "doca", "--doca-libraries", str(lacking), status=1)
    assert found["rdma-doca"]["result"] == "fail"
    assert "doca_mmap_create_from_export" in found["rdma-doca"]["seen"]


def test_with_a_runtime(tmp_path: Path) -> None:
    """A machine that serves, with certificates; `--strict` counts what it is warned of."""
    folder, model = make_certificates(tmp_path / "certs"), str(save_tiny(tmp_path / "model", "llama"))
    with secure_runtime(folder, tmp_path, "--model", model, "--name", "tiny", "--threads", "1") as runtime:
        told = ["--runtime", runtime.address, "--certs", str(folder), "--role", "reader"]
        found = checks(*told, "doctor", "--role", "single", status=0)
        for name in ("certificates", "control-plane", "arena"):
            assert found[name]["result"] == "ok", found[name]
        assert "serving tiny; 8 of 8 channels free" in found["arena"]["seen"]
        warned = any(each["result"] == "warn" for each in found.values())
        table = ctl(*told, "doctor", "--role", "single", "--strict", status=int(warned))
    for path in folder.glob("*.pem"):
        for line in path.read_text().splitlines():
            assert line not in table.stdout + table.stderr + json.dumps(found), "nothing out of the files is told"


def test_secrets_of_the_environment_stay_there() -> None:
    said = ctl(
        "doctor", "--role", "dpu", status=1, HF_TOKEN="hf_do_not_tell", BLINK_KEY="", AWS_SECRET="aws_do_not_tell"
    )
    assert "do_not_tell" not in said.stdout + said.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--role", "tpu"], "tpu"), (["--transport", "tcp"], "tcp"), (["--rdma-address", "here"], "here")],
)
def test_wrong_usage(arguments: list[str], words: str) -> None:
    assert words in ctl("doctor", *arguments, status=2).stderr


def test_the_way_to_check_doca_exists() -> None:
    """What the front end's page tells to run on a BlueField."""
    text = (ROOT / "dpu_service" / "README.md").read_text()
    block = text.partition("To check it there")[2].partition("\n## ")[0]
    lines = [line.partition("#")[0].strip() for line in block.splitlines() if line.startswith("    ")]
    (told,) = [line for line in lines if "blinkctl doctor" in line]
    words = told.partition("doctor")[2].replace("ADDRESS", "192.0.2.1").split()
    options = COMMANDS["blinkctl"].commands["doctor"].make_context("doctor", words).params
    assert (options["role"], options["transport"], options["rdma_address"]) == ("dpu", "doca", "192.0.2.1")
    (suite,) = [line for line in lines if "pytest" in line]
    assert suite.endswith("pytest tests/transport --transport doca")
    assert "doca" in KINDS
    assert suite.split("=")[0] in (ROOT / "tests" / "transport" / "kinds.py").read_text()
