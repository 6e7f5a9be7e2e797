"""Words as the tokens that a tokenizer writes them with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from dpu_service.text.bundle import TextBundle
from dpu_service.text.words import forms_of_word, token_of
from tests import tiny_text

BUNDLE = TextBundle(tiny_text.files())


def sentencepiece(words: list[str], merges: list[tuple[str, str]]) -> tuple[TextBundle, list[str]]:
    """Of Llama 2's kind: a space before every text, and bytes for what has no token."""
    names = ["<unk>", "<0x0A>", "▁", *words]
    made = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextBundle({"tokenizer.json": made.to_str().encode()}), names


def named(names: list[str], forms: list[tuple[int, ...]]) -> list[list[str]]:
    return [[names[token] for token in form] for form in forms]


def test_single_tokens_in_either_kind_of_vocabulary() -> None:
    bundle, names = sentencepiece(["▁Machine", "Machine", "ing", "▁is"], [])
    assert named(names, forms_of_word(bundle, "Machine")) == [["Machine"], ["▁Machine"]]
    assert named(names, forms_of_word(bundle, "is")) == [["▁is"]], "nothing spells the bare form"
    assert token_of(bundle, " is") == names.index("▁is")
    assert forms_of_word(BUNDLE, "the") == [(tiny_text.tokenizer().token_to_id(name),) for name in ("the", "Ġthe")]
    assert token_of(BUNDLE, "<|im_end|>") == tiny_text.special(tiny_text.END)
    assert token_of(BUNDLE, "Ġthe") is None, "a text, not a name"


def test_several_tokens_where_the_tokenizer_puts_a_space_before_every_text() -> None:
    """The bare form is not what the word alone becomes."""
    letters = ["c", "a", "t", "s"]
    merges = [("t", "s"), ("▁", "c"), ("▁c", "a"), ("c", "a")]
    bundle, names = sentencepiece([*letters, "ts", "▁c", "▁ca", "ca"], merges)
    assert named(names, forms_of_word(bundle, "cats")) == [["ca", "ts"], ["▁ca", "ts"]]
    assert named(names, forms_of_word(bundle, "ts")) == [["ts"]], "behind a space it is a space and the same token"
    assert named(names, forms_of_word(bundle, "at")) == [["a", "t"]]
    assert forms_of_word(bundle, "dog") == [], "there are no tokens for it"


def test_words_that_the_tokenizer_changes_first() -> None:
    made = Tokenizer.from_str(tiny_text.tokenizer().to_str())
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    bundle = TextBundle({"tokenizer.json": made.to_str().encode()})
    assert forms_of_word(bundle, "e\u0301") == [tuple(tiny_text.byte_ids(b"\xc3\xa9"))]
    assert forms_of_word(bundle, "FOX") == forms_of_word(BUNDLE, "fox")


@given(st.text("thefoxjumps é漢😀\n.", min_size=1, max_size=12).filter(lambda word: word[0] != " "))
def test_forms_are_what_the_tokenizer_writes(word: str) -> None:
    """With this tokenizer that is plain: the word and the word behind a space are tokenised by themselves."""
    bare, spaced = tiny_text.ids(word), tiny_text.ids(" " + word)
    held = any(spaced[at:][: len(bare)] == bare for at in range(len(spaced)))
    assert forms_of_word(BUNDLE, word) == [tuple(bare)] + [tuple(spaced)] * (not held)


@pytest.mark.parametrize("word", ["hello", "Hi"])
def test_words_of_a_tokenizer_without_tables(word: str) -> None:
    """Metaspace by itself: a kind whose tokens can only be decoded."""
    pieces = ["▁", "▁H", "H", "i", "h", "e", "l", "o", "▁he", "he", "<unk>"]
    merges = [("▁", "H"), ("h", "e"), ("▁", "he")]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(pieces)}, merges, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    bundle = TextBundle({"tokenizer.json": made.to_str().encode()})
    expected = {"hello": [["he", "l", "l", "o"], ["▁he", "l", "l", "o"]], "Hi": [["H", "i"], ["▁H", "i"]]}
    assert named(pieces, forms_of_word(bundle, word)) == expected[word]
