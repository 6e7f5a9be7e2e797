"""Text in pieces equals text as a whole, and no piece ends within a character."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from blink_proto.arena import Finish
from blink_proto.tokenizer.files import BundleError
from dpu_service.text.bundle import TextBundle
from dpu_service.text.choice import ChoiceText, TextRules
from dpu_service.text.detokenize import ByteDetokenizer, Detokenizer
from tests import tiny_text


def feed_all(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.feed([one]) for one in ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def bundle() -> TextBundle:
    return TextBundle(tiny_text.files())


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, tiny_text.vocab_size() - 1), max_size=40), st.booleans())
def test_any_ids_give_what_the_tokenizer_gives_for_all_of_them(ids: list[int], skip: bool) -> None:
    pieces = feed_all(TextBundle(tiny_text.files()).detokenizer(skip), ids)
    assert "".join(pieces) == tiny_text.tokenizer().decode(ids, skip_special_tokens=skip)


def test_an_emoji_comes_whole(bundle: TextBundle) -> None:
    pieces = feed_all(bundle.detokenizer(True), tiny_text.byte_ids("a😀b".encode()))
    assert pieces == ["a", "", "", "", "😀", "b", ""]


def test_broken_bytes_come_as_replacement_characters_and_hold_back_at_most_three(bundle: TextBundle) -> None:
    ids = tiny_text.byte_ids(b"\xf0\x9f\x98" + b"ok" + b"\xe2\x82")
    assert feed_all(bundle.detokenizer(True), ids) == ["", "", "", "\ufffdo", "k", "", "", "\ufffd"]


def test_control_tokens_are_silent_unless_wanted(bundle: TextBundle) -> None:
    ids = [*tiny_text.ids("hello"), tiny_text.special(tiny_text.END)]
    assert "".join(feed_all(bundle.detokenizer(True), ids)) == "hello"
    assert "".join(feed_all(bundle.detokenizer(False), ids)) == "hello<|im_end|>"


def sentencepiece_like() -> Tokenizer:
    """Llama-2's kind: "▁" for spaces, bytes as `<0xNN>`, the first space stripped."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Machine", "▁learning", "▁is", "ing", "▁", "é"]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    made.add_special_tokens(["<s>"])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def test_word_spaces_and_byte_runs_of_sentencepiece_tokenizers() -> None:
    tokenizer = sentencepiece_like()
    bundle = TextBundle({"tokenizer.json": tokenizer.to_str().encode()})
    assert isinstance(bundle.detokenizer(True), ByteDetokenizer)
    names = ["<s>", "▁Machine", "▁learning", "<s>", "▁is", *(f"<0x{b:02X}>" for b in "😀😁é😂".encode()), "▁is", "é"]
    ids = [tokenizer.token_to_id(name) for name in names]
    pieces = feed_all(bundle.detokenizer(True), ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "Machine learning is😀😁é😂 isé"
    assert not any("\ufffd" in piece for piece in pieces)


def test_random_text_through_a_sentencepiece_tokenizer() -> None:
    tokenizer, chance = sentencepiece_like(), random.Random(3)
    bundle = TextBundle({"tokenizer.json": tokenizer.to_str().encode()})
    for _ in range(100):
        names: list[str] = []
        for _ in range(12):
            word = chance.choice(["▁Machine", "▁is", "ing", "▁", "é", "<s>", "😀", "ü", "漢"])
            names += [f"<0x{b:02X}>" for b in word.encode()] if word in "😀ü漢" else [word]
        ids = [tokenizer.token_to_id(name) for name in names]
        assert "".join(feed_all(bundle.detokenizer(True), ids)) == tokenizer.decode(ids)


def choice(bundle: TextBundle, *stops: str, min_tokens: int = 0) -> ChoiceText:
    return ChoiceText(bundle.detokenizer(True), TextRules(stops, min_tokens))


def test_the_stop_token_is_counted_and_not_shown(bundle: TextBundle) -> None:
    made = choice(bundle)
    assert made.feed([tiny_text.special(tiny_text.EOS)], Finish.STOP) == ""
    assert (made.finish_reason, made.tokens) == ("stop", 1)
    made = choice(bundle)
    assert made.feed([*tiny_text.ids("hello"), *tiny_text.ids("!")], Finish.STOP) == "hello"


def test_tokens_after_a_stop_string_are_neither_shown_nor_counted(bundle: TextBundle) -> None:
    made = choice(bundle, "b c")
    ids = tiny_text.byte_ids(b"a b cde")
    assert made.feed(ids, Finish.NONE) == "a "
    assert (made.finish_reason, made.tokens, made.stopped_by_text) == ("stop", 5, True)


def test_held_text_comes_out_at_the_end(bundle: TextBundle) -> None:
    made = choice(bundle, "hello there")
    assert made.feed(tiny_text.byte_ids(b"hello th"), Finish.NONE) == ""
    assert made.feed(tiny_text.byte_ids(b"e"), Finish.LENGTH) == "hello the"
    assert (made.finish_reason, made.tokens) == ("length", 9)


def test_half_a_character_at_the_end_is_flushed_through_the_stop_strings(bundle: TextBundle) -> None:
    made = choice(bundle, "\ufffd")
    assert made.feed(tiny_text.byte_ids(b"x\xf0\x9f"), Finish.LENGTH) == "x"
    assert made.finish_reason == "stop"


def test_the_fast_way_is_taken_for_byte_level_vocabularies(bundle: TextBundle) -> None:
    assert isinstance(bundle.detokenizer(True), ByteDetokenizer)


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": b"{"}, {"tokenizer.json": b"\xff"}])
def test_broken_bundles(files: dict[str, bytes]) -> None:
    with pytest.raises(BundleError):
        TextBundle(files)


@pytest.mark.parametrize(("min_tokens", "shown"), [(0, ""), (1, "a"), (2, "ab"), (5, "abcab"), (6, "abcabc")])
def test_stop_strings_count_only_after_min_tokens(bundle: TextBundle, min_tokens: int, shown: str) -> None:
    """In "abcabc", a token a letter: a stop string counts when all of it comes after the first tokens."""
    text = choice(bundle, "ab", "bc", "c", min_tokens=min_tokens)
    found = "".join(text.feed(tiny_text.byte_ids(piece), Finish.NONE) for piece in (b"ab", b"ca", b"bc"))
    assert found == shown
