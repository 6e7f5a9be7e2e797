"""The binding over DOCA's libraries: what it calls, in which order, with which arguments, what it says of errors."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blink_proto import arena
from blink_proto.doca import context
from blink_proto.doca.blobs import Answer, BlobError, ChannelKeys, Offer
from blink_proto.doca.constants import Access
from blink_proto.doca.device import Device
from blink_proto.doca.errors import DocaError, DocaUnavailableError, status_name
from blink_proto.doca.library import DocaLibrary, load_doca
from blink_proto.doca.memory import Mmap, Place
from blink_proto.doca.settings import DocaSettings
from dpu_service.transport.base import Range, TransportError
from dpu_service.transport.doca import session
from dpu_service.transport.doca.connector import DocaConnector
from dpu_service.transport.doca.session import HEAD_READS, READS, WRITES
from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.registration.doca import DocaRegistrar
from gpu_runtime.registration.handover import PAGE, Exported, send_regions
from gpu_runtime.registration.memory import HostMemory, LentMemory
from tests.transport.doca.pair import INBOUND, OUTBOUND, SIZES, Pair, settings

MADE = {
    "doca_dev_open": "doca_dev_close",
    "doca_devinfo_create_list": "doca_devinfo_destroy_list",
    "doca_pe_create": "doca_pe_destroy",
    "doca_rdma_create": "doca_rdma_destroy",
    "doca_mmap_create": "doca_mmap_destroy own",
    "doca_mmap_create_from_export": "doca_mmap_destroy imported",
    "doca_buf_inventory_create": "doca_buf_inventory_destroy",
    "doca_buf_inventory_buf_get_by_args": "doca_buf_dec_refcount",
}


class Trace:
    """What the libraries were called for."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self) -> list[str]:
        """The calls since the last time."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    monkeypatch.setenv("DOCA_SHIM_TRACE", str(tmp_path / "trace"))
    return Trace(tmp_path / "trace")


@pytest.fixture
def pair(doca_shim: Path) -> Iterator[Pair]:
    made = Pair(doca_shim)
    yield made
    made.close()


@pytest.fixture
def library(doca_shim: Path) -> DocaLibrary:
    return load_doca(str(doca_shim))


def without_repeats(lines: list[str]) -> list[str]:
    """Function names; what is called several times in a row once."""
    names = [line.split()[0] for line in lines]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def test_a_front_end_calls_in_the_order_of_the_samples(doca_shim: Path, pair: Pair, trace: Trace):
    connector = DocaConnector(settings(doca_shim))
    assert trace.take() == [
        "doca_devinfo_create_list",
        "doca_dev_open mlx5_2",
        "doca_devinfo_destroy_list",
        "doca_pe_create",
        "doca_pe_get_notification_handle",
        "doca_rdma_create",
        "doca_pe_connect_ctx",
        "doca_rdma_set_permissions 6",
        "doca_rdma_set_transport_type 0",
        "doca_rdma_set_max_num_connections 1",
        "doca_rdma_set_gid_index 3",
        f"doca_rdma_task_write_set_conf {WRITES}",
        f"doca_rdma_task_read_set_conf {READS + HEAD_READS}",
        f"doca_rdma_set_send_queue_size {WRITES + READS + HEAD_READS}",
        "doca_rdma_set_connection_state_callbacks no requests",
        "doca_ctx_set_user_data 0",
        "doca_ctx_start",
        "doca_rdma_export",
    ]
    registration = pair.registrar.register(connector.offer, (1,))
    trace.take()
    transport = connector.connect(registration.answer, SIZES, 1)
    calls = without_repeats(trace.take())
    assert calls[:3] == ["doca_rdma_connect", "doca_mmap_create_from_export", "doca_mmap_get_memrange"]
    assert [name for name in calls[3:] if name not in ("doca_mmap_create_from_export", "doca_mmap_get_memrange")][
        :8
    ] == [
        "doca_mmap_create",
        "doca_mmap_set_memrange",
        "doca_mmap_set_permissions",
        "doca_mmap_add_dev",
        "doca_mmap_start",
        "doca_buf_inventory_create",
        "doca_buf_inventory_start",
        "doca_buf_inventory_buf_get_by_args",
    ]
    transport.close()
    assert without_repeats(trace.take()) == [
        "doca_ctx_stop",
        "idle",
        "doca_rdma_destroy",
        "doca_buf_dec_refcount",
        "doca_buf_inventory_stop",
        "doca_buf_inventory_destroy",
        "doca_mmap_destroy",
        "doca_pe_destroy",
        "doca_dev_close",
    ]
    registration.revoke()


def test_a_runtime_exports_with_the_least_rights_and_takes_all_back(doca_shim: Path, pair: Pair, trace: Trace):
    connector = DocaConnector(settings(doca_shim))
    trace.take()
    registration = pair.registrar.register(connector.offer, (0, 2))
    calls = trace.take()
    inbound, outbound = pair.arena.inbound.ctypes.data, pair.arena.outbound.ctypes.data
    ranges = [(outbound, OUTBOUND.channels_offset)]
    for channel in (0, 2):
        ranges.append((inbound + INBOUND.channel_offset(channel), INBOUND.channel_bytes))
        ranges.append((outbound + OUTBOUND.channel_offset(channel), OUTBOUND.channel_bytes))
    expected = [f"doca_mmap_set_memrange {address:#x} {size}" for address, size in ranges]
    assert [call for call in calls if call.startswith("doca_mmap_set_memrange")] == expected
    rights = [call.split()[1] for call in calls if call.startswith("doca_mmap_set_permissions")]
    write, read = str(Access.LOCAL_READ_WRITE + Access.RDMA_WRITE), str(int(Access.RDMA_READ))
    assert rights == [read, write, read, write, read]
    assert without_repeats(calls)[-3:] == ["doca_ctx_start", "doca_rdma_export", "doca_rdma_connect"]
    registration.revoke()
    assert without_repeats(trace.take()) == [
        "doca_ctx_stop",
        "idle",
        "doca_rdma_destroy",
        "doca_pe_destroy",
        "doca_mmap_destroy",
        "doca_dev_close",
    ]
    registration.revoke()
    assert trace.take() == []
    connector.close()


def test_device_memory_is_reached_through_its_dma_buf(doca_shim: Path, trace: Trace):
    sizes = arena.Sizes(channels=2, submit_slots=8, cancel_slots=8, log_slots=64, heap_tokens=1024)
    inbound, outbound = arena.InboundLayout(sizes), arena.OutboundLayout(sizes)
    addresses = 0x7F00_0000_0000, 0x7F00_0001_0000
    files = [os.memfd_create("device") for _ in addresses]
    for descriptor in files:
        os.ftruncate(descriptor, PAGE)
    memory = LentMemory(sizes)
    send_regions(memory.chain_end, *map(Exported, files, addresses, (PAGE, PAGE)))
    memory.receive(lambda: False)
    connector = DocaConnector(settings(doca_shim))
    trace.take()
    registration = DocaRegistrar(memory, sizes, settings(doca_shim)).register(connector.offer, (1,))
    set_ranges = [call.split()[2:] for call in trace.take() if call.startswith("doca_mmap_set_dmabuf_memrange")]
    into, out = inbound.channel_offset(1), outbound.channel_offset(1)
    assert set_ranges == [
        [hex(addresses[1]), "0", str(outbound.channels_offset)],
        [hex(addresses[0] + into), str(into), str(inbound.channel_bytes)],
        [hex(addresses[1] + out), str(out), str(outbound.channel_bytes)],
    ]
    transport = connector.connect(registration.answer, sizes, 1)
    transport.commit(into + 64, 0x0102030405060708)
    transport.flush(5)
    assert os.pread(files[0], 8, into + 64) == bytes(range(8, 0, -1))
    os.pwrite(files[1], b"12345678", out)
    ticket = transport.fetch(Range(out, 8))
    while not transport.fetched(ticket):
        time.sleep(0.001)
    assert transport.read(out, 8) == b"12345678"
    transport.close()
    registration.revoke()
    memory.close()
    for descriptor in files:
        os.close(descriptor)


def test_device_memory_that_is_not_there_is_refused(doca_shim: Path, trace: Trace):
    memory = LentMemory(SIZES)
    connector = DocaConnector(settings(doca_shim))
    trace.take()
    with pytest.raises(RegistrationError, match="not there"):
        DocaRegistrar(memory, SIZES, settings(doca_shim)).register(connector.offer, (0,))
    assert left(trace.take(), "") == {}
    memory.close()
    connector.close()


SET_UP = [
    "doca_devinfo_create_list",
    "doca_dev_open",
    "doca_pe_create",
    "doca_pe_get_notification_handle",
    "doca_rdma_create",
    "doca_pe_connect_ctx",
    "doca_rdma_set_permissions",
    "doca_rdma_set_transport_type",
    "doca_rdma_set_max_num_connections",
    "doca_rdma_set_gid_index",
    "doca_rdma_set_connection_state_callbacks",
    "doca_ctx_set_user_data",
    "doca_ctx_start",
    "doca_rdma_export",
    "doca_rdma_connect",
]
FRONT_END_ONLY = [
    "doca_rdma_task_write_set_conf",
    "doca_rdma_task_read_set_conf",
    "doca_rdma_set_send_queue_size",
    "doca_mmap_create_from_export",
    "doca_mmap_get_memrange",
    "doca_mmap_create",
    "doca_mmap_set_memrange",
    "doca_mmap_start",
    "doca_buf_inventory_create",
    "doca_buf_inventory_start",
    "doca_buf_inventory_buf_get_by_args",
    "doca_rdma_task_write_allocate_init",
    "doca_rdma_task_read_allocate_init",
]
RUNTIME_ONLY = [
    "doca_mmap_create",
    "doca_mmap_set_memrange",
    "doca_mmap_set_permissions",
    "doca_mmap_add_dev",
    "doca_mmap_start",
    "doca_mmap_export_rdma",
]


def left(calls: list[str], failed: str) -> dict[str, int]:
    """What was made and not given back; the failed call made nothing."""
    count = Counter(calls)
    short = Counter(call.split()[0] for call in calls)
    made = {
        name: short[name] - (1 if name == failed else 0) - _given_back(end, count, short) for name, end in MADE.items()
    }
    return {name: number for name, number in made.items() if number}


def _given_back(end: str, whole: Counter[str], first_words: Counter[str]) -> int:
    return whole[end] if " " in end else first_words[end]


@pytest.mark.parametrize("function", [*SET_UP, *FRONT_END_ONLY])
def test_a_front_end_that_fails_says_why_and_leaves_nothing(
    function: str, doca_shim: Path, pair: Pair, trace: Trace, monkeypatch: pytest.MonkeyPatch
):
    def connect() -> None:
        connector = DocaConnector(settings(doca_shim))
        try:
            monkeypatch.delenv("DOCA_SHIM_FAIL")
            trace_of_runtime.append(len(trace._path.read_text().splitlines()))
            registration = pair.registrar.register(connector.offer, (1,))
            trace_of_runtime.append(len(trace._path.read_text().splitlines()))
            pair._registrations.append(registration)
            monkeypatch.setenv("DOCA_SHIM_FAIL", f"{function}=17")
            connector.connect(registration.answer, SIZES, 1)
        finally:
            connector.close()

    trace_of_runtime: list[int] = []
    monkeypatch.setenv("DOCA_SHIM_FAIL", f"{function}=17")
    with pytest.raises(TransportError) as caught:
        connect()
    assert str(caught.value) == f"{function}: DOCA_ERROR_IO_FAILED (Input/Output Operation Failed)"
    calls = trace.take()
    if trace_of_runtime:
        del calls[trace_of_runtime[0] : trace_of_runtime[1]]
    assert left(calls, function) == {}


@pytest.mark.parametrize("function", [*SET_UP, *RUNTIME_ONLY])
def test_a_runtime_that_fails_says_why_and_leaves_nothing(
    function: str, doca_shim: Path, pair: Pair, trace: Trace, monkeypatch: pytest.MonkeyPatch
):
    connector = DocaConnector(settings(doca_shim))
    trace.take()
    monkeypatch.setenv("DOCA_SHIM_FAIL", f"{function}=17")
    with pytest.raises(RegistrationError, match=f"^{function}: DOCA_ERROR_IO_FAILED"):
        pair.registrar.register(connector.offer, (1,))
    assert left(trace.take(), function) == {}
    monkeypatch.delenv("DOCA_SHIM_FAIL")
    connector.close()


def test_errors_have_names(library: DocaLibrary):
    error = library.error("doca_mmap_start", 2)
    assert (error.call, error.status) == ("doca_mmap_start", 2)
    assert str(error) == "doca_mmap_start: DOCA_ERROR_NOT_PERMITTED (described by the shim)"
    assert [library.status_name(status) for status in (18, 99)] == ["DOCA_ERROR_BAD_STATE", "DOCA_ERROR_OTHER"]
    assert [status_name(i) for i in (0, 1, 31, 99)] == [
        "DOCA_SUCCESS",
        "DOCA_ERROR_UNKNOWN",
        "DOCA_ERROR_DEVICE_FATAL_ERROR",
        "DOCA_ERROR_99",
    ]


@pytest.mark.parametrize("name", ["mlx5_3", "enp3s0f1s0", "0000:03:00.2"])
def test_a_device_goes_by_any_of_its_names(name: str, library: DocaLibrary, trace: Trace):
    Device(library, DocaSettings(name)).close()
    assert "doca_dev_open mlx5_3" in trace.take()


def test_a_device_goes_by_its_address(library: DocaLibrary, trace: Trace):
    device = Device(library, DocaSettings(address="127.0.0.3"))
    assert device.gid_index == 3
    device.close()
    assert "doca_dev_open mlx5_3" in trace.take()


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (
            DocaSettings("mlx5_9"),
            "no device called 'mlx5_9'; it has: mlx5_0/p0/0000:03:00.0 (no RDMA writes and reads), ",
        ),
        (DocaSettings("mlx5_0"), "no device called 'mlx5_0'"),
        (DocaSettings(address="10.0.0.1"), "no device with the RoCE v2 address 10.0.0.1"),
        (DocaSettings("mlx5_2", "127.0.0.3"), "no device called 'mlx5_2' and with the RoCE v2 address 127.0.0.3"),
        (DocaSettings(address="::1; x"), "'::1; x' is not an IP address"),
    ],
)
def test_says_which_devices_there_are(wanted: DocaSettings, said: str, library: DocaLibrary):
    with pytest.raises(DocaUnavailableError) as caught:
        Device(library, wanted)
    assert said in str(caught.value)


def test_relaxed_ordering_is_refused(doca_shim: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLX5_RELAXED_PACKET_ORDERING_ON", "1")
    with pytest.raises(TransportError, match="relaxed ordering breaks the arena's contract"):
        DocaConnector(settings(doca_shim))
    with pytest.raises(RegistrationError, match="relaxed ordering"):
        DocaRegistrar(HostMemory(pair.arena), SIZES, settings(doca_shim))


def test_callbacks_live_until_the_context_is_idle_and_no_longer(doca_shim: Path, pair: Pair):
    transport, _ = pair.connect()
    kept = [weakref.ref(callback) for callback in transport._session._context._callbacks]
    assert len(kept) == 6
    gc.collect()
    assert all(callback() is not None for callback in kept)
    for word in range(300):
        transport.commit(INBOUND.channel_offset(1), word)
    transport.flush(5)
    assert pair.arena.inbound[INBOUND.channel_offset(1) :][:8].view("<u8")[0] == 299
    context = transport._session._context
    transport.close()
    gc.collect()
    assert not context._callbacks


def test_no_completion_is_lost_when_it_is_torn_down_in_the_midst(doca_shim: Path, pair: Pair, trace: Trace):
    transport, registration = pair.connect()
    trace.take()
    registration.revoke()
    transport.write(INBOUND.channel_offset(1), bytes(8) * 1000)
    with pytest.raises(TransportError):
        transport.flush(5)
    transport.close()
    calls = trace.take()
    submitted = Counter(call.split(" ", 1)[1] for call in calls if call.startswith("doca_task_submit"))
    done = Counter(call.rsplit(" ", 1)[0].replace("wrote", "write") for call in calls if call.startswith("wrote"))
    assert submitted == done


def test_what_the_device_does_not_take_back_is_left_with_its_callbacks(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """A context that may run is never without them and the memory that it writes, also when nobody else has it."""
    transport, _ = pair.connect()
    with monkeypatch.context() as patched:
        patched.setenv("DOCA_SHIM_FAIL", "doca_ctx_stop=17")
        transport.close()
    kept = transport._session
    assert kept._context._callbacks
    assert kept._context in context._not_idle
    assert session._left_behind == [kept]
    session._left_behind.clear()
    kept.close()
    assert not kept._context._callbacks


def test_local_memory_that_stays_keeps_nothing_else(pair: Pair, trace: Trace, monkeypatch: pytest.MonkeyPatch):
    transport, _ = pair.connect()
    trace.take()
    monkeypatch.setenv("DOCA_SHIM_FAIL", "doca_mmap_destroy=17")
    transport.close()
    assert {"doca_rdma_destroy", "doca_pe_destroy", "doca_dev_close"} <= set(trace.take())
    monkeypatch.undo()


def blocked_longest(work: Callable[[], None]) -> float:
    """Longest time for which a thread that wakes every millisecond was kept from running."""
    stop, longest = threading.Event(), [0.0]

    def tick() -> None:
        last = time.monotonic()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.monotonic()
            longest[0], last = max(longest[0], now - last), now

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        work()
    finally:
        stop.set()
        ticker.join()
    return longest[0]


def test_no_waiting_call_holds_the_interpreter_lock(doca_shim: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOCA_SHIM_RETRY_MS", "800")
    connector, other = DocaConnector(settings(doca_shim)), DocaConnector(settings(doca_shim))
    answer = pair.registrar.register(other.offer, (1,)).answer  # for somebody else: our end stays alone

    def work() -> None:
        with pytest.raises(TransportError, match="DOCA_ERROR_IO_FAILED"):
            connector.connect(answer, SIZES, 1)
        connector.close()

    started = time.monotonic()
    longest = blocked_longest(work)
    assert time.monotonic() - started > 0.7
    assert longest < 0.35
    other.close()


def test_a_context_that_runs_only_once_connected(doca_shim: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOCA_SHIM_START", "connect")
    transport, _ = pair.connect()
    transport.commit(INBOUND.channel_offset(1), 5)
    transport.flush(5)
    assert pair.arena.inbound[INBOUND.channel_offset(1)] == 5


def test_a_library_that_tells_of_no_connections(doca_shim: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOCA_SHIM_EVENTS", "0")
    transport, registration = pair.connect()
    transport.commit(INBOUND.channel_offset(1), 5)
    transport.flush(5)
    registration.revoke()
    transport.commit(INBOUND.channel_offset(1), 6)
    with pytest.raises(TransportError, match="a task failed with DOCA_ERROR_IO_FAILED"):
        transport.flush(5)


def test_memory_that_no_peer_could_reach_is_refused(doca_shim: Path, library: DocaLibrary):
    device = Device(library, settings(doca_shim))
    with pytest.raises(DocaError, match="doca_mmap_set_memrange: DOCA_ERROR_INVALID_VALUE"):
        Mmap.register(library, device, Place(4096, 0), Access.RDMA_READ)
    with pytest.raises(DocaError, match="doca_mmap_create_from_export"):
        Mmap.of_peer(library, device, b"no export")
    device.close()


def test_blobs_survive_the_way_and_print_nothing():
    answer = Answer(b"\x00connection", b"head", {7: ChannelKeys(b"planted-in", b"out\xff")})
    assert Answer.decode(answer.encode()) == answer
    offer = Offer(b"\x80planted-connection")
    assert Offer.decode(offer.encode()) == offer
    for thing in (answer, offer, answer.channels[7]):
        assert "planted" not in f"{thing} {thing!r} {[thing]}"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"version": 2, "connection": "YQ=="}',
        b'{"version": 1}',
        b'{"version": 1, "connection": 5}',
        b'{"version": 1, "connection": "%%%"}',
        b'{"version": 1, "connection": ""}',
        b"[" * 100_000,
        b'{"version": 1, "connection": "' + b"A" * (1 << 20) + b'"}',
    ],
)
def test_bad_offers_are_refused_without_being_quoted(raw: bytes, pair: Pair):
    with pytest.raises(BlobError):
        Offer.decode(raw)
    with pytest.raises(RegistrationError, match="the offer is not one of the doca transport") as caught:
        pair.registrar.register(raw, (1,))
    assert "%%%" not in str(caught.value)


@pytest.mark.parametrize(
    "channels", [5, {"x": ["YQ==", "YQ=="]}, {"1": ["YQ=="]}, {"1": "YQ=="}, {"99999": ["YQ==", "YQ=="]}]
)
def test_bad_channels_are_refused(channels: object):
    import json

    raw = json.dumps({"version": 1, "connection": "YQ==", "head": "YQ==", "channels": channels}).encode()
    with pytest.raises(BlobError):
        Answer.decode(raw)


def test_a_runtime_without_doca_says_so(pair: Pair, tmp_path: Path):
    with pytest.raises(RegistrationError, match="DOCA is not installed"):
        DocaRegistrar(HostMemory(pair.arena), SIZES, settings(tmp_path))
    with pytest.raises(TransportError, match="DOCA is not installed"):
        DocaConnector(settings(tmp_path))
