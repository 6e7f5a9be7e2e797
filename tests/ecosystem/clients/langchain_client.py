"""What applications do with LangChain's package for OpenAI."""

from __future__ import annotations

from typing import Any

import openai
from checks import MODEL, TEXT, raises, run, told
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI


def _options(url: str, **more: Any) -> dict[str, Any]:
    options = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 20}
    return {**options, "max_tokens": 200, **more}


def check_chat(url: str) -> None:
    answer = ChatOpenAI(**_options(url)).invoke([("system", "Be kind."), ("human", told())])
    assert answer.content == TEXT
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0


def check_chat_stream(url: str) -> None:
    chunks = list(ChatOpenAI(**_options(url), stream_usage=True).stream(told()))
    assert "".join(str(chunk.content) for chunk in chunks) == TEXT
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0


def check_batch(url: str) -> None:
    answers = ChatOpenAI(**_options(url)).batch([told("one"), told("two"), told("three")])
    assert [answer.content for answer in answers] == ["one", "two", "three"]


def check_several_choices(url: str) -> None:
    result = ChatOpenAI(**_options(url), n=2).generate([[HumanMessage(told())]])
    assert [generation.text for generation in result.generations[0]] == [TEXT, TEXT]


def check_logprobs(url: str) -> None:
    answer = ChatOpenAI(**_options(url)).bind(logprobs=True, top_logprobs=2).invoke(told("abc"))
    assert "".join(entry["token"] for entry in answer.response_metadata["logprobs"]["content"]) == "abc"


def check_completion(url: str) -> None:
    model = OpenAI(**_options(url))
    assert model.invoke(told()) == TEXT
    assert "".join(model.stream(told())) == TEXT
    assert [one[0].text for one in model.generate([told("one"), told("two")]).generations] == ["one", "two"]


def check_errors(url: str) -> None:
    raises(openai.NotFoundError, lambda: ChatOpenAI(**_options(url, model="none")).invoke("x"))
    raises(openai.BadRequestError, lambda: ChatOpenAI(**_options(url, temperature=3)).invoke("x"))
    raises(ContextOverflowError, lambda: ChatOpenAI(**_options(url)).invoke("x y " * 9000))
    order = told("some text", finish="error", every=0.02)
    raises(openai.APIError, lambda: list(ChatOpenAI(**_options(url)).stream(order)))


def check_timeout(url: str) -> None:
    raises(openai.APITimeoutError, lambda: ChatOpenAI(**_options(url, timeout=0.3)).invoke(told(delay=5)))


if __name__ == "__main__":
    run(globals())
