"""Conversations to token ids.

Text from outside never becomes a control token, be it in a message, a tool's description, an argument or a template's
variable. A conversation that contains the text of one is marked (see `marking`) before the template runs; what the
rendered text then has of control tokens is the template's own. They get aliases, the marks are removed, and a
tokenizer that knows control tokens only by their aliases does the rest. All other conversations take the straight way,
which gives what the reference implementations give.

Control tokens are those that the tokenizer calls special. Other added tokens that the template writes (`<tool_call>` in
some vocabularies) count as such in what users and tools say, but not in what a system or assistant message says.

No BOS is added: the template writes it where the model wants one.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from dpu_service.text.aliases import AliasedTokenizer
from dpu_service.text.bundle import TextBundle
from dpu_service.text.contents import Contents
from dpu_service.text.conversation import Conversation
from dpu_service.text.marking import ControlText, NoMarkError, unused_marks, without
from dpu_service.text.template import MOST_CHARACTERS, ChatTemplate, ChatTemplateError, Message, NoChatTemplateError

_TRUSTED = ("system", "developer", "assistant")
"""Roles whose messages may hold added tokens that are not special."""


class ChatEncoder:
    """Renders and tokenises conversations of one model.

    Raises:
        ChatTemplateError: a template does not compile.
    """

    def __init__(self, bundle: TextBundle) -> None:
        self._bundle = bundle
        sources = bundle.chat_templates
        self.templates = {name: ChatTemplate(source, bundle.template_constants) for name, source in sources.items()}
        self._contents = {name: Contents(template) for name, template in self.templates.items()}
        written = "\0".join(sources.values())
        self._special = ControlText(bundle.control_tokens)
        self._all = ControlText({*bundle.control_tokens, *(token for token in bundle.added_tokens if token in written)})
        self._aliased: AliasedTokenizer | None = None

    @property
    def takes_tools(self) -> bool:
        """Whether there is a template for conversations with tools."""
        return any(template.takes_tools for template in self.templates.values())

    @property
    def source(self) -> str:
        """All templates in one text, to look into."""
        return "\n".join(template.source for template in self.templates.values())

    def has_control_text(self, conversation: Conversation) -> bool:
        """Whether a text from outside would be taken for a control token."""
        if self._all.concerns([conversation.tools, conversation.variables]):
            return True
        return any(self._control(message).concerns(message) for message in conversation.messages)

    def render(self, conversation: Conversation, most_characters: int = MOST_CHARACTERS) -> tuple[str, str]:
        """The prompt's text, and the mark in it (empty when none was needed).

        Raises:
            ChatTemplateError: the template refuses the messages.
        """
        name = self._choose(conversation)
        try:
            mark = unused_marks(conversation.outside, 1)[0] if self.has_control_text(conversation) else ""
            messages = [self._fit(name, message) for message in conversation.messages]
            tools, variables = conversation.tools, conversation.variables
            if mark:
                messages = [self._marked(message, mark) for message in messages]
                tools, variables = self._all.mark(tools, mark), self._all.mark(variables, mark)
            tag = _open_end(messages, conversation, mark) if conversation.continue_final else ""
        except NoMarkError as error:
            raise ChatTemplateError(str(error)) from error
        text = self.templates[name].render(
            messages,
            tools,
            add_generation_prompt=conversation.add_generation_prompt,
            variables=variables,
            most_characters=most_characters,
        )
        return _cut(text, tag) if tag else text, mark

    def encode(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered prompt. May take long; safe to call in another thread."""
        if not mark:
            return _encode(self._bundle.tokenizer, text)
        if self._aliased is None:
            self._aliased = AliasedTokenizer(self._bundle.source, self._all.tokens)
        return _encode(self._aliased.tokenizer, without(self._aliased.rewrite(text, self._all.pattern), mark))

    def _choose(self, conversation: Conversation) -> str:
        """As `transformers` does: `tool_use` where there are tools and such a template."""
        for name in (["tool_use"] if conversation.tools else []) + ["default"]:
            if name in self.templates:
                return name
        raise NoChatTemplateError("this model has no chat template; use /v1/completions")

    def _fit(self, name: str, message: Message) -> Message:
        role = message["role"]
        if role == "developer" and "developer" not in self.templates[name].source:
            role = "system"
        return {**message, "role": role, "content": self._contents[name].fit(role, message["content"])}

    def _control(self, message: Message) -> ControlText:
        return self._special if message["role"] in _TRUSTED else self._all

    def _marked(self, message: Message, mark: str) -> Message:
        control = self._control(message)
        return {name: value if name == "role" else control.mark(value, mark) for name, value in message.items()}


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """`encode_batch_fast` lets the interpreter lock go; `encode` does not."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def _open_end(messages: list[Message], conversation: Conversation, mark: str) -> str:
    """Puts a tag behind the last message's text, at which the rendered prompt is cut; the tag.

    A space follows the tag, so that `_cut` can see whether the template trims.
    """
    tag = next(one for one in unused_marks(conversation.outside, 2) if one != mark)
    content: Any = messages[-1]["content"]
    if isinstance(content, str):
        content += f"{tag} "
    else:
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + f"{tag} "}]
    messages[-1] = {**messages[-1], "content": content}
    return tag


def _cut(text: str, tag: str) -> str:
    at = text.rfind(tag)
    if at < 0:
        raise ChatTemplateError("the chat template does not show the final message, so it cannot be continued")
    return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()
