"""What `blink up` prints once it serves: how to call the server."""

from __future__ import annotations

from collections.abc import Sequence

_TEXT = """\

Blink serves {model} (Ctrl-C ends it)

  {urls}

  curl {flag}{url}/v1/chat/completions -H 'content-type: application/json' {auth}-d '{{
    "model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{plain}/v1", api_key="{key}")
  answer = client.chat.completions.create(
      model="{model}", messages=[{{"role": "user", "content": "What is the capital of France?"}}])
  print(answer.choices[0].message.content)

  Administration: blinkctl --runtime {control} status{others}
"""


def usage_text(
    model: str, https: str, http: str, control: str, others: Sequence[str] = (), *, guarded: bool = False
) -> str:
    """The text; `https` and `http` are base URLs, empty when that port is off; `others`: control planes of further
    runtimes; `guarded`: callers need a key."""
    return _TEXT.format(
        model=model,
        urls="   ".join(url for url in (https, http) if url),
        flag="-k " if https else "",
        url=https or http,
        plain=http or https,
        control=control,
        others=f"   (further runtimes: {', '.join(others)})" if others else "",
        auth='-H "authorization: Bearer $KEY" ' if guarded else "",
        key="…" if guarded else "unused",
    )
