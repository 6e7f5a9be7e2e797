"""A model's tokenizer files, loaded: what the rest of `text` works with."""

from __future__ import annotations

from typing import Any

import msgspec
from tokenizers import Tokenizer

from dpu_service.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from dpu_service.text.spelling import DecoderSpelling, Spelling, TableSpelling
from dpu_service.text.tables import ByteTables, byte_tables

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
BUNDLE_FILES = (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE)


class BundleError(Exception):
    """The tokenizer files cannot be used; the message says why."""


class TextBundle:
    """Tokenizer, special tokens and chat template of a model.

    Args:
        files: contents by name, of `BUNDLE_FILES`; only `tokenizer.json` must be there.

    Raises:
        BundleError: a file is missing or malformed.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.source = _text(files, TOKENIZER_FILE)
        if not self.source:
            raise BundleError("the runtime sent no tokenizer.json")
        self.tokenizer = _load(self.source)
        config = _config(files)
        self.bos_token = _token_text(config.get("bos_token"))
        self.eos_token = _token_text(config.get("eos_token"))
        self.template_constants = _constants(config)
        self.chat_templates = _templates(files, config)
        added = self.tokenizer.get_added_tokens_decoder()
        self.control_tokens: dict[str, int] = {t.content: i for i, t in added.items() if t.special and t.content}
        self.added_tokens = frozenset(t.content for t in added.values() if not t.special and t.content)
        self.longest_token = max((len(token) for token in self.tokenizer.get_vocab()), default=1)
        self.may_shrink = self.tokenizer.normalizer is not None
        decoder = msgspec.json.decode(self.source).get("decoder") or {}
        self._tables = tables = byte_tables(decoder, self.tokenizer, self.control_tokens)
        self._with_markers: dict[frozenset[int], list[bytes]] = {}
        self.spelling: Spelling = (
            DecoderSpelling(self.tokenizer) if tables is None else TableSpelling(tables.everything)
        )

    def detokenizer(self, skip_special: bool, markers: frozenset[int] = frozenset()) -> Detokenizer:
        """A fresh detokenizer for one sequence.

        Args:
            skip_special: control tokens have no text, but for the markers.
        """
        tables = self._tables
        if tables is not None:
            table = self._visible(tables, markers) if skip_special else tables.everything
            return ByteDetokenizer(table, tables.strip)
        silent = frozenset(self.control_tokens.values()) - markers if skip_special else frozenset()
        return WindowDetokenizer(self.tokenizer, silent)

    def _visible(self, tables: ByteTables, markers: frozenset[int]) -> list[bytes]:
        if not markers:
            return tables.visible
        if markers not in self._with_markers:
            table = list(tables.visible)
            for token in markers:
                table[token] = tables.everything[token]
            self._with_markers[markers] = table
        return self._with_markers[markers]


def _load(source: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(source)
    except Exception as error:  # the library raises bare Exception
        raise BundleError(f"tokenizer.json cannot be loaded: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
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
        return msgspec.json.decode(files[CONFIG_FILE], type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BundleError(f"{CONFIG_FILE} is malformed: {error}") from error


def _token_text(value: Any) -> str:
    """A special token as tokenizer_config.json gives it: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _constants(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates know, `bos_token` for example."""
    tokens = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
    return {"bos_token": "", "eos_token": ""} | {name: text for name, text in tokens.items() if text}


def _templates(files: dict[str, bytes], config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: one is `default`; a list has names of its own, `tool_use` for example."""
    given = config.get("chat_template")
    if isinstance(given, str):
        given = [{"name": "default", "template": given}]
    named = {one.get("name"): one.get("template") for one in given or [] if isinstance(one, dict)}
    named["default"] = _text(files, TEMPLATE_FILE) or named.get("default")
    return {str(name): source for name, source in named.items() if isinstance(source, str) and source}
