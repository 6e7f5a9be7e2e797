"""Tools through LiteLLM, which puts streams of calls together in a way of its own."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for its price list

import litellm
from checks import MODEL, run, told

ARGUMENTS = '{"city": "Zürich 😀"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def _ask(url: str, prompt: str, **more: Any) -> Any:
    options = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0, "timeout": 20}
    messages = [{"role": "user", "content": prompt}]
    return litellm.completion(**options, messages=messages, tools=[TOOL], max_tokens=500, **more)


def _calls(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


def check_calls(url: str) -> None:
    choice = _ask(url, told(f"{CALL}\n{CALL}")).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert _calls(choice.message) == [("weather", json.loads(ARGUMENTS))] * 2


def check_calls_in_a_stream(url: str) -> None:
    chunks = list(_ask(url, told(f"Well.\n{CALL}\n{CALL}", every=0.001), stream=True))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.content == "Well.\n"
    assert _calls(whole.choices[0].message) == [("weather", json.loads(ARGUMENTS))] * 2


def check_a_forced_call(url: str) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    for stream in (False, True):
        answer = _ask(url, told(f" {ARGUMENTS}}}\n</tool_call>"), tool_choice=choice, stream=stream)
        whole = litellm.stream_chunk_builder(list(answer)) if stream else answer
        assert _calls(whole.choices[0].message) == [("weather", json.loads(ARGUMENTS))]


if __name__ == "__main__":
    run(globals())
