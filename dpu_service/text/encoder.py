"""Texts to token ids without stopping the event loop: long ones are refused or tokenised in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dpu_service.text.bundle import TextBundle
from dpu_service.text.chat import ChatEncoder
from dpu_service.text.conversation import Conversation
from dpu_service.text.template import RenderedTooLongError
from dpu_service.text.tools.formats import AUTO, find_format

INLINE_CHARACTERS = 2048
"""Up to here tokenising takes well under a millisecond, less than handing it to a thread is worth."""
HEAD_CHARACTERS = 8
"""For each token of the window: of a longer text so much is tokenised first, which nearly always shows that it is too
long; words of plain text have 4 or 5 characters a token."""
_THREADS = 2
T = TypeVar("T")


class TextTooLongError(Exception):
    """A text that cannot fit the context window, told by its length or its beginning.

    Args:
        at_least: tokens that it has at least.
    """

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


class TextEncoder:
    """Tokenises for one worker.

    Args:
        window: tokens of a sequence at most.
        tool_parser: one of `formats.CHOICES`.
    """

    def __init__(self, bundle: TextBundle, window: int, tool_parser: str = AUTO) -> None:
        self.bundle = bundle
        self.chat = ChatEncoder(bundle)
        self.tool_format = find_format(tool_parser, self.chat.source)
        self._longest = bundle.longest_token * (4 if bundle.may_shrink else 1)
        self._window = window
        self._most_characters = window * self._longest
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenise")

    async def encode_openings(
        self, conversation: Conversation, openings: Items[str], *, bounded: bool = True
    ) -> list[list[int]]:
        """Token ids of a conversation that goes on with each of these texts.

        Args:
            openings: what the answer is made to begin with. It stands in the prompt; control tokens in it count.
            bounded: see `encode_text`.

        Raises:
            TextTooLongError: see `encode_text`.
            ChatTemplateError: the template refuses the messages.
        """
        self._check_length(conversation.message_characters)
        cost = conversation.cost
        if conversation.variables or (cost <= INLINE_CHARACTERS and self.chat.has_control_text(conversation)):
            cost += INLINE_CHARACTERS  # they may make the template slow; a second tokenizer may have to be loaded
        return await self.run(cost * len(openings), lambda: self._encode_openings(conversation, openings, bounded))

    async def encode_text(self, text: str, *, add_special: bool = True, bounded: bool = True) -> list[int]:
        """Token ids of a plain prompt: control tokens in it count as such, and BOS is added where the model's
        tokenizer does so, but never twice.

        Args:
            add_special: nothing is added where it is false.
            bounded: refuse what is over the window without tokenising all of it.

        Raises:
            TextTooLongError: by its characters alone or, where `bounded`, by its beginning.
        """
        self._check_length(len(text))
        return await self.run(len(text), lambda: self._encode_text(text, add_special, bounded))

    def close(self) -> None:
        """Lets the threads go once they are done."""
        self._threads.shutdown(wait=False)

    def _encode_openings(self, conversation: Conversation, openings: Items[str], bounded: bool) -> list[list[int]]:
        try:
            text, mark = self.chat.render(conversation, self._most_characters)
        except RenderedTooLongError as error:
            raise TextTooLongError(-(-self._most_characters // self._longest)) from error
        if bounded:
            self._check_head(text)
        return [self.chat.encode(text + opening, mark) for opening in openings]

    def _check_head(self, text: str) -> None:
        """Where the text is cut its tokens may be others than in the whole, but not by more than the longest one has
        characters."""
        most = HEAD_CHARACTERS * self._window
        if len(text) <= most:
            return
        (encoding,) = self.bundle.tokenizer.encode_batch_fast([text[:most]], add_special_tokens=False)
        if len(encoding) > self._window + self._longest:
            raise TextTooLongError(self._window + 1)

    def _encode_text(self, text: str, add_special: bool, bounded: bool) -> list[int]:
        if bounded:
            self._check_head(text)
        (encoding,) = self.bundle.tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encoding.ids
        bos = self.bundle.control_tokens.get(self.bundle.bos_token)
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _check_length(self, characters: int) -> None:
        if characters > self._most_characters:
            raise TextTooLongError(-(-characters // self._longest))

    async def run(self, cost: int, work: Callable[[], T]) -> T:
        """Does some work on a text, in a thread where it costs much.

        Args:
            cost: in characters tokenised.
        """
        if cost <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
