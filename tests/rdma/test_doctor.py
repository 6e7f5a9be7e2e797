"""`blinkctl doctor` on a machine with an RDMA device: a guest with Soft-RoCE, with the kernel's own files."""

from __future__ import annotations

import json
import re

import pytest

from tests.rdma.guest import Guest, amd64

SECONDS = 300
SCRIPT = """\
ip addr add 10.9.0.1/24 dev dummy0 && ip link set dummy0 mtu 1500 up || exit 90
rdma link add rxe0 type rxe netdev dummy0 || exit 90
$PYTHON -m blink_deploy.ctl -o json doctor --role dpu --rdma-address 10.9.0.1 >/mnt/out/there.json
[ $? = 1 ] || exit 91
$PYTHON -m blink_deploy.ctl -o json doctor --role dpu --rdma-address 10.9.0.7 >/mnt/out/absent.json
[ $? = 1 ] || exit 92
"""


@pytest.mark.timeout(SECONDS + 60)
def test_a_device_is_seen() -> None:
    guest = Guest(amd64(), SCRIPT)
    try:
        assert guest.wait(SECONDS) == 0, guest.said()[-3000:]
        there, absent = (json.loads((guest.out / f"{name}.json").read_text()) for name in ("there", "absent"))
    finally:
        guest.stop()
    found = {each["name"]: each for each in there["checks"]}
    seen = {name: (each["result"], each["seen"]) for name, each in found.items()}
    assert seen["rdma-devices"][0] == "ok"
    assert re.match(r"rxe0/1 ACTIVE, Ethernet, ", seen["rdma-devices"][1])
    assert seen["rdma-files"] == ("ok", "uverbs0")
    assert seen["rdma-modules"] == ("warn", "rdma_rxe alone: RDMA in software")
    assert seen["rdma-verbs"][0] == "ok"
    assert "ibverbs sees rxe0" in seen["rdma-verbs"][1]
    assert seen["rdma-address"][0] == "ok"
    assert re.fullmatch(r"10\.9\.0\.1 is rxe0 index \d, RoCE v2", seen["rdma-address"][1])
    assert seen["rdma-mtu"] == ("warn", "dummy0 1500")
    assert seen["private-link"] == ("ok", "dummy0 has 10.9.0.1, a private address, and no default route")
    assert seen["control-plane"][0] == "fail", "there is no runtime"
    missed = {each["name"]: each for each in absent["checks"]}
    assert missed["rdma-address"]["seen"] == "no device has 10.9.0.7; there are 10.9.0.1"
    assert missed["private-link"]["result"] == "warn"
