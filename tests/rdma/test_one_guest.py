"""The contract of transports over real verbs: one guest, one Soft-RoCE device, both ends in it, by either binding."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from blink_proto.rdma.binding import BindingMissingError
from blink_proto.rdma.pyverbs_package import load_pyverbs
from tests.rdma.guest import Guest, amd64

SECONDS = 500
ONLY_PLAYED = 15
"""Tests that look into the stand-in for a device, and that have it alone."""
KINDS = ("verbs", "verbs-pyverbs")
CONTRACT = """\
ip addr add 10.9.0.1/24 dev dummy0 && ip link set dummy0 up && rdma link add rxe0 type rxe netdev dummy0 || exit 90
ip link add quiet type veth peer name nobody && ip addr add 10.8.0.1/24 dev quiet && ip link set quiet up || exit 91
ip link set nobody up && rdma link add rxe1 type rxe netdev quiet && export BLINK_RDMA_QUIET_ADDRESS=10.8.0.1 || exit 92
$PYTHON -m pytest tests/transport {transports} --ignore tests/transport/doca --confcutdir=tests/transport \\
  --timeout 120 --color=no -vv \\
  -p no:cacheprovider -p no:schemathesis -p no:hypothesispytest -p no:anyio
"""


def why_no_pyverbs() -> str:
    """Why the guest, which has this machine's packages, cannot use it."""
    try:
        load_pyverbs()
    except BindingMissingError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def said() -> Iterator[str]:
    """What the guest said when all was done."""
    kinds = KINDS[:1] if why_no_pyverbs() else KINDS
    guest = Guest(amd64(), CONTRACT.format(transports=" ".join(f"--transport {kind}" for kind in kinds)))
    try:
        guest.wait(SECONDS)
        yield guest.said()
    finally:
        guest.stop()


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("kind", KINDS)
def test_the_contract_holds_over_soft_roce(kind: str, said: str) -> None:
    if kind != KINDS[0] and (reason := why_no_pyverbs()):
        pytest.skip(reason)
    outcomes = re.findall(rf"::\w+\[{kind}(?!-py)[^\]]*\] (\w+)", said)
    assert set(outcomes) <= {"PASSED", "SKIPPED"}, said[-8000:]
    assert outcomes.count("SKIPPED") <= ONLY_PLAYED
    assert len(outcomes) >= 40, "the guest ran fewer tests than there are"
    assert re.search(r"= \d+ passed\b", said) is not None, said[-3000:]
