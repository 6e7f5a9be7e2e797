"""A model's tokenizer files, loaded: what the rest of `text` works with."""

from __future__ import annotations

import msgspec

from blink_proto.tokenizer.files import TokenizerFiles
from dpu_service.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from dpu_service.text.spelling import DecoderSpelling, Spelling, TableSpelling
from dpu_service.text.tables import ByteTables, byte_tables


class TextBundle:
    """Tokenizer, special tokens and chat template of a model.

    Args:
        files: contents by name, of `BUNDLE_FILES`; only `tokenizer.json` must be there.

    Raises:
        BundleError: a file is missing or malformed.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        given = TokenizerFiles.read(files)
        self.source, self.tokenizer = given.source, given.tokenizer
        self.template_constants, self.chat_templates = given.constants, given.templates
        self.bos_token = given.constants["bos_token"]
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
