"""What applications do with the openai package."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
from checks import MODEL, TEXT, raises, run, told


def _client(url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 20, **options})


def _messages(text: str) -> Any:
    return [{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}]


def check_completion(url: str) -> None:
    answer = _client(url).completions.create(model=MODEL, prompt=told(), max_tokens=100)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def check_chat(url: str) -> None:
    answer = _client(url).chat.completions.create(model=MODEL, messages=_messages(told()))
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None


def check_content_parts(url: str) -> None:
    parts: Any = [{"type": "text", "text": "first"}, {"type": "text", "text": told("parts")}]
    answer = _client(url).chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == "parts"


def check_completion_stream(url: str) -> None:
    events = list(
        _client(url).completions.create(
            model=MODEL, prompt=told(), max_tokens=100, stream=True, stream_options={"include_usage": True}
        )
    )
    *chunks, last = events
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks)


def check_chat_stream(url: str) -> None:
    events = list(_client(url).chat.completions.create(model=MODEL, messages=_messages(told(every=0.002)), stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == TEXT
    assert [event.choices[0].finish_reason for event in events if event.choices[0].finish_reason] == ["stop"]
    assert len({event.id for event in events}) == 1


def check_several_choices(url: str) -> None:
    prompts = [told("one"), told("two")]
    answer = _client(url).completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=50)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["one", "one", "two", "two"]
    texts = ["", "", ""]
    for event in _client(url).chat.completions.create(model=MODEL, messages=_messages(told()), n=3, stream=True):
        texts[event.choices[0].index] += event.choices[0].delta.content or ""
    assert texts == [TEXT] * 3


def check_token_ids(url: str) -> None:
    answer = _client(url).completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=50)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    answer = _client(url).completions.create(model=MODEL, prompt=[[5], [6, 7]], max_tokens=50)
    assert len(answer.choices) == 2


def check_logprobs(url: str) -> None:
    answer = _client(url).completions.create(model=MODEL, prompt=told("abc"), max_tokens=50, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == "abc"
    assert all(value <= 0 for value in logprobs.token_logprobs or [] if value is not None)
    chat = _client(url).chat.completions.create(
        model=MODEL, messages=_messages(told("abc")), logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
    assert content is not None
    assert "".join(entry.token for entry in content) == "abc"
    assert all(len(entry.top_logprobs) == 2 for entry in content)


def check_stop_and_length(url: str) -> None:
    answer = _client(url).completions.create(model=MODEL, prompt=told("one two three"), max_tokens=50, stop=["two"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one ", "stop")
    answer = _client(url).completions.create(model=MODEL, prompt=told("one two three"), max_tokens=2)
    assert answer.choices[0].finish_reason == "length"


def check_errors(url: str) -> None:
    client = _client(url)
    wrong = raises(openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt="x", temperature=3))
    assert (wrong.param, wrong.code, wrong.type) == ("temperature", "invalid_value", "invalid_request_error")
    missing = raises(openai.NotFoundError, lambda: client.completions.create(model="none", prompt="x"))
    assert missing.code == "model_not_found"
    long = raises(openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt="x y " * 9000))
    assert long.code == "context_length_exceeded"
    failed = raises(
        openai.InternalServerError, lambda: client.completions.create(model=MODEL, prompt=told("", finish="error"))
    )
    assert failed.status_code == 500


def check_an_error_within_a_stream(url: str) -> None:
    stream = _client(url).chat.completions.create(
        model=MODEL, messages=_messages(told("some text", finish="error", every=0.02)), stream=True
    )
    said: list[Any] = []
    raises(openai.APIError, lambda: said.extend(stream))
    assert said == [] or said[0].choices[0].delta.role == "assistant"


def check_timeout(url: str) -> None:
    began = time.monotonic()
    client = _client(url, timeout=0.3)
    raises(openai.APITimeoutError, lambda: client.completions.create(model=MODEL, prompt=told(delay=5), max_tokens=50))
    assert time.monotonic() - began < 3


def check_leaving_a_stream(url: str) -> None:
    with _client(url).completions.create(
        model=MODEL, prompt=told("a b c d e f g " * 50, every=0.02), max_tokens=900, stream=True
    ) as stream:
        assert next(iter(stream)).choices[0].text


def check_models(url: str) -> None:
    client = _client(url)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    raises(openai.NotFoundError, lambda: client.models.retrieve("none"))


def check_raw_response(url: str) -> None:
    raw = _client(url).completions.with_raw_response.create(model=MODEL, prompt=told("raw"), max_tokens=50)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].text == "raw"


def check_many_at_once(url: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:

            async def one(i: int) -> str:
                stream = await client.completions.create(
                    model=MODEL, prompt=told(f"number {i}", every=0.002), max_tokens=50, stream=True
                )
                return "".join([event.choices[0].text async for event in stream])

            return await asyncio.gather(*map(one, range(20)))

    assert asyncio.run(ask()) == [f"number {i}" for i in range(20)]


if __name__ == "__main__":
    run(globals())
