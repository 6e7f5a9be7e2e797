"""Where tokens begin, when their text has been shown, and how single tokens are spelt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from blink_proto.arena import Finish
from dpu_service.text.bundle import TextBundle
from dpu_service.text.choice import ChoiceText, TextRules
from dpu_service.text.places import TokenPlaces
from tests import tiny_text

BUNDLE = TextBundle(tiny_text.files())


def characters_begun(data: bytes) -> int:
    """Of valid UTF-8 up to anywhere: every byte but those of the form 10xxxxxx begins one."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


def expected_offset(data: bytes, at: int) -> int:
    within = at < len(data) and data[at] & 0xC0 == 0x80
    return characters_begun(data[:at]) - within


def choice(*stops: str, min_tokens: int = 0) -> ChoiceText:
    return ChoiceText(BUNDLE.detokenizer(True), TextRules(stops, min_tokens), TokenPlaces())


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text("abé漢😀", max_size=5), max_size=8),
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
    st.integers(0, 6),
    st.integers(1, 7),
)
def test_tokens_are_settled_with_the_text_that_they_are_part_of(
    words: list[str], stops: list[str], min_tokens: int, size: int
) -> None:
    """A token for each byte, in pieces of any size: after each, exactly those whose characters are all shown."""
    data = "".join(words).encode()
    text, shown, offsets = choice(*stops, min_tokens=min_tokens), 0, []
    ids = tiny_text.byte_ids(data)
    for at in range(0, len(ids), size):
        if text.finish_reason is None:
            shown += len(text.feed(ids[at : at + size], Finish.NONE))
            offsets += text.take_places()
        if text.finish_reason is None:
            ends = [characters_begun(data[: i + 1]) for i in range(min(at + size, len(ids)))]
            assert len(offsets) == sum(end <= shown for end in ends)
    text.feed([tiny_text.special(tiny_text.EOS)], Finish.STOP)
    offsets += text.take_places()
    assert len(offsets) == text.tokens - (not text.stopped_by_text), "all that count but the stop token, once each"
    assert offsets == [expected_offset(data, i) for i in range(len(offsets))]
    assert text.take_places() == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, tiny_text.vocab_size() - 1), max_size=30), st.integers(1, 5))
def test_no_token_is_lost_whatever_comes(ids: list[int], size: int) -> None:
    text, taken = choice("he", "�"), 0
    for at in range(0, len(ids), size):
        text.feed(ids[at : at + size], Finish.NONE)
        taken += len(text.take_places())
        assert taken <= text.tokens
    text.feed([], Finish.LENGTH)
    assert taken + len(text.take_places()) == text.tokens


def test_nothing_is_followed_unless_wanted() -> None:
    text = ChoiceText(BUNDLE.detokenizer(True), TextRules(["z"]))
    assert text.feed(tiny_text.byte_ids(b"abc"), Finish.LENGTH) == "abc"
    assert text.take_places() == []


def test_bytes_of_a_byte_level_vocabulary() -> None:
    assert [BUNDLE.spelling(token) for token in tiny_text.byte_ids(bytes(range(256)))] == [
        bytes([byte]) for byte in range(256)
    ]
    assert BUNDLE.spelling(tiny_text.special(tiny_text.END)) == b"<|im_end|>"
    assert BUNDLE.spelling(tiny_text.vocab_size()) == b""


def with_byte_fallback() -> Tokenizer:
    """Llama-2's kind of decoder; byte tokens of a few bytes only."""
    words = ["<unk>", "<0x41>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁Machine", "ing", "▁", "▁▁", "é"]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    made.add_special_tokens(["<s>"])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


@pytest.mark.parametrize(
    ("name", "spelt"),
    [
        ("▁Machine", b" Machine"),
        ("ing", b"ing"),
        ("▁", b" "),
        ("▁▁", b"  "),
        ("é", b"\xc3\xa9"),
        ("<0x41>", b"A"),
        ("<0xF0>", b"\xf0"),
        ("<s>", b"<s>"),
    ],
)
def test_tokens_of_a_vocabulary_with_byte_fallback(name: str, spelt: bytes) -> None:
    tokenizer = with_byte_fallback()
    spelling = TextBundle({"tokenizer.json": tokenizer.to_str().encode()}).spelling
    assert [spelling(tokenizer.token_to_id(name)) for _ in range(2)] == [spelt] * 2
    assert spelling(tokenizer.get_vocab_size()) == b""


def test_places_with_byte_fallback() -> None:
    tokenizer = with_byte_fallback()
    bundle = TextBundle({"tokenizer.json": tokenizer.to_str().encode()})
    text = ChoiceText(bundle.detokenizer(True), TextRules(), TokenPlaces())
    names = ["▁Machine", "▁", "<0xF0>", "<0x9F>", "<s>", "<0x98>", "<0x80>", "<0x41>"]
    found = []
    for name in names:
        shown = text.feed([tokenizer.token_to_id(name)], Finish.NONE)
        found.append((shown, text.take_places()))
    held = ("", [])
    assert found == [("Machine", [0]), (" ", [7]), held, held, held, held, ("😀", [8] * 5), ("A", [9])]
