"""Text in pieces is the text as a whole, for every kind of tokenizer, any tokens and any cuts between them."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from blink_proto.arena import Finish
from dpu_service.text.bundle import TextBundle
from dpu_service.text.choice import ChoiceText, TextRules
from dpu_service.text.detokenize import ByteDetokenizer, WindowDetokenizer
from tests import tiny_text

WORDS = ["▁the", "▁a", "the", "ing", "▁", "▁▁", "é", "漢", "😀", "\n", "."]
CHARACTERS = "aé漢😀👍🏽👩‍👩‍👧"
SHORT = settings(max_examples=150, deadline=None)


@cache
def byte_fallback(strip: int) -> Tokenizer:
    """Llama 2's kind with strip 1, Gemma's with 0: words with "▁" for spaces, and a token for every byte."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    made.add_special_tokens(["<s>"])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", strip, 0)] if strip else parts)
    return made


@cache
def otherwise() -> Tokenizer:
    """Bytes before spaces: the same texts, but no decoder that is known by its table."""
    made = Tokenizer.from_str(byte_fallback(0).to_str())
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()])
    return made


@cache
def metaspace() -> Tokenizer:
    """T5's kind: it has no bytes, and its decoder is none that is known by its table."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", *WORDS])}, unk_token="<unk>"))
    made.add_special_tokens(["<s>"])
    made.decoder = decoders.Metaspace()
    return made


KINDS = {
    "byte-level": tiny_text.tokenizer,
    "llama": lambda: byte_fallback(1),
    "gemma": lambda: byte_fallback(0),
    "otherwise": otherwise,
    "metaspace": metaspace,
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


@cache
def bundle_of(kind: str) -> TextBundle:
    return TextBundle({"tokenizer.json": KINDS[kind]().to_str().encode()})


def spell(kind: str, text: str) -> list[int]:
    """A text by as small tokens as there are: bytes, or words."""
    if kind == "byte-level":
        return tiny_text.byte_ids(text.encode())
    tokenizer = KINDS[kind]()
    if kind == "metaspace":
        return [tokenizer.token_to_id(character) or 0 for character in text]
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


@st.composite
def whole_tokens(draw: st.DrawFn, kind: str) -> list[int]:
    """Tokens whose text has no broken characters: words, characters byte by byte, and control tokens."""
    tokenizer = KINDS[kind]()
    tokens: list[int] = []
    control = tiny_text.special(tiny_text.START) if kind == "byte-level" else tokenizer.token_to_id("<s>")
    for choice in draw(st.lists(st.integers(0, 2), max_size=14)):
        if choice == 0:
            tokens += spell(kind, draw(st.sampled_from(CHARACTERS)))
        elif choice == 1 and kind != "byte-level":
            tokens.append(tokenizer.token_to_id(draw(st.sampled_from(WORDS))))
        elif choice == 1:
            tokens += tiny_text.ids(draw(st.sampled_from([" the", "Hello", "  ", "\n", "fox jumps"])))
        else:
            tokens.append(control)
    return tokens


def pieces_of(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    places = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    return [tokens[a:b] for a, b in pairwise(places)]


def test_the_kinds_are_decoded_as_meant() -> None:
    kinds = {kind: type(bundle_of(kind).detokenizer(True)) for kind in KINDS}
    assert kinds == {
        "byte-level": ByteDetokenizer,
        "llama": ByteDetokenizer,
        "gemma": ByteDetokenizer,
        "otherwise": WindowDetokenizer,
        "metaspace": WindowDetokenizer,
    }


@EVERY_KIND
@SHORT
@given(data=st.data(), cuts=st.lists(st.integers(0, 40), max_size=6), skip=st.booleans())
def test_pieces_are_the_tokenizers_own_text(kind: str, data: st.DataObject, cuts: list[int], skip: bool) -> None:
    tokens = data.draw(whole_tokens(kind))
    detokenizer, shown = bundle_of(kind).detokenizer(skip), ""
    whole = KINDS[kind]().decode(tokens, skip_special_tokens=skip)
    for piece in pieces_of(tokens, cuts):
        shown += detokenizer.feed(piece)
        assert whole.startswith(shown)
    assert not detokenizer.holds
    assert shown + detokenizer.flush() == whole


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
@SHORT
@given(data=st.data(), cut=st.integers(1, 3))
def test_a_cut_character_is_held_and_then_shown_as_broken(kind: str, data: st.DataObject, cut: int) -> None:
    tokens = data.draw(whole_tokens(kind))
    detokenizer = bundle_of(kind).detokenizer(True)
    whole = KINDS[kind]().decode(tokens)
    assert "".join(detokenizer.feed([one]) for one in [*tokens, *spell(kind, "😀")[:cut]]) == whole
    assert detokenizer.holds
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@SHORT
@given(data=st.binary(max_size=24), size=st.integers(1, 5))
def test_any_bytes_at_all(kind: str, data: bytes, size: int) -> None:
    tokens = [KINDS[kind]().token_to_id(f"<0x{byte:02X}>") for byte in data]
    detokenizer = bundle_of(kind).detokenizer(True)
    shown = "".join(detokenizer.feed(tokens[at : at + size]) for at in range(0, len(tokens), size))
    whole = data.decode("utf-8", "replace")
    assert shown + detokenizer.flush() == (whole.removeprefix(" ") if kind == "llama" else whole)


@EVERY_KIND
@SHORT
@given(data=st.data(), skip=st.booleans())
def test_an_answer_continues_its_prompt(kind: str, data: st.DataObject, skip: bool) -> None:
    """Cut anywhere, within a character too: the text of both is that of all tokens."""
    tokens = data.draw(whole_tokens(kind))
    cut = data.draw(st.integers(0, len(tokens)))
    decode = KINDS[kind]().decode
    before = bundle_of(kind).detokenizer(skip)
    prompt = before.feed(tokens[:cut])
    after = bundle_of(kind).detokenizer(skip)
    after.follow(tokens[:cut])
    answer = "".join(after.feed([one]) for one in tokens[cut:]) + after.flush()
    assert prompt + answer == decode(tokens, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
@pytest.mark.parametrize("answer", ["", "x", "é", "😀"])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_what_a_prompt_begins_and_no_answer_ends(kind: str, answer: str, cut: int) -> None:
    for shown, broken in ((False, ""), (True, "\ufffd")):
        detokenizer = bundle_of(kind).detokenizer(True)
        detokenizer.follow(spell(kind, "a漢😀")[: 4 + cut], shown=shown)
        text = "".join(detokenizer.feed([one]) for one in spell(kind, answer))
        assert text + detokenizer.flush() == broken + answer


def test_spaces_of_words_stay_behind_a_prompt() -> None:
    for kind in ("llama", "gemma", "metaspace"):
        the, a, start = (KINDS[kind]().token_to_id(name) for name in ("▁the", "▁a", "<s>"))
        first = bundle_of(kind).detokenizer(True)
        first.follow([start])
        assert first.feed([the, a]) == (" the a" if kind == "gemma" else "the a")
        behind = bundle_of(kind).detokenizer(True)
        behind.follow([start, the])
        assert behind.feed([the, a]) == " the a"


def naive(text: str, stops: list[str], keep: bool) -> tuple[str, bool]:
    """Up to the first place where a stop string ends, by trying all of them."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if keep else end - len(stop)], True
    return text, False


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
@SHORT
@given(
    words=st.lists(st.text("ab é漢😀", max_size=5), max_size=8),
    stops=st.lists(st.text("ab é漢", min_size=1, max_size=6), max_size=3),
    min_tokens=st.integers(0, 12),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    keep=st.booleans(),
    finish=st.sampled_from([Finish.STOP, Finish.LENGTH]),
)
def test_stop_strings_wherever_the_tokens_end(
    kind: str, words: list[str], stops: list[str], min_tokens: int, cuts: list[int], keep: bool, finish: Finish
) -> None:
    """A token a byte. A stop string counts when all of it comes after the first tokens' whole characters."""
    whole = "".join(words).lstrip(" ")  # Llama's kind would strip one
    free = len(whole.encode()[:min_tokens].decode(errors="ignore"))
    found, stopped = naive(whole[free:], stops, keep)
    rules = TextRules(stops, min_tokens, keep_stop=keep)
    choice, shown = ChoiceText(bundle_of(kind).detokenizer(True), rules), ""
    for piece in pieces_of(spell(kind, whole), cuts):
        shown += choice.feed(piece, Finish.NONE)
        assert (whole[:free] + found).startswith(shown)
    shown += choice.feed([0] if finish is Finish.STOP and not keep else [], finish)
    assert shown == whole[:free] + found
    assert choice.finish_reason == ("stop" if stopped or finish is Finish.STOP else "length")


def test_a_stop_token_is_shown_where_the_stop_is_to_be_kept() -> None:
    tokens = tiny_text.byte_ids(b"ab!")
    for keep, skip, end, shown in (
        (False, True, tokens[2], "ab"),
        (True, True, tokens[2], "ab!"),
        (True, True, tiny_text.special(tiny_text.END), "ab"),
        (True, False, tiny_text.special(tiny_text.END), "ab<|im_end|>"),
    ):
        choice = ChoiceText(bundle_of("byte-level").detokenizer(skip), TextRules(keep_stop=keep))
        assert choice.feed([*tokens[:2], end], Finish.STOP) == shown
        assert (choice.tokens, choice.finish_reason) == (3, "stop")


def test_a_prompt_whose_last_tokens_begin_within_a_character() -> None:
    """Decoders of bytes show a whole row of them as broken when its first one is."""
    tokens = [*spell("otherwise", "éa漢"), *spell("otherwise", "😀")]
    for cut in range(len(tokens) + 1):
        after = bundle_of("otherwise").detokenizer(True)
        after.follow(tokens[:cut])
        answer = "".join(after.feed([one]) for one in tokens[cut:]) + after.flush()
        begun = [0, 0, 2, 3, 3, 3, 6, 6, 6, 6, 10]  # bytes of whole characters before the cut: 2, 1, 3 and 4 long
        assert answer == "éa漢😀".encode()[begun[cut] :].decode()
