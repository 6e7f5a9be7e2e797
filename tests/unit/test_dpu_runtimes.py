"""One front end before several runtimes: the real processes over scripted devices."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from openai import OpenAI

from blink_proto.arena import DeviceState, Finish
from tests import tiny_text
from tests.front_end import MODEL, FrontEnd, eventually, front_end, make_device
from tests.raw_http import dial, post, read_until
from tests.replay import ReplayControl, ReplayDevice, Script

FOREVER = tiny_text.byte_ids(b"x" * 200)
END = tiny_text.special(tiny_text.END)
UNKNOWN = {**tiny_text.files(), "chat_template.jinja": b"{{ messages[0].content }} and something else"}


@dataclass
class Second:
    """The runtime behind a front end's own one."""

    device: ReplayDevice
    control: ReplayControl


@contextmanager
def pair(
    *flags: str, model: str = MODEL, window: int = 256, files: dict[str, bytes] | None = None, late: bool = False
) -> Iterator[tuple[FrontEnd, Second]]:
    """A front end of one worker before two runtimes, of which at least one is ready.

    Args:
        model, window, files: of the second one.
        late: it has no model yet.
    """
    device = make_device(window=window)
    control = ReplayControl(model, files or tiny_text.files(), None if late else device)
    try:
        address = f"127.0.0.1:{control.start()}"
        with front_end("--workers", "1", "--runtime", address, *flags) as front:
            yield front, Second(device, control)
    finally:
        control.stop()
        device.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FrontEnd, Second]]:
    with pair("--device-timeout", "2", "--queue-depth", "32") as (front, second):
        eventually(lambda: unready(front) == {})
        yield front, second


@pytest.fixture
def both(shared: tuple[FrontEnd, Second]) -> Iterator[tuple[FrontEnd, Second]]:
    front, second = shared
    says(front.device, "first")
    says(second.device, "second")
    yield shared
    for device in (front.device, second.device):
        device.taking, device.state = True, DeviceState.RUNNING
    eventually(lambda: unready(front) == {} and front.device.playing == second.device.playing == 0)
    for device in (front.device, second.device):
        assert device.channels[0].protocol_errors == 0
        device.submissions.clear()


def says(device: ReplayDevice, text: str, **how: Any) -> None:
    device.script = lambda s: Script([*tiny_text.ids(text), END], **how)


def unready(front: FrontEnd) -> dict[str, str] | None:
    """Which runtimes are not ready and why; None where none is."""
    answer = httpx.get(front.http + "/ready")
    return answer.json().get("unready", {}) if answer.status_code == 200 else None


def complete(front: FrontEnd, **fields: Any) -> httpx.Response:
    return httpx.post(front.http + "/v1/completions", content=body(**fields), timeout=20)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 100, **fields}).encode()


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def metric(front: FrontEnd, name: str) -> float:
    for line in httpx.get(front.http + "/metrics").text.splitlines():
        if line.startswith(name + " "):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def open_streams(front: FrontEnd, count: int) -> list[Any]:
    """So many, of which each has an event already."""
    found = []
    for number in range(count):
        raw = dial(front.http)
        raw.sendall(post(body(prompt=[65 + number], stream=True)))
        read_until(raw, b"data: ")
        found.append(raw)
    return found


def test_other_models_are_served_side_by_side() -> None:
    with pair(model="another", window=128) as (front, second):
        says(front.device, "first")
        says(second.device, "second")
        eventually(lambda: unready(front) == {})
        client = OpenAI(base_url=front.http + "/v1", api_key="-")
        assert sorted(one.id for one in client.models.list()) == ["another", MODEL]
        assert client.models.retrieve("another").model_dump()["max_model_len"] == 128
        for _ in range(3):
            assert text_of(complete(front)) == "first"
            assert text_of(complete(front, model="another")) == "second"
        assert complete(front, model="third").status_code == 404
        assert complete(front, model="another", prompt=[7] * 100).status_code == 400
        assert complete(front, prompt=[7] * 100).status_code == 200
        tokens = {"model": "another", "prompt": "hi"}
        assert httpx.post(front.http + "/tokenize", json=tokens).json()["max_model_len"] == 128
        second.device.state = DeviceState.FAILED
        eventually(lambda: unready(front) == {"1": "failed"})
        gone = complete(front, model="another")
        assert gone.status_code == 503
        assert gone.headers["retry-after"] == "1"
        assert gone.json()["error"]["code"] == "not_ready"
        assert text_of(complete(front)) == "first"


def test_distinct_prompts_are_spread_and_shared_beginnings_are_not(both: tuple[FrontEnd, Second]) -> None:
    front, second = both
    for number in range(20):
        complete(front, prompt=[200 + number] * 40)
    assert [len(one.device.submissions) for one in (front, second)] == [10, 10]
    front.device.submissions.clear()
    second.device.submissions.clear()
    before = metric(front, 'blink_runtime_requests_total{chosen="prefix",runtime="0"}')
    before += metric(front, 'blink_runtime_requests_total{chosen="prefix",runtime="1"}')
    stems = [[100 + stem] * 64 for stem in range(4)]
    homes: dict[int, set[str]] = {}
    for turn in range(5):
        for stem, beginning in enumerate(stems):
            answer = complete(front, prompt=beginning + [300 + turn] * 20)
            homes.setdefault(stem, set()).add(text_of(answer))
    assert all(len(homes[stem]) == 1 for stem in range(4))
    assert Counter(next(iter(homes[stem])) for stem in range(4)) == {"first": 2, "second": 2}
    after = metric(front, 'blink_runtime_requests_total{chosen="prefix",runtime="0"}')
    after += metric(front, 'blink_runtime_requests_total{chosen="prefix",runtime="1"}')
    assert after - before == 16


def test_conversations_stay_where_they_are_whichever_worker_takes_them() -> None:
    with pair("--workers", "2") as (front, second):
        eventually(lambda: [one.device.channels[1].live for one in (front, second)] == [True, True])
        says(front.device, "first")
        says(second.device, "second")
        homes: dict[int, set[str]] = {}
        workers: dict[int, set[int]] = {}
        for turn in range(200):  # connections are new; which worker takes one is up to the kernel
            number = turn % 4
            prompt = [100 + number] * (48 + 16 * (turn // 4 % 8))
            homes.setdefault(number, set()).add(text_of(complete(front, prompt=prompt, max_tokens=50)))
            for asked in [*front.device.submissions, *second.device.submissions]:
                workers.setdefault(asked.prompt[-1] - 100, set()).add(asked.channel)
            if turn >= 32 and all(len(found) == 2 for found in workers.values()):
                break
        assert all(len(found) == 2 for found in workers.values())
        assert all(len(found) == 1 for found in homes.values())


def test_the_sequences_of_a_request_stay_together(both: tuple[FrontEnd, Second]) -> None:
    front, second = both
    assert len(complete(front, n=5, best_of=5).json()["choices"]) == 5
    assert complete(front, prompt=["one", "two", "three"], n=2).status_code == 200
    assert sorted(len(one.device.submissions) for one in (front, second)) == [5, 6]


def test_what_runs_counts_where_nothing_is_known(both: tuple[FrontEnd, Second]) -> None:
    """A busy runtime gets nothing until the other one is as busy."""
    front, second = both
    for device in (front.device, second.device):
        device.script = lambda s: Script(FOREVER, Finish.NONE, every=0.05)
    streams = open_streams(front, 1)
    busy, idle = (front, second) if front.device.playing else (second, front)
    streams += open_streams(front, 1)
    assert (busy.device.playing, idle.device.playing) == (1, 1)
    with httpx.Client(timeout=0.3) as client, pytest.raises(httpx.ReadTimeout):
        client.post(front.http + "/v1/completions", content=body(n=6, prompt=[9, 9]))
    for raw in streams:
        raw.close()


def test_one_that_is_full_leaves_requests_to_the_other(both: tuple[FrontEnd, Second]) -> None:
    front, second = both
    front.device.taking = False
    clients, answers = [], []

    def ask(**fields: Any) -> None:
        answers.append(complete(front, **fields))

    for _ in range(2):
        clients.append(threading.Thread(target=ask, kwargs={"n": 20}))
        clients[-1].start()
        time.sleep(0.2)
    eventually(lambda: metric(front, "blink_sequences_unsent") == 20)
    for _ in range(6):
        assert text_of(complete(front, n=13)) == "second", "the first one has room for 12 more only"
    second.device.taking = False
    for _ in range(2):
        clients.append(threading.Thread(target=ask, kwargs={"n": 12}))
        clients[-1].start()
        time.sleep(0.2)
    refused = complete(front, n=32)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "queue_full"
    assert refused.headers["retry-after"] == "1"
    front.device.taking = second.device.taking = True
    for client in clients:
        client.join()
    assert {answer.status_code for answer in answers} == {200}
    assert metric(front, "blink_sequences_unsent") == 0


@pytest.mark.parametrize("dies", ["first", "second"])
def test_a_runtime_that_dies_takes_its_own_streams_only(both: tuple[FrontEnd, Second], dies: str) -> None:
    front, second = both
    for device in (front.device, second.device):
        device.script = lambda s: Script(FOREVER[:80], Finish.STOP, every=0.05)
    streams = open_streams(front, 4)
    assert front.device.playing == second.device.playing == 2
    dead, living = (front, second) if dies == "first" else (second, front)
    dead.device.state = DeviceState.FAILED
    ends = [read_until(raw, b"0\r\n\r\n") for raw in streams]
    assert sorted(b'"code":"device_unavailable"' in end for end in ends) == [False, False, True, True]
    assert sorted(b'"finish_reason":"stop"' in end for end in ends) == [False, False, True, True]
    assert all(end.count(b"data: [DONE]") == 1 for end in ends)
    number = "0" if dies == "first" else "1"
    assert unready(front) == {number: "failed"}
    assert metric(front, f'blink_runtime_up{{runtime="{number}"}}') == 0
    assert metric(front, "blink_device_up") == 1
    assert metric(front, "blink_device_state") == DeviceState.FAILED
    living.device.submissions.clear()
    says(living.device, "alive")
    assert [text_of(complete(front, prompt=[65 + k])) for k in range(4)] == ["alive"] * 4
    assert metric(front, 'blink_runtime_requests_total{chosen="only",runtime="%s"}' % (1 - int(number))) >= 4


def ask_slowly(front: FrontEnd, **fields: Any) -> tuple[threading.Thread, list[httpx.Response]]:
    """A request whose answer somebody waits for."""
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(complete(front, **fields)))
    asking.start()
    return asking, answers


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_of_which_nothing_is_out_goes_to_another_runtime(both: tuple[FrontEnd, Second], stream: bool) -> None:
    """An answer that has begun unseen, a stream that has not. What the lost runtime made of it does not count."""
    front, second = both
    for device in (front.device, second.device):
        device.script = lambda s: Script([] if stream else FOREVER[:3], Finish.NONE)
    retries = metric(front, "blink_runtime_retries_total")
    asking, answers = ask_slowly(front, stream=stream, stream_options={"include_usage": True} if stream else None)
    eventually(lambda: front.device.playing + second.device.playing == 1)
    dead, living = (front, second) if front.device.playing else (second, front)
    says(living.device, "alive")
    dead.device.state = DeviceState.FAILED
    asking.join()
    assert answers[0].status_code == 200
    assert metric(front, "blink_runtime_retries_total") == retries + 1
    whole = answers[0].text if stream else json.dumps(answers[0].json())
    assert f'"completion_tokens":{len(tiny_text.ids("alive")) + 1}' in whole.replace(" ", "")
    assert "error" not in whole
    if not stream:
        assert text_of(answers[0]) == "alive"
    line = next(line for line in reversed(front.log.read_text().splitlines()) if '"/v1/completions"' in line)
    assert f'"runtime":"{int(living is second)}"' in line.replace(" ", "")


def test_a_request_is_not_tried_a_third_time(both: tuple[FrontEnd, Second]) -> None:
    """Though the first runtime is back when the second one is lost by it."""
    front, second = both
    for device in (front.device, second.device):
        device.script = lambda s: Script([], Finish.NONE)
    asking, answers = ask_slowly(front)
    eventually(lambda: front.device.playing + second.device.playing == 1)
    first, last = (front, second) if front.device.playing else (second, front)
    first.device.state = DeviceState.FAILED
    eventually(lambda: last.device.playing == 1)
    first.device.state = DeviceState.RUNNING
    eventually(lambda: unready(front) == {})
    last.device.state = DeviceState.FAILED
    asking.join()
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "device_unavailable"


def test_one_that_is_silent_is_avoided_before_it_counts_as_lost() -> None:
    with pair("--device-timeout", "30") as (front, second):
        eventually(lambda: unready(front) == {})
        says(front.device, "first")
        front.device.frozen = True
        says(second.device, "second")
        time.sleep(3)
        assert unready(front) == {}
        assert [text_of(complete(front, prompt=[65 + k])) for k in range(4)] == ["second"] * 4
        front.device.frozen = False
        eventually(lambda: "first" in {text_of(complete(front, prompt=[75 + k])) for k in range(4)})


def test_a_draining_runtime_gets_nothing_new(both: tuple[FrontEnd, Second]) -> None:
    front, second = both
    for device in (front.device, second.device):
        device.script = lambda s: Script(FOREVER[:30], Finish.STOP, every=0.05)
    streams = open_streams(front, 2)
    front.device.state = DeviceState.DRAINING
    eventually(lambda: unready(front) == {"0": "draining"})
    says(second.device, "second")
    assert [text_of(complete(front, prompt=[70 + k])) for k in range(3)] == ["second"] * 3
    for raw in streams:
        end = read_until(raw, b"0\r\n\r\n")
        assert b'"finish_reason":"stop"' in end
        assert b"error" not in end


def test_none_ready_is_not_ready(both: tuple[FrontEnd, Second]) -> None:
    front, second = both
    front.device.state = DeviceState.FAILED
    second.device.state = DeviceState.DRAINING
    eventually(lambda: unready(front) is None)
    answer = httpx.get(front.http + "/ready")
    assert answer.status_code == 503
    assert answer.json()["reason"] == "runtime 0: failed; runtime 1: draining"
    refused = complete(front)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert httpx.get(front.http + "/health").status_code == 200


def test_a_new_epoch_of_one_disturbs_no_other() -> None:
    with pair() as (front, second):
        eventually(lambda: unready(front) == {})
        for device in (front.device, second.device):
            device.script = lambda s: Script(FOREVER[:60], Finish.STOP, every=0.05)
        streams = open_streams(front, 2)
        of_second = next(k for k in range(2) if second.device.submissions[0].prompt[-1] == 65 + k)
        renewed = make_device(epoch=2)
        try:
            says(renewed, "new")
            second.control.put(renewed)
            assert b'data: {"error":{' in read_until(streams[of_second], b"0\r\n\r\n")
            assert b'"finish_reason":"stop"' in read_until(streams[1 - of_second], b"0\r\n\r\n")
            says(front.device, "old")
            eventually(lambda: unready(front) == {})
            assert {text_of(complete(front, prompt=[80 + k])) for k in range(4)} == {"new", "old"}
            assert len({request.front_end for request in second.control.opened}) == 1, "a stable name"
        finally:
            renewed.close()


def test_a_replica_that_is_another_model_is_refused_by_name_until_the_first_one_is_gone() -> None:
    with pair(files=UNKNOWN, late=True) as (front, second):
        assert unready(front) == {"1": "waiting for the GPU runtime to have a model"}
        second.control.put(second.device)
        said = "its model 'tiny' is not the one that runtime 0 serves by that name: other tokenizer"
        eventually(lambda: said in front.log.read_text())
        says(front.device, "first")
        says(second.device, "second")
        assert unready(front) == {"1": "waiting for the GPU runtime to have a model"}
        assert [text_of(complete(front, prompt=[65 + k])) for k in range(4)] == ["first"] * 4
        front.control.put(None)
        front.device.state = DeviceState.STOPPED
        eventually(lambda: unready(front) == {"0": "stopped"}, timeout=10)
        assert text_of(complete(front)) == "second"


def test_one_runtime_by_two_addresses_is_used_once() -> None:
    device = make_device()
    control = ReplayControl(MODEL, tiny_text.files(), device)
    port = control.start()
    try:
        with front_end("--workers", "1", "--runtime", f"127.0.0.1:{port}", "--runtime", f"localhost:{port}") as front:
            says(front.device, "first")
            says(device, "second")
            eventually(lambda: "by another address" in front.log.read_text())
            eventually(lambda: len(unready(front) or {}) == 1)
            time.sleep(2.5)  # it is tried again meanwhile
            assert sorted(one.lease for one in device.channels) == [0, 0, 0, 1], "nothing is taken from the one in use"
            assert {text_of(complete(front, prompt=[65 + k])) for k in range(4)} == {"first", "second"}
    finally:
        control.stop()
        device.close()


def test_requests_go_to_windows_that_they_fit() -> None:
    with pair(window=64) as (front, second):
        says(front.device, "long")
        says(second.device, "short")
        eventually(lambda: unready(front) == {})
        found = [text_of(complete(front, prompt=[65 + k] * 40, max_tokens=20)) for k in range(4)]
        assert sorted(found) == ["long", "long", "short", "short"]
        assert [text_of(complete(front, prompt=[75 + k] * 40, max_tokens=30)) for k in range(4)] == ["long"] * 4
        assert complete(front, prompt=[65] * 250, max_tokens=30).status_code == 400
        listed = httpx.get(front.http + "/v1/models").json()["data"]
        assert [(one["id"], one["max_model_len"]) for one in listed] == [(MODEL, 256)]


def test_workers_that_die_take_up_both() -> None:
    with pair("--workers", "2") as (front, second):
        eventually(lambda: [one.device.channels[1].live for one in (front, second)] == [True, True])
        first = front.workers()
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(set(front.workers()) - set(first)) == 2, timeout=10)
        for device in (front.device, second.device):
            eventually(lambda device=device: [one.lease for one in device.channels[:2]] == [2, 2], timeout=10)
        says(front.device, "first")
        says(second.device, "second")
        found = {text_of(complete(front, prompt=[65 + k])) for k in range(8)}
        assert found == {"first", "second"}


def test_the_end_lets_both_finish() -> None:
    with pair("--grace", "10") as (front, second):
        eventually(lambda: unready(front) == {})
        for device in (front.device, second.device):
            device.script = lambda s: Script(FOREVER[:60], Finish.STOP, every=0.05)
        streams = open_streams(front, 4)
        assert front.device.playing == second.device.playing == 2
        front.process.terminate()
        assert all(b'"finish_reason":"stop"' in read_until(raw, b"0\r\n\r\n") for raw in streams)
        assert front.process.wait(10) == 0
        assert not front.device.channels[0].live
        assert not second.device.channels[0].live


def test_log_and_gauges_tell_of_each(both: tuple[FrontEnd, Second]) -> None:
    front, second = both
    for device in (front.device, second.device):
        device.script = lambda s: Script(FOREVER, Finish.NONE, every=0.1)
    streams = open_streams(front, 4)
    eventually(lambda: metric(front, "blink_device_sequences_running") == 4)
    for number in "01":
        assert metric(front, f'blink_runtime_sequences_running{{runtime="{number}"}}') == 2
        assert metric(front, f'blink_runtime_kv_usage_ratio{{runtime="{number}"}}') == pytest.approx(0.02)  # of 100
        assert metric(front, f'blink_runtime_state{{runtime="{number}"}}') == DeviceState.RUNNING
    assert metric(front, "blink_device_kv_blocks") == 200
    assert metric(front, "blink_device_kv_usage_ratio") == pytest.approx(0.02)
    for raw in streams:
        raw.close()

    def logged() -> Counter[str]:
        lines = [json.loads(line) for line in front.log.read_text().splitlines() if line.startswith('{"time"')]
        return Counter([line["runtime"] for line in lines if "runtime" in line and "route" in line][-4:])

    eventually(lambda: logged() == {"0": 2, "1": 2})
