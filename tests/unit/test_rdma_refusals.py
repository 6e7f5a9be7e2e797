"""A device, or the package that it is called by, refuses at any point: by one kind of error, and nothing is lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from blink_proto.adapters import try_adapters
from blink_proto.links import LinkError
from blink_proto.rdma import with_ibverbs, with_pyverbs
from blink_proto.rdma.binding import Access, Device, RdmaError, open_device
from blink_proto.rdma.choice import RdmaChoice
from blink_proto.rdma.gids import gid_of, text_of
from blink_proto.rdma.wire import Endpoint
from dpu_service.transport.base import TransportError
from dpu_service.transport.verbs import giving_back
from dpu_service.transport.verbs.transport import VerbsConnector
from gpu_runtime.registration.grants import WRITABLE, RegionGrant, Wanted
from gpu_runtime.registration.parts import Part

ADDRESS = "10.86.71.54"
ALL = ["context", "domain", "channel", "queue", "pair", "region"]


class Package:
    """The parts of a package that are called, over a device of which everything can be refused."""

    def __init__(self) -> None:
        self.refused: dict[str, int] = {}
        """errno by what is refused."""
        self.open: list[str] = []

    def error(self, code: int) -> Exception:
        raise NotImplementedError

    def do(self, what: str) -> None:
        if what in self.refused:
            raise self.error(self.refused[what])

    def make(self, kind: str, **parts: Any) -> Any:
        self.do(f"make {kind}")
        self.open.append(kind)

        def close() -> None:
            assert kind in self.open, "closed twice"
            self.do(f"close {kind}")
            self.open.remove(kind)

        return SimpleNamespace(close=close, **parts)

    def query_port(self, port: int) -> Any:
        self.do("query_port")
        return SimpleNamespace(state=4, active_mtu=3, lid=0, gid_tbl_len=1)

    def channel(self) -> Any:
        return self.make("channel", fd=os.eventfd(0))

    def region(self) -> Any:
        return self.make("region", lkey=1, rkey=2)


class Ibverbs(Package):
    PortState = SimpleNamespace(ACTIVE=4)
    QPType = SimpleNamespace(RC=2)
    SendFlags = SimpleNamespace(SIGNALED=2, INLINE=8)
    QPInitAttr = SimpleNamespace

    def error(self, code: int) -> Exception:
        return OSError(code, os.strerror(code))

    def get_device_list(self) -> list[Any]:
        return [SimpleNamespace(name="mlx5_7", open=self._context)]

    def _context(self) -> Any:
        def query_gid(port: int, index: int) -> Any:
            return SimpleNamespace(raw=gid_of(ADDRESS))

        def create_comp_channel() -> Any:
            return self.channel()

        def create_cq(depth: int, channel: Any) -> Any:
            return self.make("queue")

        calls = (query_gid, create_comp_channel, create_cq, self._alloc_pd, self.query_port)
        return self.make("context", **{call.__name__.lstrip("_"): call for call in calls})

    def _alloc_pd(self) -> Any:
        def reg_mr(address: int, size: int, access: int) -> Any:
            return self.region()

        def create_qp(wanted: Any) -> Any:
            return self.make("pair", qp_num=7)

        return self.make("domain", reg_mr=reg_mr, create_qp=create_qp)


class PyverbsError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"Failed with secret 0xdecaf, Errno: {code}")
        self.error_code = code


class Pyverbs(Package):
    def __init__(self) -> None:
        super().__init__()
        flags = {"IBV_DEVICE_MEM_WINDOW_TYPE_2A": 1, "IBV_DEVICE_MEM_WINDOW_TYPE_2B": 2}
        self.enums = SimpleNamespace(IBV_PORT_ACTIVE=4, IBV_QPT_RC=2, **flags)
        self.pyverbs_error = SimpleNamespace(PyverbsError=PyverbsError, PyverbsRDMAError=PyverbsError)
        self.device = SimpleNamespace(get_device_list=self._devices, Context=self._context)
        self.pd = SimpleNamespace(PD=self._domain)
        self.cq = SimpleNamespace(CompChannel=self._channel, CQ=self._queue)
        self.qp = SimpleNamespace(QP=self._pair, QPCap=SimpleNamespace, QPInitAttr=lambda *a, **named: None)
        self.mr = SimpleNamespace(MR=self._region)

    def error(self, code: int) -> Exception:
        return PyverbsError(code)

    def _devices(self) -> list[Any]:
        return [SimpleNamespace(name=b"mlx5_7")]

    def _context(self, name: str) -> Any:
        def query_gid(port: int, index: int) -> str:
            return text_of(gid_of(ADDRESS))

        def query_device() -> Any:
            self.do("query_device")
            return SimpleNamespace(device_cap_flags=1)

        return self.make("context", query_gid=query_gid, query_device=query_device, query_port=self.query_port)

    def _domain(self, context: Any) -> Any:
        return self.make("domain")

    def _channel(self, context: Any) -> Any:
        return self.channel()

    def _queue(self, *arguments: Any) -> Any:
        return self.make("queue")

    def _pair(self, *arguments: Any) -> Any:
        return self.make("pair", qp_num=7)

    def _region(self, *arguments: Any, **named: Any) -> Any:
        return self.region()


@pytest.fixture(params=["ibverbs", "pyverbs"])
def binding(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def package(binding: str, monkeypatch: pytest.MonkeyPatch) -> Package:
    made: Package = Ibverbs() if binding == "ibverbs" else Pyverbs()
    monkeypatch.setattr(with_ibverbs, "ibverbs", lambda: made)
    monkeypatch.setattr(with_pyverbs, "load_pyverbs", lambda: made)
    return made


@pytest.fixture
def opened(binding: str, package: Package) -> Callable[[], Device]:
    return lambda: open_device("", ADDRESS, (binding,))


def test_a_device_that_may_not_be_opened_is_said_in_a_line(binding: str, package: Package) -> None:
    package.refused = {"make context": errno.EACCES}
    with pytest.raises(LinkError) as caught:
        try_adapters(["verbs"], RdmaChoice("", ADDRESS, binding))
    assert str(caught.value) == "RDMA cannot be used: the RDMA device mlx5_7 cannot be opened (Permission denied)"


@pytest.mark.parametrize("what", ["query_port", "query_device", "close context"])
def test_a_device_that_fails_at_its_start_or_end(what: str, binding: str, package: Package) -> None:
    if (what, binding) == ("query_device", "ibverbs"):
        pytest.skip("is not asked that way")
    package.refused = {what: errno.EIO}
    with pytest.raises(LinkError, match=r"failed \(Input/output error\)$"):
        try_adapters(["verbs"], RdmaChoice("", ADDRESS, binding))
    assert package.open == (["context"] if what == "close context" else [])


@pytest.mark.parametrize("kind", ALL[1:])
def test_what_cannot_be_made_leaves_nothing(kind: str, package: Package, opened: Callable[[], Device]) -> None:
    device = opened()
    package.refused = {f"make {kind}": errno.ENOMEM}
    with pytest.raises(RdmaError, match=r"failed \(Cannot allocate memory\)$"):
        _made_on(device)
    assert kind not in package.open
    if kind in ("channel", "queue", "pair"):
        assert package.open == ["context", "domain"]


def _made_on(device: Device) -> list[Any]:
    """One of everything, in the order of its closing."""
    domain = device.domain()
    pair = domain.queue_pair(1)
    return [domain.register(4096, 4096, Access.REMOTE_READ), pair, domain, device]


@pytest.mark.parametrize("kind", ALL)
def test_what_cannot_be_closed_says_so_and_is_closed_later(
    kind: str, package: Package, opened: Callable[[], Device]
) -> None:
    made = _made_on(opened())
    assert sorted(package.open) == sorted(ALL)
    package.refused = {f"close {kind}": errno.EBUSY}
    refused = []
    for one in made:
        try:
            one.close()
        except RdmaError as error:
            refused.append(str(error))
            package.refused = {}
            one.close()
    assert refused == ["close failed (Device or resource busy)"]
    assert package.open == []


class Memory:
    no_windows = ""

    def register(self, domain: Any, part: Part, access: Any) -> Any:
        return domain.register(4096, part.size, access)


def test_memory_that_stays_registered_loses_its_connection(
    package: Package, opened: Callable[[], Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    for queue_pair in (with_ibverbs.IbverbsQueuePair, with_pyverbs.PyverbsQueuePair):
        monkeypatch.setattr(queue_pair, "connect", lambda *arguments: None)
    device = opened()
    grant = RegionGrant(device, Memory(), [Wanted(Part(True, 0, 4096), WRITABLE)])
    grant.let_in(Endpoint(1, 1, gid_of(ADDRESS), 0, 3))
    package.refused = {"close region": errno.EBUSY, "close pair": errno.EIO}
    for _ in range(2):
        with pytest.raises(RdmaError, match="Input/output"):
            grant.void_keys()
        assert "pair" in package.open
    del package.refused["close pair"]
    grant.void_keys()
    assert package.open == ["context", "domain", "region"]
    package.refused = {}
    grant.close()
    device.close()
    assert package.open == []


def test_a_front_end_leaves_what_stays_with_what_lies_below(
    binding: str, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving_back, "_left_behind", [])
    choice = RdmaChoice("", ADDRESS, binding)
    package.refused = {"make pair": errno.ENOMEM, "close domain": errno.EBUSY}
    with pytest.raises(TransportError, match="Cannot allocate memory"):
        VerbsConnector(choice)
    assert (package.open, len(giving_back._left_behind)) == (["context", "domain"], 1)
    package.refused, package.open = {"close pair": errno.EBUSY}, []
    VerbsConnector(choice).close()
    assert sorted(package.open) == sorted(set(ALL) - {"region"})
    assert len(giving_back._left_behind) == 2
