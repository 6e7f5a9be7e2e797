"""Stop strings against the plain definition: everything before the first place where one completes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpu_service.text.stops import StopStrings


def expected(text: str, stops: list[str]) -> str:
    """By trying every end, then every stop string, longest first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text("ab\n", max_size=4), max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_pieces_give_what_the_whole_gives(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        assert "".join(pieces).startswith(shown)
        assert len(shown) <= len(expected("".join(pieces), stops))
    shown += matcher.flush() if matcher.matched is None else ""
    assert shown == expected("".join(pieces), stops)


def test_only_what_may_become_a_stop_string_is_held() -> None:
    matcher = StopStrings(["\n", "Alice:"])
    assert [matcher.feed(text) for text in (" ", "Ali", "ce", "!")] == [" ", "", "", "Alice!"]
    matcher = StopStrings(["DEFGHIJ"])
    assert [matcher.feed(text) for text in ("ABC", "DEF", "GH", "X")] == ["ABC", "", "", "DEFGHX"]


@pytest.mark.parametrize(("stop", "text"), [("aab", "aaab"), ("abab", "ababab")])
def test_overlapping_beginnings(stop: str, text: str) -> None:
    matcher = StopStrings([stop])
    assert "".join(map(matcher.feed, text)) == text[: text.index(stop)]
    assert matcher.matched == stop
    assert matcher.feed("more") == ""
