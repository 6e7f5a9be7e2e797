"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests import tiny_text
from tests.front_end import MODEL, WINDOW, FrontEnd

HI = [{"role": "user", "content": "hi"}]


def post(front: FrontEnd, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(front.http + path, json=fields, timeout=20)


def tokenized(front: FrontEnd, **fields: Any) -> dict[str, Any]:
    answer = post(front, "/tokenize", **fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    assert set(body) == {"count", "max_model_len", "tokens", "token_strs"}
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), WINDOW)
    return body


def test_a_text(front: FrontEnd) -> None:
    ids = tiny_text.ids("hello there 😀")
    bos = tiny_text.special(tiny_text.BOS)
    whole = tokenized(front, model=MODEL, prompt="hello there 😀")
    assert (whole["tokens"], whole["token_strs"]) == ([bos, *ids], None)
    assert tokenized(front, prompt="hello there 😀", add_special_tokens=False)["tokens"] == ids
    names = tokenized(front, prompt="hello there 😀", return_token_strs=True)["token_strs"]
    assert names == [tiny_text.tokenizer().id_to_token(token) for token in (bos, *ids)]
    assert tokenized(front, prompt="", add_special_tokens=False)["tokens"] == []
    assert tokenized(front, prompt="a<|im_end|>", add_special_tokens=False)["tokens"][-1] == tiny_text.special(
        tiny_text.END
    ), "as in plain completions"


def test_a_conversation_has_the_prompt_that_chat_has(front: FrontEnd) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "A<|im_end|>B"}]
    found = tokenized(front, messages=messages)["tokens"]
    front.device.submissions.clear()
    post(front, "/v1/chat/completions", model=MODEL, messages=messages)
    assert tuple(found) == front.device.submissions.pop().prompt


def test_more_tokens_than_the_window_are_counted(front: FrontEnd) -> None:
    assert tokenized(front, prompt="a b " * 300)["count"] > WINDOW


def test_back_to_text(front: FrontEnd) -> None:
    for text in ("hello there", "é漢😀", "<s>a<|im_end|>b", ""):
        ids = tiny_text.tokenizer().encode(text, add_special_tokens=False).ids
        assert post(front, "/detokenize", model=MODEL, tokens=ids).json() == {"prompt": text}
    assert post(front, "/detokenize", tokens=tiny_text.byte_ids(b"a\xf0\x9f")).json() == {"prompt": "a\ufffd"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/tokenize", {}, 400, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": "a", "model": "no-such"}, 404, "model", "model_not_found"),
        ("/tokenize", {"prompt": "." * 100_000}, 400, "prompt", "context_length_exceeded"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, 400, "add_special_tokens", "invalid_value"),
        ("/tokenize", {"messages": []}, 400, "messages", "invalid_value"),
        ("/detokenize", {}, 400, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": [tiny_text.vocab_size()]}, 400, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]", "invalid_type"),
        ("/detokenize", {"tokens": [1] * 257}, 400, "tokens", "context_length_exceeded"),
        ("/detokenize", {"tokens": [1], "model": "no-such"}, 404, "model", "model_not_found"),
    ],
)
def test_refusals(front: FrontEnd, path: str, body: dict[str, Any], status: int, param: str, code: str) -> None:
    answer = post(front, path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"1e999", json.dumps({"x": 1}).encode()])
def test_bodies_that_are_none(front: FrontEnd, path: str, body: bytes) -> None:
    answer = httpx.post(front.http + path, content=body, timeout=20)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
