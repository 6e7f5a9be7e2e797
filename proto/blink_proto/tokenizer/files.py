"""Reads and checks a model's tokenizer files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from blink_proto.tokenizer.sandbox import BrokenTemplateError, TemplateSandbox

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
BUNDLE_FILES = (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE)
MOST_BYTES = 256 << 20
"""Of all files together. The largest vocabularies in use, of 256,000 tokens, take 35 MB."""
MOST_TOKENS = 1 << 23
"""Token ids are below this: front ends keep a table of them."""


class BundleError(Exception):
    """The tokenizer files cannot be used; the message says why."""


@dataclass(frozen=True)
class TokenizerFiles:
    """What they say."""

    source: str
    """Content of tokenizer.json."""
    tokenizer: Tokenizer
    constants: dict[str, str]
    """Special tokens by the names that templates know, `bos_token` for example."""
    templates: dict[str, str]
    """Sources of chat templates by name: one is `default`; others have names of their own, `tool_use` for example."""

    @classmethod
    def read(cls, files: dict[str, bytes]) -> TokenizerFiles:
        """Checks all but whether the templates compile.

        Args:
            files: contents by name, of `BUNDLE_FILES`; only `tokenizer.json` must be there.

        Raises:
            BundleError: a file is missing or malformed.
        """
        source, config = _text(files, TOKENIZER_FILE), _config(files)
        if not source:
            raise BundleError(f"{TOKENIZER_FILE} is missing or empty")
        return cls(source, _load(source), _constants(config), _templates(files, config))

    def check_templates(self) -> None:
        """Compiles each of them.

        Raises:
            BundleError: says which one is broken.
        """
        for name, source in self.templates.items():
            try:
                TemplateSandbox().compiled(source)
            except BrokenTemplateError as error:
                raise BundleError(f"chat template {name!r} is broken: {error}") from error

    @property
    def largest_text_token(self) -> int:
        """Largest id of the vocabulary but for special tokens, which no text comes to unless it names them; -1 when
        there is none.
        """
        special = {number for number, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        return max((number for number in self.tokenizer.get_vocab().values() if number not in special), default=-1)


def read_folder(folder: Path) -> dict[str, bytes]:
    """Contents by name of the `BUNDLE_FILES` that a folder has.

    Raises:
        BundleError: a file cannot be read, or is no regular one, or they are too large.
    """
    try:
        paths = [path for name in BUNDLE_FILES if (path := folder / name).exists()]
        for path in paths:
            if not path.is_file():  # whoever opens a pipe waits for its other end
                raise BundleError(f"{path} is not a regular file")
        if sum(path.stat().st_size for path in paths) > MOST_BYTES:
            raise BundleError(f"the tokenizer files take more than {MOST_BYTES >> 20} MiB")
        return {path.name: path.read_bytes() for path in paths}
    except OSError as error:
        raise BundleError(f"{error.filename} cannot be read: {error.strerror}") from error


def _load(source: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(source)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except BaseException as error:
        # The library raises bare Exception or, where its own code fails, a PanicException, which is not even one.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BundleError(f"{TOKENIZER_FILE} cannot be loaded: {error}") from error
    numbers = tokenizer.get_vocab().values()
    if not numbers or max(numbers) >= MOST_TOKENS:
        raise BundleError(f"{TOKENIZER_FILE} has no tokens, or token ids from {MOST_TOKENS} on")
    return tokenizer


def _text(files: dict[str, bytes], name: str) -> str:
    try:
        return files.get(name, b"").decode()
    except UnicodeDecodeError as error:
        raise BundleError(f"{name} is not UTF-8") from error


def _config(files: dict[str, bytes]) -> dict[str, Any]:
    if CONFIG_FILE not in files:
        return {}
    try:
        config = json.loads(_text(files, CONFIG_FILE))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{CONFIG_FILE} is malformed: {error}") from error
    if not isinstance(config, dict):
        raise BundleError(f"{CONFIG_FILE} is malformed: it does not hold an object")
    return config


def _token_text(value: Any) -> str:
    """A special token as tokenizer_config.json gives it: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _constants(config: dict[str, Any]) -> dict[str, str]:
    tokens = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
    return {"bos_token": "", "eos_token": ""} | {name: text for name, text in tokens.items() if text}


def _templates(files: dict[str, bytes], config: dict[str, Any]) -> dict[str, str]:
    """Those of tokenizer_config.json, one or a list of named ones; the default one may have a file of its own."""
    given = config.get("chat_template") or []
    if isinstance(given, str):
        given = [{"name": "default", "template": given}]
    if not isinstance(given, list) or not all(map(_is_template, given)):
        raise BundleError(f"{CONFIG_FILE}: chat_template is neither a template nor a list of named ones")
    named = {one["name"]: one["template"] for one in given}
    named["default"] = _text(files, TEMPLATE_FILE) or named.get("default", "")
    return {name: source for name, source in named.items() if source}


def _is_template(given: Any) -> bool:
    return isinstance(given, dict) and all(isinstance(given.get(key), str) for key in ("name", "template"))
