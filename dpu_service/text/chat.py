"""Chat messages to token ids.

Text that a user typed never becomes a control token. A message that contains the text of one gets a private
character put into that text before the template runs, so that the template's own control tokens can still be told
from it afterwards; then the rendered text is cut at the control tokens, the private character is removed, and each
piece between them is tokenised by a tokenizer that is blind to control tokens. All other conversations take the
straight way, which gives what the reference implementations give.

No BOS is added: the template writes it where the model wants one.
"""

from __future__ import annotations

import re

from dpu_service.text.bundle import TextBundle
from dpu_service.text.template import ChatTemplate, ChatTemplateError

_PRIVATE = [*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xF0100)]
"""Characters that no text needs: noncharacters first, then private ones."""


class ChatEncoder:
    """Renders and tokenises conversations of one model."""

    def __init__(self, bundle: TextBundle) -> None:
        self._bundle = bundle
        self._template = ChatTemplate(bundle)
        tokens = sorted(bundle.control_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, tokens))) if tokens else None

    def has_control_text(self, messages: list[dict[str, str]]) -> bool:
        """Whether a message contains the text of a control token."""
        control = self._control
        return control is not None and any(control.search(message["content"]) for message in messages)

    def render(self, messages: list[dict[str, str]]) -> tuple[str, str]:
        """The prompt's text, and the private character in it (empty when none was needed).

        Raises:
            ChatTemplateError: the template refuses the messages.
        """
        if not self.has_control_text(messages):
            return self._template.render(messages), ""
        private = _unused([message["content"] for message in messages])
        marked = [{**message, "content": self._mark(message["content"], private)} for message in messages]
        return self._template.render(marked), private

    def encode(self, text: str, private: str) -> list[int]:
        """Token ids of a rendered prompt. May take long; safe to call in another thread."""
        if not private:
            return _encode(self._bundle.tokenizer, text)
        assert self._control is not None
        ids: list[int] = []
        at = 0
        for match in self._control.finditer(text):
            ids += self._encode_plain(text[at : match.start()], private)
            ids.append(self._bundle.control_tokens[match.group()])
            at = match.end()
        return ids + self._encode_plain(text[at:], private)

    def _encode_plain(self, text: str, private: str) -> list[int]:
        text = text.replace(private, "")
        return _encode(self._bundle.plain_tokenizer, text) if text else []

    def _mark(self, content: str, private: str) -> str:
        assert self._control is not None
        while match := self._control.search(content):
            cut = match.start() + 1
            content = content[:cut] + private + content[cut:]
        return content


def _encode(tokenizer: object, text: str) -> list[int]:
    """`encode_batch_fast` lets the interpreter lock go; `encode` does not."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)  # type: ignore[attr-defined]
    ids: list[int] = encoding.ids
    return ids


def _unused(contents: list[str]) -> str:
    for code in _PRIVATE:
        if not any(chr(code) in content for content in contents):
            return chr(code)
    raise ChatTemplateError("the messages use every private character")
