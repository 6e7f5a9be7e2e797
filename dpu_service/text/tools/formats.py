"""The formats of tool calls: which there are, which a model has, and what each needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dpu_service.text.tools.hermes import HermesParser
from dpu_service.text.tools.llama import LlamaParser
from dpu_service.text.tools.mistral import MistralParser
from dpu_service.text.tools.pieces import ToolParser
from dpu_service.text.tools.qwen_xml import QwenXmlParser

Schemas = Mapping[str, Any]
"""For each function of a request the JSON schema of its parameters."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls.

    Args:
        signs: texts of which a chat template has all when its model writes calls so.
        markers: tokens that a parser has to see, although they may be control tokens.
        opening: what a call begins with, up to its arguments; None where arguments are not one JSON object.
        id_characters: length of a call's id where the template wants one of its own, of letters and digits.
    """

    name: str
    signs: tuple[str, ...]
    markers: tuple[str, ...]
    parser: Callable[[Schemas, bool], ToolParser]
    opening: Callable[[str], str] | None
    id_characters: int = 0


FORMATS = (
    ToolFormat(
        "qwen_xml",
        ("<tool_call>", "<function=", "<parameter="),
        ("<tool_call>", "</tool_call>"),
        QwenXmlParser,
        None,
    ),
    ToolFormat(
        "hermes",
        ("<tool_call>", '"arguments"'),
        ("<tool_call>", "</tool_call>"),
        lambda schemas, parallel: HermesParser(parallel),
        lambda name: f'<tool_call>\n{{"name": "{name}", "arguments":',
    ),
    ToolFormat(
        "mistral_args",
        ("[TOOL_CALLS]", "[ARGS]"),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        lambda schemas, parallel: MistralParser(parallel),
        lambda name: f"[TOOL_CALLS]{name}[ARGS]",
        id_characters=9,
    ),
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        lambda schemas, parallel: MistralParser(parallel),
        lambda name: f'[TOOL_CALLS] [{{"name": "{name}", "arguments":',
        id_characters=9,
    ),
    ToolFormat(
        "llama3_json",
        ('"parameters"', '"name"'),
        ("<|python_tag|>",),
        lambda schemas, parallel: LlamaParser(frozenset(schemas), parallel),
        lambda name: f'{{"name": "{name}", "parameters":',
    ),
)
"""In the order in which they are tried."""
AUTO, NONE = "auto", "none"
CHOICES = (AUTO, NONE, *(one.name for one in FORMATS))
"""What an operator may choose."""


def find_format(choice: str, templates: str) -> ToolFormat | None:
    """The format of that name, or with `auto` the one whose signs a model's chat templates show."""
    if choice != AUTO:
        return next((one for one in FORMATS if one.name == choice), None)
    unescaped = templates.replace('\\"', '"')
    return next((one for one in FORMATS if all(sign in unescaped for sign in one.signs)), None)
