"""The contract of transports over real verbs: one guest, one Soft-RoCE device, both ends in it."""

from __future__ import annotations

import re

import pytest

from tests.rdma.guest import Guest, amd64

SECONDS = 400
CONTRACT = """\
ip addr add 10.9.0.1/24 dev dummy0 && ip link set dummy0 up && rdma link add rxe0 type rxe netdev dummy0 || exit 90
$PYTHON -m pytest tests/transport --transport verbs --confcutdir=tests/transport --timeout 120 --color=no -v \
  -p no:cacheprovider -p no:schemathesis -p no:hypothesispytest -p no:anyio
"""


@pytest.mark.timeout(SECONDS + 60)
def test_the_contract_holds_over_soft_roce() -> None:
    guest = Guest(amd64(), CONTRACT)
    try:
        status = guest.wait(SECONDS)
        said = guest.said()
        assert status == 0, said[-8000:]
        passed = re.search(r"(\d+) passed", said)
        assert passed is not None, said[-2000:]
        assert int(passed[1]) >= 40, "the guest ran fewer tests than there are"
        assert re.search(r"\d+ skipped", said) is None
    finally:
        guest.stop()
