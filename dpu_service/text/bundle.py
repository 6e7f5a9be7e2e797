"""A model's tokenizer files, loaded: what the rest of `text` works with."""

from __future__ import annotations

from typing import Any

import msgspec
from tokenizers import Tokenizer

from dpu_service.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from dpu_service.text.spelling import DecoderSpelling, Spelling, TableSpelling
from dpu_service.text.tables import byte_tables

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
        self._source = _text(files, TOKENIZER_FILE)
        if not self._source:
            raise BundleError("the runtime sent no tokenizer.json")
        self.tokenizer = _load(self._source)
        self._plain: Tokenizer | None = None
        config = _config(files)
        self.bos_token = _token_text(config.get("bos_token"))
        self.eos_token = _token_text(config.get("eos_token"))
        self.chat_template = _text(files, TEMPLATE_FILE) or _template_of(config)
        added = self.tokenizer.get_added_tokens_decoder()
        self.control_tokens: dict[str, int] = {t.content: i for i, t in added.items() if t.special and t.content}
        self.longest_token = max((len(token) for token in self.tokenizer.get_vocab()), default=1)
        self.may_shrink = self.tokenizer.normalizer is not None
        decoder = msgspec.json.decode(self._source).get("decoder") or {}
        self._tables = tables = byte_tables(decoder, self.tokenizer, self.control_tokens)
        self.spelling: Spelling = (
            DecoderSpelling(self.tokenizer) if tables is None else TableSpelling(tables.everything)
        )

    @property
    def plain_tokenizer(self) -> Tokenizer:
        """The same tokenizer, blind to control tokens: their text is tokenised like any other. Loaded when wanted."""
        if self._plain is None:
            self._plain = _load(self._source)
            self._plain.encode_special_tokens = True
        return self._plain

    def detokenizer(self, skip_special: bool) -> Detokenizer:
        """A fresh detokenizer for one sequence."""
        tables = self._tables
        if tables is not None:
            return ByteDetokenizer(tables.visible if skip_special else tables.everything, tables.strip)
        return WindowDetokenizer(self.tokenizer, frozenset(self.control_tokens.values() if skip_special else ()))


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


def _template_of(config: dict[str, Any]) -> str:
    """The chat template: one string, or a list of named ones of which `default` counts."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""
