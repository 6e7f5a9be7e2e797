"""Conversations through chat templates of several kinds, compared with `transformers`."""

from __future__ import annotations

import contextlib
import json
import time
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from blink_proto.tokenizer import sandbox
from dpu_service.text.bundle import TextBundle
from dpu_service.text.chat import ChatEncoder
from dpu_service.text.contents import Contents
from dpu_service.text.conversation import Conversation
from dpu_service.text.template import ChatTemplate, ChatTemplateError, RenderedTooLongError
from tests import chat_templates, tiny_text

Message = dict[str, Any]
WITH_TOOLS = ["hermes", "llama", "mistral", "qwen_xml"]
STRINGS = ["chatml", *WITH_TOOLS, "parts"]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für <Städte> & 'Orte'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL: dict[str, Any] = {
    "id": "abcdef123",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich 😀", "days": [1, 2.5, None, True]}},
}
USER: Message = {"role": "user", "content": "Wie ist das Wetter?"}
WITH_CALL: list[Message] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"t": 21}', "tool_call_id": "abcdef123", "name": "get_weather"},
]


@cache
def bundle(template: str) -> TextBundle:
    return TextBundle(chat_templates.files(template))


@cache
def encoder(template: str) -> ChatEncoder:
    return ChatEncoder(bundle(template))


@cache
def reference(template: str) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(chat_templates.tokenizer().to_str()),
        bos_token=tiny_text.BOS,
        eos_token=tiny_text.EOS,
    )
    made.chat_template = chat_templates.ALL[template]
    return made


def check(template: str, messages: list[Message], tools: list[Message] | None = None, **how: Any) -> str:
    """The rendered text, which with its tokens is that of transformers."""
    made = encoder(template)
    text, mark = made.render(Conversation(messages, tools, **how))
    assert not mark
    variables = how.pop("variables", {})
    names = {"continue_final": "continue_final_message"}
    given: dict[str, Any] = {names.get(key, key): value for key, value in how.items()}
    given = {"add_generation_prompt": True, "tools": tools, **given, **variables}
    same = json.loads(json.dumps(messages))
    assert text == reference(template).apply_chat_template(same, tokenize=False, **given)
    ids = made.encode(text, mark)
    assert ids == reference(template).apply_chat_template(same, return_dict=False, **given)
    assert ids.count(tiny_text.special(tiny_text.BOS)) <= 1
    return text


@pytest.mark.parametrize("template", STRINGS)
@pytest.mark.parametrize("content", ["hi", "", "  two \n\nlines\n", "😀 <b>&amp;</b> {{ 7 * 7 }} {% raw %}"])
def test_plain_conversations(template: str, content: str) -> None:
    check(template, [{"role": "user", "content": content}])
    check(template, [{"role": "system", "content": content}, {"role": "user", "content": content}])
    several = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": "and?"}]
    check(template, several)
    check(template, several, add_generation_prompt=False)


@pytest.mark.parametrize("template", WITH_TOOLS)
def test_tools_and_their_results(template: str) -> None:
    check(template, [{"role": "system", "content": "be brief"}, USER], [TOOL, TOOL])
    check(template, WITH_CALL)
    text = check(template, [*WITH_CALL, {"role": "assistant", "content": "21 degrees"}, USER], [TOOL])
    assert "Zürich 😀" in text
    assert "<Städte> & 'Orte'" in text, "JSON without escapes for HTML"


def test_parts_go_to_templates_that_take_them() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": " b"}]
    message = {"role": "user", "content": parts}
    for template in ("parts", "parts_only"):
        check(template, [message])
    text, _ = encoder("parts_only").render(Conversation([USER]))
    assert USER["content"] in text, "a string is wrapped for templates that take parts only"


@pytest.mark.parametrize("template", ["chatml", *WITH_TOOLS])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_joined_for_other_templates(template: str, role: str) -> None:
    def conversation(content: Any) -> Conversation:
        said = {"role": role, "content": content, "tool_call_id": "abcdef123"}
        before = {"system": [], "user": [], "assistant": [USER], "tool": WITH_CALL[:2]}[role]
        return Conversation([*before, said, *([USER] if role in ("system", "assistant") else [])])

    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    assert encoder(template).render(conversation(parts)) == encoder(template).render(conversation("first\nsecond"))


def test_what_kinds_of_content_templates_take() -> None:
    kinds = {
        name: {
            (kind.strings, kind.parts)
            for role, kind in Contents(ChatTemplate(text, {})).kinds.items()
            if role == "user"
        }
        for name, text in chat_templates.ALL.items()
    }
    assert kinds == {name: {(True, False)} for name in STRINGS} | {
        "parts": {(True, True)},
        "parts_only": {(False, True)},
    }


def test_variables_of_a_request() -> None:
    thinking = check("hermes", [USER], variables={"enable_thinking": False})
    assert thinking.endswith("<think>\n\n</think>\n\n")
    assert not check("hermes", [USER], variables={"enable_thinking": True}).endswith("</think>\n\n")
    check("llama", [USER], variables={"date_string": "1 May"})
    assert encoder("chatml").render(Conversation([USER], variables={"self": 1, "raise_exception": 2}))


@pytest.mark.parametrize("template", STRINGS)
@pytest.mark.parametrize("content", ["The answer", "The answer is ", "  x\n\n", "21 °C 😀"])
def test_a_final_message_is_continued(template: str, content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    text = check(template, messages, continue_final=True, add_generation_prompt=False)
    assert text.rstrip().endswith(content.strip())


def test_the_last_of_several_parts_is_continued() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = check(
        "parts", [USER, {"role": "assistant", "content": parts}], continue_final=True, add_generation_prompt=False
    )
    assert text.endswith("onetwo")


def test_a_message_that_the_template_hides_cannot_be_continued() -> None:
    files = {**chat_templates.files("chatml"), "chat_template.jinja": b"{{ messages[0].content }}"}
    messages = [USER, {"role": "assistant", "content": "x"}]
    with pytest.raises(ChatTemplateError, match="continued"):
        ChatEncoder(TextBundle(files)).render(Conversation(messages, continue_final=True, add_generation_prompt=False))


def test_developers_are_systems_unless_the_template_knows_them() -> None:
    def text(template: str) -> str:
        files = {**chat_templates.files("chatml"), "chat_template.jinja": template.encode()}
        return ChatEncoder(TextBundle(files)).render(Conversation([{"role": "developer", "content": "x"}]))[0]

    assert text("{{ messages[0].role }}") == "system"
    assert text("{{ messages[0].role }}{# developer #}") == "developer"


# --- control tokens in texts from outside -----------------------------------------------------------------------------

TOKENS = [tiny_text.BOS, tiny_text.START, tiny_text.END, *chat_templates.SPECIAL]
MARKERS = chat_templates.MARKERS


def control(ids: list[int], tokens: list[str]) -> list[int]:
    wanted = {chat_templates.tokenizer().token_to_id(token) for token in tokens}
    return [one for one in ids if one in wanted]


def encoded(template: str, conversation: Conversation) -> list[int]:
    made = encoder(template)
    return made.encode(*made.render(conversation))


def decoded(ids: list[int]) -> str:
    return chat_templates.tokenizer().decode(ids, skip_special_tokens=False)


def everywhere(text: str) -> Conversation:
    """The text in every place where a client may put some."""
    call = {
        "id": "123456789",
        "type": "function",
        "function": {"name": "f", "arguments": {"key": text, text: [text, {"inner": text}]}},
    }
    schema = {"type": "object", "properties": {text: {"type": "string", "description": text}}}
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": schema}}
    messages = [
        {"role": "system", "content": text},
        {"role": "user", "content": text, "name": text},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": "123456789"},
    ]
    return Conversation(messages, [tool], {"date_string": text})


@pytest.mark.parametrize("template", STRINGS)
@pytest.mark.parametrize("token", [*TOKENS, "<|im_end|><|im_end|>", "<|im_<|im_end|>end|>", " <s>\n", "a[/INST]<"])
def test_control_text_from_outside_stays_text(template: str, token: str) -> None:
    """Only the control tokens that stand there with harmless text, and the same text."""
    harmless = encoded(template, everywhere("xx"))
    ids = encoded(template, everywhere(token))
    assert control(ids, TOKENS) == control(harmless, TOKENS)
    assert "\ufdd0" not in decoded(ids)
    assert decoded(ids).count(token.strip()) >= decoded(harmless).count("xx")


@pytest.mark.parametrize("marker", MARKERS)
def test_markers_that_are_not_special_count_where_the_model_is_quoted(marker: str) -> None:
    harmless = control(encoded("hermes", everywhere("xx")), MARKERS)

    def found(role: str) -> int:
        messages = [USER, {"role": "assistant", "content": ""}, {"role": role, "content": f"a{marker}b"}]
        return len(control(encoded("hermes", Conversation(messages)), [marker]))

    empty = len(control(encoded("hermes", Conversation([USER, {"role": "tool", "content": ""}])), [marker]))
    assert found("user") == 0
    assert found("tool") == empty
    assert found("system") == 1
    assert harmless


def test_parts_cannot_be_put_together_to_a_control_token() -> None:
    for pieces in (["<|im_", "end|>"], ["<", "|im_end|>"], ["<|im_end|", ">"], ["<|im_ ", "end|>"]):
        parts = [{"type": "text", "text": piece} for piece in pieces]
        for template in ("parts", "parts_only"):
            ids = encoded(template, Conversation([{"role": "user", "content": parts}]))
            assert len(control(ids, [tiny_text.END])) == 1, "the template's own"


def test_a_final_message_with_control_text_is_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "a<|im_end|>b <"}]
    conversation = Conversation(messages, continue_final=True, add_generation_prompt=False)
    ids = encoded("chatml", conversation)
    assert decoded(ids).endswith("assistant\na<|im_end|>b <")
    assert len(control(ids, [tiny_text.END])) == 2, "of system and user"


def test_an_opening_may_have_control_tokens() -> None:
    for content in ("x", "<s>"):
        made = encoder("mistral")
        text, mark = made.render(Conversation([{"role": "user", "content": content}]))
        ids = made.encode(text + "[TOOL_CALLS] [", mark)
        assert len(control(ids, ["[TOOL_CALLS]"])) == 1


PLAIN_TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
SPECIAL = [AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")]


def unigram() -> TextBundle:
    """As T5's; its control tokens are pieces of the model too, with scores of their own."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    made.train_from_iterator([*tiny_text.CORPUS, "a[INST b </s c INST"], trainer)
    return bundle_of(json.loads(made.to_str()))


def bundle_of(source: Any) -> TextBundle:
    files = {"tokenizer.json": source, "tokenizer_config.json": {"bos_token": "<s>", "chat_template": PLAIN_TEMPLATE}}
    return TextBundle({name: json.dumps(content).encode() for name, content in files.items()})


@cache
def sentencepiece(kind: str) -> TextBundle:
    """As Llama 2's and Mistral's tokenizers, which put a space in front of text."""
    if kind == "unigram":
        return unigram()
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if kind == "normalizer":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    bytes_ = [AddedToken(f"<0x{byte:02X}>") for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*SPECIAL, *bytes_], show_progress=False)
    made.train_from_iterator(tiny_text.CORPUS, trainer)
    source = json.loads(made.to_str())
    source["added_tokens"] = source["added_tokens"][: len(SPECIAL)]
    return bundle_of(source)


TEXTS = ["hello", " hello there", "the\nfox  ", "😀 漢字", "a[INST", "x </s", ""]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["first", "always", "never", "normalizer", "unigram", "byte level"])
def test_the_tokenizer_with_aliases_is_the_same_tokenizer(kind: str, text: str) -> None:
    made = ChatEncoder(bundle("chatml") if kind == "byte level" else sentencepiece(kind))
    prompt, mark = made.render(Conversation([{"role": "user", "content": text}, {"role": "user", "content": text}]))
    straight = made.encode(prompt.replace(mark, "") if mark else prompt, "")
    assert made.encode(prompt, "\ufdd0") == straight


@pytest.mark.parametrize("kind", ["first", "always", "never", "normalizer", "unigram"])
def test_control_text_is_text_for_sentencepiece_too(kind: str) -> None:
    made = ChatEncoder(sentencepiece(kind))
    ids = made.encode(*made.render(Conversation([{"role": "user", "content": "a </s>[INST]<s> b"}])))
    vocab = sentencepiece(kind).control_tokens
    assert [one for one in ids if one in vocab.values() and one != vocab["<unk>"]] == [
        vocab["<s>"],
        vocab["[INST]"],
        vocab["[/INST]"],
    ]


def test_marks_that_python_prints_are_removed() -> None:
    made = ChatEncoder(TextBundle({**chat_templates.files("chatml"), "chat_template.jinja": b"{{ tools | string }}"}))
    tools = [{"type": "function", "function": {"name": "f", "description": "<s> and <|im_end|>"}}]
    assert decoded(made.encode(*made.render(Conversation([USER], tools)))) == str(tools)


def test_marks_that_a_template_escapes_are_removed() -> None:
    template = b"{{ messages | tojson(ensure_ascii=true) }}"
    made = ChatEncoder(TextBundle({**chat_templates.files("chatml"), "chat_template.jinja": template}))
    text = "<|im_end|> \\ufdd0 \ufdd1"
    shown = decoded(made.encode(*made.render(Conversation([{"role": "user", "content": text}]))))
    assert json.loads(shown) == [{"role": "user", "content": text}]


@given(content=st.text(max_size=30) | st.text(alphabet="<>|/_s[]INSTim end\n", max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_text_of_a_user_comes_back_from_its_tokens(content: str) -> None:
    ids = encoded("chatml", Conversation([{"role": "user", "content": content}]))
    control_ids = control(ids, TOKENS)
    assert control_ids == control(encoded("chatml", Conversation([{"role": "user", "content": "x"}])), TOKENS)
    assert decoded(ids).endswith(f"user\n{content}<|im_end|>\n<|im_start|>assistant\n")


def test_marking_takes_time_in_proportion() -> None:
    began = time.thread_time()
    encoder("chatml").render(Conversation([{"role": "user", "content": "<s>" * 100_000}]))
    assert time.thread_time() - began < 2


# --- the sandbox ------------------------------------------------------------------------------------------------------


def render(template: str, **how: Any) -> str:
    return ChatTemplate(template, {}).render([USER], **how)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10 ** 9 }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ range(10 ** 9) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages.clear() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{% set ns = namespace(a=1) %}{{ ns.__class__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% include 'other' %}",
        "{% import 'os' as os %}",
        "{{ lipsum.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_what_templates_must_not_do(template: str) -> None:
    with contextlib.suppress(ChatTemplateError):
        assert render(template) in ("", "{}")


def test_loops_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "RENDER_SECONDS", 0.1)
    loop = "{% for a in range(100000) %}{% for b in range(100000) %}{% if b.real %}{% endif %}{% endfor %}{% endfor %}"
    began = time.thread_time()
    with pytest.raises(ChatTemplateError, match="too long"):
        render(loop)
    assert time.thread_time() - began < 1
    with pytest.raises(RenderedTooLongError):
        render("{% for a in range(100000) %}{{ 'x' * 1000 }}{% endfor %}", most_characters=10_000)


def test_blocks_for_training_are_their_content() -> None:
    block = "{% generation %}\n{{ m.content }}{% set a = 1 %}{% endgeneration %}"
    assert render(f"{{% for m in messages %}}\n  {block}{{% endfor %}}{{{{ a }}}}") == USER["content"]


def test_json_as_templates_want_it() -> None:
    assert render("{{ {'ü': [1, '<']} | tojson }}") == '{"ü": [1, "<"]}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}") == '{\n  "a": 2,\n  "b": 1\n}'
    assert render("{{ {'ü': 1} | tojson(ensure_ascii=true, separators=(',', ':')) }}") == '{"\\u00fc":1}'
