"""Small chat templates in the manner of model families: what they do with roles, tools and whitespace is theirs, the
wording is not."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer

from tests import tiny_text

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'Functions, one a line:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\nCall one with <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {%- set text = message.content %}
        {%- if '</think>' in text %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + text }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n' if text or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now('%d %b %Y') %}
{%- endif %}
{%- set system = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start|>system<|stop|>\\n\\nDate: ' + date_string + '\\n\\n' + system + '<|eot|>' }}
{%- for message in messages %}
    {%- if loop.first and tools is not none %}
        {{- '<|start|>user<|stop|>\\n\\nAnswer with {"name": name, "parameters": object} to call one of:\\n' }}
        {%- for tool in tools %}
            {{- tool | tojson(indent=4) + '\\n\\n' }}
        {%- endfor %}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|stop|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot|>' }}
    {%- elif message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start|>ipython<|stop|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot|>' }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|stop|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|stop|>\\n\\n' }}
{%- endif %}
{# the model may begin a call with <|python_tag|> #}
"""

MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- set ns = namespace(turn=0) %}
{%- for message in rest %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (ns.turn % 2 == 0) %}
            {{- raise_exception('roles must alternate') }}
        {%- endif %}
        {%- set ns.turn = ns.turn + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == rest[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- tool | tojson }}{{ ', ' if not loop.last }}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.last and system is defined else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none and message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('a call id has 9 characters') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {%- generation %}
        {{- ' ' + message.content | trim + eos_token }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

PARTS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}{% continue %}{% endif %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

PARTS_ONLY = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- for part in message['content'] if part['type'] == 'text' %}{{ part['text'] | trim }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

QWEN_XML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>\\n' }}{{ value if value is string else value | tojson }}
            {{- '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
    {%- if loop.first %}{% for tool in tools or [] %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

ALL = {
    "chatml": CHATML,
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "parts": PARTS,
    "parts_only": PARTS_ONLY,
    "qwen_xml": QWEN_XML,
}
SPECIAL = ["<|start|>", "<|stop|>", "<|eot|>", "<|python_tag|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"]
SPECIAL += ["[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[ARGS]"]
"""Control tokens that they write, beside those of `tiny_text`."""
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
"""Tokens that are not special, as in Qwen's vocabularies."""


@cache
def tokenizer() -> Tokenizer:
    """That of `tiny_text` with the tokens that these templates write."""
    made = Tokenizer.from_str(tiny_text.tokenizer().to_str())
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.add_tokens([AddedToken(token, special=False) for token in MARKERS])
    return made


def files(template: str) -> dict[str, bytes]:
    """Of a model with one of these templates, as the control plane hands them out."""
    config = {"bos_token": tiny_text.BOS, "eos_token": tiny_text.EOS, "chat_template": ALL[template]}
    return {"tokenizer.json": tokenizer().to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
