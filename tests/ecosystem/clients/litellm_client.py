"""What applications do with LiteLLM, which speaks to this server as to any OpenAI-compatible one."""

from __future__ import annotations

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for its price list

import litellm
from checks import MODEL, TEXT, raises, run, told


def _options(url: str, **more: Any) -> dict[str, Any]:
    options = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0, "timeout": 20}
    return {**options, "max_tokens": 200, **more}


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def check_chat(url: str) -> None:
    answer = litellm.completion(messages=_messages(told()), **_options(url))
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 0


def check_chat_stream(url: str) -> None:
    events = list(
        litellm.completion(
            messages=_messages(told()), stream=True, stream_options={"include_usage": True}, **_options(url)
        )
    )
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == TEXT
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "stop"
    assert events[-1].usage.completion_tokens > 0


def check_several_choices(url: str) -> None:
    answer = litellm.completion(messages=_messages(told()), n=2, **_options(url))
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]


def check_completion(url: str) -> None:
    options = _options(url, model=f"text-completion-openai/{MODEL}")
    answer = litellm.text_completion(prompt=told(), **options)
    assert answer.choices[0].text == TEXT
    events = litellm.text_completion(prompt=told(), stream=True, **options)
    assert "".join(event.choices[0].text or "" for event in events) == TEXT


def check_logprobs(url: str) -> None:
    answer = litellm.completion(messages=_messages(told("abc")), logprobs=True, top_logprobs=2, **_options(url))
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == "abc"


def check_errors(url: str) -> None:
    raises(litellm.BadRequestError, lambda: litellm.completion(messages=[], **_options(url)))
    unknown = _options(url, model="openai/none")
    raises(litellm.NotFoundError, lambda: litellm.completion(messages=_messages("x"), **unknown))
    long = _messages("x y " * 9000)
    raises(litellm.ContextWindowExceededError, lambda: litellm.completion(messages=long, **_options(url)))


def check_an_error_within_a_stream(url: str) -> None:
    order = told("some text", finish="error", every=0.02)
    stream = litellm.completion(messages=_messages(order), stream=True, **_options(url))
    raises(Exception, lambda: list(stream))


def check_timeout(url: str) -> None:
    late = _options(url, timeout=0.3)
    raises(litellm.Timeout, lambda: litellm.completion(messages=_messages(told(delay=5)), **late))


if __name__ == "__main__":
    run(globals())
