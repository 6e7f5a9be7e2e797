"""Tokenizer files that no front end could use, as the runtime finds them and as the front end does."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from blink_proto.tokenizer.files import MOST_BYTES, BundleError, TokenizerFiles, read_folder
from dpu_service.text.bundle import TextBundle
from dpu_service.text.chat import ChatEncoder
from dpu_service.text.template import ChatTemplateError
from gpu_runtime.control.errors import BadRequestError
from gpu_runtime.control.prepare import check_tokenizer
from tests.tiny import save_tokenizer

VOCABULARY = 300
NESTED = "".join(f"{{% for a{i} in messages %}}" for i in range(30)) + "{% endfor %}" * 30
"""More loops in each other than Python compiles."""


def tokenizer_json(**changes: Any) -> bytes:
    """A vocabulary of the letters a, b and ab."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    return json.dumps({"version": "1.0", "model": model | changes.pop("model", {}), **changes}).encode()


def config(**given: Any) -> dict[str, bytes]:
    return {"tokenizer_config.json": json.dumps(given).encode()}


def template(source: str) -> dict[str, bytes]:
    return {"chat_template.jinja": source.encode()}


UNUSABLE: dict[str, dict[str, bytes]] = {
    "no tokenizer.json": {"tokenizer.json": b""},
    "tokenizer.json is not JSON": {"tokenizer.json": b"{"},
    "tokenizer.json is not UTF-8": {"tokenizer.json": b"\xff"},
    "no tokens": {"tokenizer.json": tokenizer_json(model={"vocab": {}, "merges": []})},
    "the library panics": {"tokenizer.json": tokenizer_json(model={"continuing_subword_prefix": "#" * 10})},
    "ids without end": {"tokenizer.json": tokenizer_json(model={"vocab": {"a": 4_000_000_000}, "merges": []})},
    "configuration is not JSON": {"tokenizer_config.json": b"{not json"},
    "configuration is not UTF-8": {"tokenizer_config.json": b'{"a": "\xff"}'},
    "configuration is a list": {"tokenizer_config.json": b"[]"},
    "configuration nests": {"tokenizer_config.json": b'{"a":' * 100_000},
    "configuration has a long number": {"tokenizer_config.json": b'{"a": ' + b"9" * 5000 + b"}"},
    "templates are a number": config(chat_template=5),
    "a template without a name": config(chat_template=[{"template": "x"}]),
    "a template's name is a list": config(chat_template=[{"name": ["x"], "template": "x"}]),
    "a broken template in the configuration": config(chat_template="{{ "),
    "one of several is broken": config(
        chat_template=[{"name": "default", "template": "x"}, {"name": "tool_use", "template": "{% endif %}"}]
    ),
    "template is not UTF-8": {"chat_template.jinja": b"\xff"},
    "template does not end": template("{% if %}"),
    "template has an unknown filter": template("{{ messages | nothing }}"),
    "template has an unknown tag": template("{% nothing %}"),
    "template nests": template(NESTED),
    "template has a long number": template("{{ " + "9" * 5000 + " }}"),
    "template has too many parentheses": template("{{ " + "(" * 5000 + ")" * 5000 + " }}"),
}
USABLE: dict[str, dict[str, bytes]] = {
    "nothing more": {},
    "empty configuration and template": {"tokenizer_config.json": b"{}", "chat_template.jinja": b""},
    "null for a template": config(chat_template=None),
    "tags of published templates": template(
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    ),
    "several templates": config(chat_template=[{"name": "default", "template": "x"}, {"name": "rag", "template": "y"}]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path / "tokenizer.json", VOCABULARY)
    return tmp_path


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def front_end(folder: Path) -> ChatEncoder:
    """What a worker does with the files of a session."""
    return ChatEncoder(TextBundle(read_folder(folder)))


@pytest.mark.parametrize("what", UNUSABLE)
def test_what_no_front_end_can_use_is_refused_by_both(what: str, folder: Path) -> None:
    put(folder, UNUSABLE[what])
    with pytest.raises((BundleError, ChatTemplateError)):
        front_end(folder)
    with pytest.raises(BadRequestError, match="no front end could use"):
        check_tokenizer(folder, VOCABULARY)


@pytest.mark.parametrize("what", USABLE)
def test_what_front_ends_can_use_is_taken_by_both(what: str, folder: Path) -> None:
    put(folder, USABLE[what])
    front_end(folder)
    check_tokenizer(folder, VOCABULARY)


def test_files_that_cannot_be_read(folder: Path) -> None:
    (folder / "tokenizer_config.json").mkdir()
    with pytest.raises(BadRequestError, match=r"tokenizer_config\.json is not a regular file"):
        check_tokenizer(folder, VOCABULARY)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_is_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    said: list[str] = []
    reading = threading.Thread(target=lambda: said.append(refusal(folder)), daemon=True)
    reading.start()
    reading.join(10)
    assert said == [f"{folder / name} is not a regular file"]


def refusal(folder: Path) -> str:
    with pytest.raises(BundleError) as error:
        read_folder(folder)
    return str(error.value)


def test_more_than_a_front_end_takes(folder: Path) -> None:
    with (folder / "tokenizer_config.json").open("wb") as file:
        file.truncate(MOST_BYTES)  # and the others besides
    with pytest.raises(BadRequestError, match="more than 256 MiB"):
        check_tokenizer(folder, VOCABULARY)


@pytest.mark.parametrize(
    ("add", "refused"),
    [
        (lambda made: made.add_tokens(["<more>"]), True),
        (lambda made: made.add_special_tokens([AddedToken("<fill>", special=True)]), False),
    ],
    ids=["text", "special"],
)
def test_a_tokenizer_with_more_tokens_than_the_model(
    add: Callable[[Tokenizer], int], refused: bool, folder: Path
) -> None:
    path = folder / "tokenizer.json"
    made = Tokenizer.from_file(str(path))
    assert add(made) == 1
    made.save(str(path))
    assert max(made.get_vocab().values()) == VOCABULARY
    if refused:
        with pytest.raises(BadRequestError, match="has a token 300, the model only 300 tokens"):
            check_tokenizer(folder, VOCABULARY)
    check_tokenizer(folder, VOCABULARY + refused)
    assert TokenizerFiles.read(read_folder(folder)).largest_text_token == VOCABULARY - 1 + refused
