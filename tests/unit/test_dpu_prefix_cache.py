"""What clients see of the device's prefix cache: cached tokens in `usage`, and who shares with whom."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from dpu_service.api.salt import cache_salt
from tests.front_end import FrontEnd, front_end
from tests.replay import Script, Submission
from tests.tiny_text import ids

MODEL = "tiny"
LONG = list(range(2, 52))
"""A prompt of three full blocks and two tokens more."""


def finds(front: FrontEnd, found: Callable[[Submission], int]) -> None:
    front.device.script = lambda submission: Script(ids("fine"), found=found(submission))


def ask(front: FrontEnd, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": LONG, "max_tokens": 4, **fields}
    return httpx.post(front.http + "/v1/completions", json=body, headers=headers, timeout=20)


def cached(answer: httpx.Response) -> Any:
    return answer.json()["usage"].get("prompt_tokens_details")


# usage


def test_cached_tokens_are_told(front: FrontEnd) -> None:
    finds(front, lambda submission: 3)
    assert cached(ask(front)) == {"cached_tokens": 48}


def test_nothing_is_told_where_nothing_was_cached(front: FrontEnd) -> None:
    finds(front, lambda submission: 0)
    assert cached(ask(front)) is None


def test_cached_tokens_of_several_prompts_are_summed(front: FrontEnd) -> None:
    other = [*LONG[:16], *range(100, 130)]
    finds(front, lambda submission: 3 if submission.prompt == tuple(LONG) else 1)
    answer = ask(front, prompt=[LONG, other])
    assert cached(answer) == {"cached_tokens": 48 + 16}
    assert answer.json()["usage"]["prompt_tokens"] == 50 + 46


def test_a_prompt_that_one_of_its_choices_had_to_compute_was_not_cached(front: FrontEnd) -> None:
    """It counts once in `prompt_tokens`, and so what all choices found counts once."""
    found = iter([1, 3, 2])
    finds(front, lambda submission: next(found))
    assert cached(ask(front, n=3)) == {"cached_tokens": 16}


def test_cached_tokens_in_the_usage_of_a_stream(front: FrontEnd) -> None:
    finds(front, lambda submission: 2)
    answer = ask(front, stream=True, stream_options={"include_usage": True})
    last = json.loads(answer.text.strip().split("\n\n")[-2].removeprefix("data: "))
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


def test_more_cached_tokens_than_there_are_is_the_devices_fault(front: FrontEnd) -> None:
    finds(front, lambda submission: 4)
    assert ask(front).status_code == 500


# salts


def salt_of(front: FrontEnd, **fields: Any) -> int:
    assert ask(front, **fields).status_code == 200
    return front.device.submissions[-1].cache_salt


def test_without_tenants_only_a_salt_of_the_request_keeps_prompts_apart(front: FrontEnd) -> None:
    front.device.script = lambda submission: Script(ids("fine"))
    assert salt_of(front) == salt_of(front, cache_salt="") == salt_of(front, cache_salt=None) == 0
    first, again, other = (salt_of(front, cache_salt=text) for text in ("one", "one", "two"))
    assert first == again
    assert len({0, first, other}) == 3


def test_all_choices_have_the_salt(front: FrontEnd) -> None:
    front.device.script = lambda submission: Script(ids("fine"))
    salt = salt_of(front, cache_salt="one", n=3)
    assert [each.cache_salt for each in front.device.submissions[-3:]] == [salt] * 3


@pytest.mark.parametrize("value", [5, True, ["x"], {}])
def test_a_salt_is_a_text(front: FrontEnd, value: Any) -> None:
    answer = ask(front, cache_salt=value)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")


def test_tenants_share_with_nobody_else(tmp_path: Path) -> None:
    """A tenant's name and a request's salt are not the same, and no other pair of the two makes the same salt."""
    file = tmp_path / "keys.toml"
    digests = {name: hashlib.sha256(f"sk-{name}".encode()).hexdigest() for name in ("alpha", "alphab")}
    file.write_text("".join(f'[tenants.{name}]\nkeys = ["sha256:{digest}"]\n' for name, digest in digests.items()))
    with front_end("--workers", "1", "--api-keys", str(file)) as front:
        front.device.script = lambda submission: Script(ids("fine"))
        asked = [("alpha", None), ("alpha", "b"), ("alphab", None), ("alpha", "alphab"), ("alphab", "alpha")]
        salts = [
            salt_of(front, headers={"authorization": f"Bearer sk-{name}"}, cache_salt=salt) for name, salt in asked
        ]
        assert len({0, *salts}) == 1 + len(asked)
        assert salt_of(front, headers={"authorization": "Bearer sk-alpha"}) == salts[0]


def test_salts_by_hand() -> None:
    """SHA-256 of both texts, each behind its length in eight bytes; the first eight bytes, little-endian."""
    said = b"\x05\0\0\0\0\0\0\0alpha" + b"\x03\0\0\0\0\0\0\0one"
    assert cache_salt("alpha", "one") == int.from_bytes(hashlib.sha256(said).digest()[:8], "little")
    assert cache_salt("", None) == cache_salt("", "") == 0
    assert cache_salt("", "\ud800") not in (0, cache_salt("", "?"))
