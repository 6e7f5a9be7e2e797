"""Keys and limits of tenants: the parts by themselves, and a front end that guards every route."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from blink_proto.arena import Finish
from dpu_service.api.access import duration
from dpu_service.api.app import ROUTES
from dpu_service.tenants.account import Account, OverLimitError, TooLargeForLimitError
from dpu_service.tenants.bucket import Bucket
from dpu_service.tenants.file import KeysFile
from dpu_service.tenants.page import CounterPage, Word, create
from dpu_service.tenants.tenant import Limits, Tenant
from tests import tiny_text
from tests.front_end import ROOT, FrontEnd, eventually, front_end, launch
from tests.raw_http import body, dial, post, read_until
from tests.replay import Script

CLIENT = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=20)
"""Making one takes long; without kept connections each request may reach another worker."""
FOREVER = tiny_text.byte_ids(b"x" * 200)
COMPLETIONS = "/v1/completions"


def key_of(name: str) -> str:
    return f"blink-test-key-of-{name}"


def table(name: str, *lines: str) -> str:
    digest = hashlib.sha256(key_of(name).encode()).hexdigest()
    return "\n".join([f"[tenants.{name}]", f'keys = ["sha256:{digest}"]', *lines, ""])


def auth(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key_of(name)}"}


def test_bucket_against_a_plain_account() -> None:
    """One minute's worth at once, then evenly; several readers of one sum agree."""
    first, second = Bucket(600, 600, 0, 0.0), Bucket(600, 600, 0, 0.0)
    charged, left = 0, 600.0
    for step in range(1, 400):
        now = step * 0.5
        left = min(600.0, left + 5.0)
        wanted = (step * 37) % 23
        assert first.look(charged, now) == pytest.approx(left)
        charged += wanted
        left -= wanted
        if step % 2 == 0:
            assert abs(second.look(charged, now) - left) <= 10.0, "a second's worth"
    assert first.look(charged + 1200, 200.0) < 0, "answers may take more than was foreseen"
    assert first.seconds_until(1) == pytest.approx((1 - (left - 1200 + 5.0)) / 10, abs=1.0)


def account_pair(**limits: int) -> tuple[Account, Account]:
    """One tenant at two workers."""
    page = CounterPage(create(2), 2)
    tenant = Tenant(name="t", slot=3, digests=[], limits=Limits(**limits))
    return Account(tenant, page, 0), Account(tenant, page, 1)


def test_workers_see_each_other() -> None:
    one, two = account_pair(concurrent_sequences=4, queued_sequences=3)
    ticket = one.enter(2, 5, 10)
    with pytest.raises(OverLimitError):
        two.enter(2, 5, 10)
    ticket.started()
    ticket.started()
    other = two.enter(2, 5, 10)
    with pytest.raises(OverLimitError):
        one.check()
    with pytest.raises(TooLargeForLimitError):
        one.check(sequences=5)
    ticket.close(7)
    other.close(7)
    one.enter(3, 0, 0).close(0)


def test_tokens_are_foreseen_and_settled() -> None:
    one, two = account_pair(tokens_per_minute=1000, requests_per_minute=3)
    ticket = one.enter(1, 300, 600)
    assert [(rate.what, rate.limit, rate.left) for rate in two.rates()] == [("requests", 3, 2), ("tokens", 1000, 100)]
    with pytest.raises(OverLimitError) as over:
        two.enter(1, 300, 600)
    assert over.value.what == "tokens"
    assert over.value.seconds == pytest.approx(800 * 60 / 1000, abs=1)
    ticket.close(310)
    assert two.rates()[1].left in (690, 691)
    two.enter(1, 300, 300).close(None)
    assert two.rates()[1].left in (690, 691, 692), "a request that is not served costs nothing"
    one.enter(1, 1, 1).close(1)
    one.enter(1, 1, 1).close(1)
    with pytest.raises(OverLimitError) as over:
        two.check()
    assert over.value.what == "requests"


def test_a_worker_that_starts_later_knows_what_is_left() -> None:
    page = CounterPage(create(2), 2)
    tenant = Tenant(name="t", slot=0, digests=[], limits=Limits(tokens_per_minute=6000))
    Account(tenant, page, 0).enter(1, 5000, 500)
    first = Account(tenant, page, 0)
    first.tick()
    for worker in (0, 1):
        (rate,) = Account(tenant, page, worker).rates()
        assert rate.left <= 1600, "6,000 a minute are 100 a second"
    debt = first.enter(1, 1, 1)
    debt.close(9000)
    first.tick()
    with pytest.raises(OverLimitError) as over:
        Account(tenant, page, 1).check()
    assert over.value.seconds == pytest.approx(85, abs=3)


def test_a_dead_worker_is_forgotten() -> None:
    page = CounterPage(create(2), 2)
    page.add(0, 3, Word.RUNNING, 2)
    page.add(1, 3, Word.RUNNING, 5)
    page.add(1, 3, Word.TOKENS, 70)
    page.forget_worker(1)
    assert page.total(3, Word.RUNNING) == 2
    assert page.total(3, Word.TOKENS) == 70


def test_durations() -> None:
    assert [duration(s) for s in (0, 0.0201, 1, 1.55, 360, 61.04)] == ["0ms", "21ms", "1s", "1.6s", "6m0s", "1m1s"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "tenants = {}",
        "not toml",
        "[tenants.a]\n",
        '[tenants.a]\nkeys = ["blink-a-key-in-the-clear"]\n',
        '[tenants.a]\nkeys = ["sha256:1234"]\n',
        table("a", "tokens_per_minute = 0"),
        table("a", 'tokens_per_minute = "many"'),
        table("a", "tokens_per_hour = 5"),
        table("a") + table("a").replace("tenants.a", "tenants.b"),
        table("a").replace("tenants.a", 'tenants."a b"'),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"\w") as refused:
        KeysFile(str(file)).read()
    assert "in-the-clear" not in str(refused.value)


def test_names_keep_their_slots(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    keys = KeysFile(str(file))
    file.write_text(table("a") + table("b"))
    assert [(tenant.name, tenant.slot) for tenant in keys.read()] == [("a", 0), ("b", 1)]
    file.write_text(table("c") + table("b"))
    assert [(tenant.name, tenant.slot) for tenant in keys.read()] == [("c", 2), ("b", 1)]


def test_the_command_that_makes_a_key(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    command = [sys.executable, "-m", "dpu_service.main", "keys", "new", "--tenant"]

    def run(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, name], capture_output=True, text=True, env=environment, timeout=30)

    said = run("acme.eu").stdout
    key = re.search(r"blink-[A-Za-z0-9_-]{43}", said)
    assert key is not None
    file = tmp_path / "keys.toml"
    file.write_text(said[said.index("[tenants") :])
    (tenant,) = KeysFile(str(file)).read()
    assert tenant.name == "acme.eu"
    assert tenant.digests == [hashlib.sha256(key[0].encode()).digest()]
    assert key[0] not in file.read_text()
    assert run("a b").returncode == 2


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    write_tenants(file)
    return file


def write_tenants(file: Path, *more: str) -> None:
    """As a whole, by renaming."""
    tables = [
        table("free"),
        table("operator", "metrics = true"),
        table("narrow", "concurrent_sequences = 4"),
        table("short", "queued_sequences = 2"),
        table("metered", "tokens_per_minute = 600", "requests_per_minute = 100"),
        *more,
    ]
    draft = file.with_suffix(".draft")
    draft.write_text("".join(tables))
    draft.replace(file)


@pytest.fixture(scope="module")
def shared(keys_file: Path) -> Iterator[FrontEnd]:
    with front_end("--workers", "2", "--api-keys", str(keys_file)) as running:
        yield running


@pytest.fixture
def front(shared: FrontEnd) -> Iterator[FrontEnd]:
    shared.device.script = lambda s: Script([*tiny_text.ids("ok"), tiny_text.special(tiny_text.END)])
    yield shared
    shared.device.taking = True
    eventually(lambda: shared.device.playing == 0)
    log = shared.log.read_text()
    assert "blink-test-key" not in log, "no key in any log"


def ask(front: FrontEnd, name: str, **fields: Any) -> httpx.Response:
    return CLIENT.post(front.http + COMPLETIONS, content=body(**fields), headers=auth(name))


@pytest.mark.parametrize("path", [*ROUTES, "/v1/models/tiny", "/no/such/path", "/", "/health/", "//health"])
def test_every_route_needs_a_key_except_probes(front: FrontEnd, path: str) -> None:
    method = ROUTES[path][0] if path in ROUTES else "GET"
    content = body() if method == "POST" else None
    for given in (
        {},
        {"Authorization": f"Bearer {key_of('nobody')}"},
        {"Authorization": f"Basic {key_of('free')}"},
        {"Authorization": "Bearer"},
        {"Authorization": key_of("free")},
        {"Authorization": "Bearer " + "a" * 5000},
        {"X-Api-Key": key_of("free")},
    ):
        answer = CLIENT.request(method, front.http + path, content=content, headers=given)
        if path in ("/health", "/ready"):
            assert answer.status_code == 200
            continue
        assert answer.status_code == 401, given
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"].startswith("Bearer")
    answer = CLIENT.request(method, front.http + path, content=content, headers=auth("operator"))
    assert answer.status_code not in (401, 403)
    known = path in ROUTES or path.startswith("/v1/models/")
    assert (answer.status_code == 404) == (not known)


def test_any_method_needs_a_key(front: FrontEnd) -> None:
    for method in ("HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"):
        assert CLIENT.request(method, front.http + COMPLETIONS).status_code == 401


def test_metrics_are_for_those_who_may(front: FrontEnd) -> None:
    assert CLIENT.get(front.http + "/metrics", headers=auth("free")).status_code == 403
    assert CLIENT.get(front.http + "/metrics", headers=auth("operator")).status_code == 200


def test_the_scheme_is_written_in_any_case(front: FrontEnd) -> None:
    given = {"Authorization": f"bEARER  {key_of('free')}"}
    assert CLIENT.get(front.http + "/v1/models", headers=given).status_code == 200


def test_the_access_log_names_the_tenant(front: FrontEnd) -> None:
    assert ask(front, "free").status_code == 200

    def logged() -> bool:
        lines = [json.loads(line) for line in front.log.read_text().splitlines()]
        return any(line.get("tenant") == "free" and line.get("status") == 200 for line in lines)

    eventually(logged)


def test_keys_are_reloaded_and_a_bad_file_changes_nothing(front: FrontEnd, keys_file: Path) -> None:
    assert ask(front, "late").status_code == 401
    write_tenants(keys_file, table("late"))
    eventually(lambda: all(ask(front, "late").status_code == 200 for _ in range(8)))
    keys_file.write_text("[tenants.late]\nkeys = [\n")
    eventually(lambda: b"kept the old API keys" in front.log.read_bytes())
    assert all(ask(front, "late").status_code == 200 for _ in range(8))
    write_tenants(keys_file)
    eventually(lambda: all(ask(front, "late").status_code == 401 for _ in range(8)))
    assert ask(front, "free").status_code == 200


def test_concurrency_is_of_all_workers(front: FrontEnd) -> None:
    front.device.script = lambda s: Script(FOREVER, Finish.NONE, every=0.05)
    streams = []
    for _ in range(2):
        raw = dial(front.http)
        raw.sendall(post(body(stream=True, n=2), f"Authorization: Bearer {key_of('narrow')}"))
        assert b"200 OK" in read_until(raw, b"data: ")
        streams.append(raw)
    for _ in range(8):  # whichever worker it reaches
        answer = ask(front, "narrow")
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(answer.headers["retry-after"]) >= 1
    text = CLIENT.get(front.http + "/metrics", headers=auth("operator")).text
    assert re.search(r'blink_tenant_refusals_total\{limit="requests",tenant="narrow"\} \d', text)
    for raw in streams:
        raw.close()
    front.device.script = lambda s: Script([1])
    eventually(lambda: ask(front, "narrow").status_code == 200)
    too_many = ask(front, "narrow", n=5)
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")


def test_the_queue_of_a_tenant_leaves_room_for_others(front: FrontEnd) -> None:
    front.device.taking = False
    raw = dial(front.http)
    raw.sendall(post(body(n=2), f"Authorization: Bearer {key_of('short')}"))
    time.sleep(0.3)
    assert [ask(front, "short").status_code for _ in range(4)] == [429] * 4
    front.device.taking = True
    assert read_until(raw, b"}]").startswith(b"HTTP/1.1 200")
    assert ask(front, "free").status_code == 200


def test_a_worker_that_dies_takes_its_counts_with_it(front: FrontEnd) -> None:
    front.device.script = lambda s: Script(FOREVER, Finish.NONE, every=0.05)
    raw = dial(front.http)
    raw.sendall(post(body(stream=True, n=4), f"Authorization: Bearer {key_of('narrow')}"))
    read_until(raw, b"}")
    eventually(lambda: front.device.playing == 0 or ask(front, "narrow").status_code == 429)
    before = front.workers()
    for pid in before:
        os.kill(pid, 9)
    front.device.script = lambda s: Script([1])

    def served() -> bool:
        try:
            return ask(front, "narrow").status_code == 200
        except httpx.HTTPError:
            return False

    eventually(served, timeout=20)
    eventually(lambda: len(front.workers()) == 2 and not set(before) & set(front.workers()), timeout=20)
    eventually(lambda: all(ready_on_some_worker(front) for _ in range(12)), timeout=20)


def ready_on_some_worker(front: FrontEnd) -> bool:
    """Over a connection of its own, so that the kernel chooses the worker."""
    return httpx.get(front.http + "/ready").status_code == 200


def test_tokens_by_the_minute(front: FrontEnd) -> None:
    front.device.script = lambda s: Script(FOREVER[:100], Finish.NONE)
    answer = ask(front, "metered", max_tokens=100, prompt=[1] * 50)
    assert answer.status_code == 200
    assert answer.headers["x-ratelimit-limit-tokens"] == "600"
    assert 440 <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 451, "150 were foreseen"
    assert re.fullmatch(r"\d+(\.\d)?s", answer.headers["x-ratelimit-reset-tokens"])
    assert answer.headers["x-ratelimit-limit-requests"] == "100"
    statuses = [ask(front, "metered", max_tokens=100, prompt=[1] * 50).status_code for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429], "600 tokens are used, and a minute gives 600 more"
    over = ask(front, "metered", max_tokens=100, prompt=[1] * 50)
    assert over.json()["error"]["type"] == "tokens"
    assert 1 <= int(over.headers["retry-after"]) <= 15
    assert over.headers["x-ratelimit-remaining-tokens"].isdigit()
    assert ask(front, "free", max_tokens=5).headers.get("x-ratelimit-limit-tokens") is None


def test_ten_times_the_capacity_at_once(keys_file: Path) -> None:
    """What is too much is refused at once, with a time to try again, and the rest is served."""
    with front_end("--workers", "1", "--api-keys", str(keys_file), "--queue-depth", "8") as front:
        front.device.script = lambda s: Script(FOREVER[:5], Finish.STOP, delay=1.0)
        connections = [dial(front.http) for _ in range(80)]
        for raw in connections:
            raw.sendall(post(body(), f"Authorization: Bearer {key_of('free')}"))
        answers: list[bytes] = [b""] * 80

        def read(at: int) -> None:
            answers[at] = read_until(connections[at], b"\r\n\r\n")

        readers = [threading.Thread(target=read, args=(at,)) for at in range(80)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        served = [one for one in answers if one.startswith(b"HTTP/1.1 200")]
        refused = [one for one in answers if one.startswith(b"HTTP/1.1 503")]
        assert (len(served), len(refused)) == (8, 72)
        assert all(b"retry-after: " in one for one in refused)
        time.sleep(0.2)
        lines = [json.loads(line) for line in front.log.read_text().splitlines()]
        seconds = sorted(line["seconds"] for line in lines if line.get("status") == 503)
        assert len(seconds) == 72
        assert seconds[64] < 0.05, "from a request's arrival to its refusal; the last ones may meet another process"


def test_without_keys_a_warning_says_so_and_bad_files_end_the_start(tmp_path: Path) -> None:
    with front_end("--workers", "1") as front:
        assert CLIENT.get(front.http + "/v1/models").status_code == 200
        assert CLIENT.get(front.http + "/metrics").status_code == 200
        assert "whoever reaches this address may use it" in front.log.read_text()
    (tmp_path / "bad.toml").write_text("[tenants]\n")
    for path in ("/nowhere", str(tmp_path / "bad.toml")):
        process, log = launch(1, tmp_path, "--api-keys", path)
        assert process.wait(20) == 2
        assert "cannot use the file of API keys" in log.read_text().replace("\n", " ")


def test_metrics_may_be_opened(keys_file: Path) -> None:
    with front_end("--workers", "1", "--api-keys", str(keys_file), "--open-metrics") as front:
        assert CLIENT.get(front.http + "/metrics").status_code == 200
        assert CLIENT.get(front.http + "/v1/models").status_code == 401
