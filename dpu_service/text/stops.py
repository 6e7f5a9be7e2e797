"""Stop strings over text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence as Items


def _failure_links(pattern: str) -> list[int]:
    """For each prefix length, the longest proper prefix that is also a suffix of it (Knuth, Morris, Pratt)."""
    links = [0] * (len(pattern) + 1)
    at = 0
    for i in range(1, len(pattern)):
        while at and pattern[i] != pattern[at]:
            at = links[at]
        at += pattern[i] == pattern[at]
        links[i + 1] = at
    return links


class StopStrings:
    """Lets text through up to the first stop string that completes; that one comes out only where `keep` says so.

    Text that may yet become a stop string is held back. When several complete at the same character, the one that
    began first wins. The cost per character does not depend on what was held back.
    """

    def __init__(self, stops: Items[str], keep: bool = False) -> None:
        self._keep = keep
        self._patterns = [(stop, _failure_links(stop)) for stop in stops]
        self._states = [0] * len(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What may be shown now. Empty once a stop string has matched."""
        if self.matched is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        text_with_held = self._held + text
        for at in range(len(self._held), len(text_with_held)):
            length = self._advance(text_with_held[at])
            if length:
                self._held = ""
                return text_with_held[: at + 1 if self._keep else at + 1 - length]
        keep = max(self._states)
        cut = len(text_with_held) - keep
        self._held = text_with_held[cut:]
        return text_with_held[:cut]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Length of the longest stop string that `character` completes, or 0."""
        longest = 0
        for i, (pattern, links) in enumerate(self._patterns):
            at = self._states[i]
            while at and pattern[at] != character:
                at = links[at]
            at += pattern[at] == character
            self._states[i] = at
            if at == len(pattern) and at > longest:
                longest, self.matched = at, pattern
        return longest
