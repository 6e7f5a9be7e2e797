"""Where the text of each token begins, and which tokens have been shown in full."""

from __future__ import annotations

from collections import deque


class TokenPlaces:
    """Follows the tokens of one choice in their order.

    A token is settled once every character that it has a part in has been shown; one without any character (a silent
    control token), once the text before it has been.

    Args:
        start: characters in front of the text, which count in its offsets.
    """

    def __init__(self, start: int = 0) -> None:
        self._known = start
        self._shown = start
        self._over = False
        self._waiting: deque[tuple[int, int]] = deque()  # (offset, characters that must have been shown)

    def note(self, text: str, holds: bool) -> None:
        """The next token and the text that was complete with it.

        Args:
            holds: the token ends within a character.
        """
        offset, self._known = self._known, self._known + len(text)
        self._waiting.append((offset, self._known + holds))

    def show(self, text: str, over: bool) -> None:
        """Text that may be shown now, which is less than is known where a stop string may yet come of it.

        Args:
            over: no more text comes: all tokens are settled.
        """
        self._shown += len(text)
        self._over = over

    def take(self) -> list[int]:
        """Offsets in the text, in characters, of the tokens settled since the last call. A token that begins within a
        character has the offset of this character; one of a stop string may begin behind the text's end."""
        offsets = []
        while self._waiting and (self._over or self._waiting[0][1] <= self._shown):
            offsets.append(self._waiting.popleft()[0])
        return offsets
