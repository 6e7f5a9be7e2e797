"""What agents do with LangChain: tools bound, called and answered, and structured output by a forced call."""

from __future__ import annotations

import json
from typing import Any

from checks import MODEL, run, told
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

ARGUMENTS = {"city": "Zürich 😀", "days": 2}
CALL = f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': ARGUMENTS})}\n</tool_call>"


@tool
def weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return f"{city}: sun for {days} days"


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


def _model(url: str) -> ChatOpenAI:
    options: dict[str, Any] = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    return ChatOpenAI(**options, timeout=20, max_tokens=500)


def check_a_call_and_its_result(url: str) -> None:
    bound = _model(url).bind_tools([weather])
    asked = HumanMessage(told(f"Let me see.\n{CALL}"))
    answer = bound.invoke([asked])
    assert answer.content == "Let me see.\n"
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", ARGUMENTS)
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    last = bound.invoke([asked, answer, result, HumanMessage(told("Sun."))])
    assert (last.content, last.tool_calls) == ("Sun.", [])


def check_calls_in_a_stream(url: str) -> None:
    order = HumanMessage(told(f"{CALL}\n{CALL}", every=0.001))
    whole: Any = AIMessageChunk("")
    for chunk in _model(url).bind_tools([weather], tool_choice="auto").stream([order]):
        whole += chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("weather", ARGUMENTS)] * 2
    assert not whole.invalid_tool_calls


def check_structured_output(url: str) -> None:
    structured = _model(url).with_structured_output(Person, method="function_calling")
    assert structured.invoke(told(' {"name": "Ann", "age": 36}}\n</tool_call>')) == Person(name="Ann", age=36)


if __name__ == "__main__":
    run(globals())
