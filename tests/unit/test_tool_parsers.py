"""Parsers of tool calls: what is heard, however the text is cut, against a naive parser of whole texts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpu_service.text.tools.formats import FORMATS, find_format
from dpu_service.text.tools.json_walk import JsonWalk
from dpu_service.text.tools.pieces import RELEASE_CHARACTERS, CallPiece, Heard, ToolParser
from tests import chat_templates

SCHEMAS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"s": {"type": "string"}, "b": {"type": "boolean"}}},
    "get.weather": {},
}
Calls = list[tuple[str, str]]
BY_NAME = {one.name: one for one in FORMATS}
NAMES = list(BY_NAME)


def made(name: str, parallel: bool = True) -> ToolParser:
    return BY_NAME[name].parser(SCHEMAS, parallel)


def heard(parser: ToolParser, pieces: list[str]) -> list[Heard]:
    return [*map(parser.feed, pieces), parser.finish()]


def joined(news: list[Heard]) -> tuple[str, Calls]:
    """Content and calls, with what every stream of calls owes checked."""
    calls: Calls = []
    for piece in [piece for one in news for piece in one.calls]:
        if piece.name is not None:
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
        assert piece.index == len(calls) - 1
        name, arguments = calls[-1]
        calls[-1] = (name, arguments + piece.arguments)
    return "".join(one.content for one in news), calls


def whole(name: str, text: str, parallel: bool = True) -> tuple[str, Calls]:
    """By characters, in one piece and in pieces of 7: all must agree."""
    results = [
        joined(heard(made(name, parallel), [text[at : at + size] for at in range(0, len(text), size)]))
        for size in (1, 7, len(text) or 1)
    ]
    assert results[0] == results[1] == results[2]
    return results[0]


HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("format_", "text", "content", "calls"),
    [
        ("hermes", "just text", "just text", []),
        ("hermes", "", "", []),
        ("hermes", " \n", " \n", []),
        ("hermes", HERMES_CALL, "", [("f", '{"a": 1}')]),
        ("hermes", f"\n\nSure.\n{HERMES_CALL}\n", "\n\nSure.\n", [("f", '{"a": 1}')]),
        ("hermes", f"{HERMES_CALL}\n{HERMES_CALL}", "", [("f", '{"a": 1}')] * 2),
        ("hermes", f"{HERMES_CALL} and {HERMES_CALL}", " and ", [("f", '{"a": 1}')] * 2),
        ("hermes", '<tool_call>{"arguments": {"a": [{}]}, "name": "f"}</tool_call>', "", [("f", '{"a": [{}]}')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"id": [1, {"name": 2}], "name": "f", "arguments": {}}', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>!', "!", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}', "", [("unknown", "{}")]),
        ("hermes", HERMES_CALL[:-3], "", [("f", '{"a": 1}')]),
        (
            "hermes",
            '<tool_call>{"name": "\\u0066", "arguments": {"x": "</tool_call>\\"}"}}</tool_call>',
            "",
            [("f", '{"x": "</tool_call>\\"}"}')],
        ),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ("llama3_json", '\n{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        (
            "llama3_json",
            '{"name": "f", "parameters": {}}; {"name": "get.weather", "parameters": {}}',
            "",
            [("f", "{}"), ("get.weather", "{}")],
        ),
        ("llama3_json", '<|python_tag|>{"name": "other", "parameters": {}}', "", [("other", "{}")]),
        ("llama3_json", 'Hm. <|python_tag|>{"name": "f", "parameters": {}}', "Hm. ", [("f", "{}")]),
        ("llama3_json", '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
        ("llama3_json", '{"age": 5}', '{"age": 5}', []),
        ("llama3_json", 'It is {"name": "f", "parameters": {}}', 'It is {"name": "f", "parameters": {}}', []),
        ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("llama3_json", '{"name": "f", "parameters": {}}; so', "; so", [("f", "{}")]),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
        (
            "mistral",
            'Ok[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "123456789"}, {"name": "g", "arguments": {}}]',
            "Ok",
            [("f", "{}"), ("g", "{}")],
        ),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}', "", [("f", '{"a": 1}'), ("g", '{"b": 2}')]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        ("mistral", "[TOOL_CALLS] is a marker", "[TOOL_CALLS] is a marker", []),
        ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        ("mistral", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]", []),
        ("mistral", "[TOOL", "[TOOL", []),
        (
            "qwen_xml",
            "Go\n<tool_call>\n<function=f>\n<parameter=s>\n1\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
            "<parameter=b>True</parameter>\n<parameter=t>\nso\n so\n</parameter>\n</function>\n</tool_call>\n",
            "Go\n",
            [("f", '{"s": "1", "n": 2, "b": true, "t": "so\\n so"}')],
        ),
        ("qwen_xml", "<tool_call><function=f></function></tool_call>!", "!", [("f", "{}")]),
        ("qwen_xml", "<tool_call><function=f><parameter=s>a", "", [("f", '{"s": "a')]),
        ("qwen_xml", "<tool_call><function=f>", "<tool_call><function=f>", []),
        ("qwen_xml", "<tool_call><function=f>what", "<tool_call><function=f>what", []),
        ("qwen_xml", "<tool_call><function=f f>", "<tool_call><function=f f>", []),
        ("qwen_xml", "<tool_call><function=f><parameter=x>NaN</parameter></tool_call>", "", [("f", '{"x": "NaN"}')]),
    ],
)
def test_what_is_heard(format_: str, text: str, content: str, calls: Calls) -> None:
    assert whole(format_, text) == (content, calls)


MALFORMED = [
    "",
    " ",
    "{",
    "{}",
    "[]",
    "null",
    '{"name"',
    '{"name": "f"',
    '{"name": "f", "arguments": ',
    '{"name": "f", "arguments": {"a": 1',
    '{"name": "f", "arguments": {oops}}',
    "{'name': 'f', 'arguments': {}}",
    '{"name": "f", "arguments": {"a": True}}',
    '{"name": "f", "arguments": {"a": 01}}',
    '{"name": "f", "arguments": {"a": 1,}}',
    '{"name": "f", "arguments": {"a": "\n"}}',
    '{"name": "f", "arguments": {"a": "\\x"}}',
    '{"name": "f", "arguments": {"a": "\\u12g4"}}',
    '{"name": "f", "arguments": {"a": .5}}',
    '{"name": "f", "arguments": {"a": 1.}}',
    '{"name": "f", "arguments": {"a": nul}}',
    '{"name": "f", "arguments": [1}}',
    '{"name": "f", "arguments": []}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": 5, "arguments": {}}',
    '{"name": "", "arguments": {}}',
    '{"name": "a b", "arguments": {}}',
    '{"name": "f\\ud800", "arguments": {}}',
    '{"name": "f", "name": "g", "arguments": {}}',
    '{"arguments": {}, "arguments": {}, "name": "f"}',
    '{"name": "f", "arguments": {"a": ' + "[" * 70,
    '{"name": "f", "other": "' + "x" * 5000 + '", "arguments": {}}',
]


@pytest.mark.parametrize("broken", MALFORMED)
@pytest.mark.parametrize(
    ("format_", "before"), [("hermes", "<tool_call>"), ("llama3_json", ""), ("mistral", "[TOOL_CALLS]")]
)
def test_malformed_calls_are_content(format_: str, before: str, broken: str) -> None:
    text = f"{before}{broken}"
    assert whole(format_, text) == (text, [])
    if format_ == "hermes" and broken.count('"') % 2 == 0:
        again = f"{text} then {HERMES_CALL}"
        assert whole(format_, again) == (f"{text} then ", [("f", '{"a": 1}')])


def test_long_arguments_come_before_they_are_complete() -> None:
    value = "x" * 2 * RELEASE_CHARACTERS
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": "{value}"}}}}</tool_call>'
    news = heard(made("hermes"), list(text))
    first = next(i for i, one in enumerate(news) if one.calls)
    assert first < len(text) - RELEASE_CHARACTERS
    assert sum(len(one.calls) for one in news) > RELEASE_CHARACTERS
    assert joined(news) == ("", [("f", f'{{"a": "{value}"}}')])


@pytest.mark.parametrize("size", [RELEASE_CHARACTERS - 1, RELEASE_CHARACTERS, RELEASE_CHARACTERS + 1])
def test_a_flaw_behind_what_was_told_makes_the_rest_content(size: int) -> None:
    good = '{"a": "' + "x" * (size - 10) + '",'
    text = f'<tool_call>{{"name": "f", "arguments": {good}oops}}}}</tool_call>'
    assert len(good) == size - 1
    if size <= RELEASE_CHARACTERS:
        assert whole("hermes", text) == (text, [])
    else:
        assert whole("hermes", text) == ("oops}}</tool_call>", [("f", good)])


@pytest.mark.parametrize("format_", ["hermes", "mistral", "llama3_json", "qwen_xml"])
def test_only_the_first_call_where_one_is_wanted(format_: str) -> None:
    calls = {
        "hermes": HERMES_CALL + HERMES_CALL,
        "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "llama3_json": '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}',
        "qwen_xml": "<tool_call><function=f><parameter=a>1</parameter></function></tool_call><tool_call><function=f>",
    }
    parser = made(format_, parallel=False)
    assert joined(heard(parser, [calls[format_]])) == ("", [("f", '{"a": 1}')])
    assert parser.over
    assert whole(format_, calls[format_], parallel=False) == ("", [("f", '{"a": 1}')])


# --- random texts -----------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
argument_objects = st.dictionaries(st.text(max_size=8), json_values, max_size=4)
call_names = st.sampled_from(["f", "get.weather", "a-b_c", "n" * 128])
plain_text = st.text(alphabet="ab \n{}<>[]\"':,;é😀", max_size=20)
SOUP = st.lists(
    st.sampled_from(
        [
            *(
                "<tool_call>",
                "</tool_call>",
                "<tool_",
                "call>",
                "[TOOL_CALLS]",
                "[ARGS]",
                "[CALL_ID]",
                "<|python_tag|>",
            ),
            *(
                '{"name": "f", ',
                '"arguments": ',
                '"parameters": ',
                '{"a": 1}',
                "f",
                " ",
                "\n",
                '"',
                "\\",
                "1",
                "-",
                ";",
            ),
            *("<function=f>", "<function=", ">", "<parameter=s>", "</parameter>", "</function>", "text", "é", ": "),
            *("[", "]", "{", "}", ",", ";", "<|python_tag|>", "x" * 300),
        ]
    ),
    max_size=25,
).map("".join)


def cuts(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@st.composite
def cut_text(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[str]:
    return cuts(draw, draw(texts))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parallel", [True, False])
@given(pieces=cut_text(SOUP))
@settings(max_examples=40, deadline=None)
def test_cuts_make_no_difference(name: str, parallel: bool, pieces: list[str]) -> None:
    text = "".join(pieces)
    in_pieces = joined(heard(made(name, parallel), pieces))
    assert in_pieces == joined(heard(made(name, parallel), [text]))
    assert in_pieces == joined(heard(made(name, parallel), list(text)))
    if not in_pieces[1]:
        assert in_pieces[0] == text, "nothing is lost where there is no call"


def strict(text: str, at: int) -> tuple[Any, int]:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.JSONDecoder(parse_constant=refuse).raw_decode(text, at)


def naive_object(text: str, at: int) -> tuple[str, str, int] | None:
    """Name, arguments as written, and end of the call at this place. Keys are in the order name, arguments."""
    try:
        value, end = strict(text, at)
        name, arguments = value["name"], value["arguments"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(arguments, dict) or not re.fullmatch(r"[\w.:/-]{1,128}", str(name), re.ASCII):
        return None
    start = text.index('"arguments"', at) + len('"arguments"')
    start = text.index("{", start)
    return name, text[start : strict(text, start)[1]], end


def naive_hermes(text: str) -> tuple[str, Calls]:
    content, calls = "", []
    before, *rest = text.split("<tool_call>")
    content += before
    for part in rest:
        body = part.lstrip()
        found = naive_object(body, 0)
        if not found:
            content += "<tool_call>" + part
            continue
        calls.append(found[:2])
        content += re.sub(r"^\s*</tool_call>\s*", "", body[found[2] :])
    return content, calls


@st.composite
def hermes_answers(draw: st.DrawFn) -> str:
    """Texts, calls and things that are nearly calls, in any order."""

    def call() -> str:
        arguments = json.dumps(
            draw(argument_objects), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1]))
        )
        inner = f'{{"name": "{draw(call_names)}", "arguments": {arguments}}}'
        if draw(st.integers(0, 3)) == 0 and len(arguments) < RELEASE_CHARACTERS:
            at = draw(st.integers(0, len(inner) - 2))  # before the arguments end: behind them it is a call
            return f"<tool_call>{inner[:at]}\x01{inner[at:]}</tool_call>"  # a character that may stand nowhere
        return f"<tool_call>\n{inner}\n</tool_call>"

    parts = [
        draw(plain_text.filter(str.strip)) if draw(st.booleans()) else call() for _ in range(draw(st.integers(0, 5)))
    ]
    return "".join(parts)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_hermes_against_a_naive_parser(data: st.DataObject) -> None:
    text = data.draw(hermes_answers())
    got = joined(heard(made("hermes"), data.draw(cut_text(st.just(text)))))
    content, calls = naive_hermes(text)
    assert got[1] == calls
    assert "".join(got[0].split()) == "".join(content.split()), "but for space next to calls"
    if not calls:
        assert got[0] == text


@given(
    data=st.data(),
    calls=st.lists(st.tuples(st.sampled_from(["f", "get.weather"]), argument_objects), min_size=1, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_calls_of_the_other_formats(data: st.DataObject, calls: list[tuple[str, dict[str, Any]]]) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in written]
    texts = {
        "llama3_json": "; ".join(objects).replace('"arguments"', '"parameters"', 1),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
        "mistral_args": "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in written),
    }
    for name, text in texts.items():
        assert joined(heard(made(name), data.draw(cut_text(st.just(text))))) == ("", written)


@given(values=st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), json_values, max_size=4), data=st.data())
@settings(max_examples=40, deadline=None)
def test_values_between_tags(values: dict[str, Any], data: st.DataObject) -> None:
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in shown.items())
    text = f"<tool_call>\n<function=g>\n{parameters}</function>\n</tool_call>"
    content, [(name, arguments)] = joined(heard(made("qwen_xml"), data.draw(cut_text(st.just(text)))))
    assert (content, name) == ("", "g")
    for key, value in json.loads(arguments).items():
        expected = values[key]
        if isinstance(expected, str):  # without a schema, a text that is JSON is taken as JSON
            try:
                expected, _ = strict(expected, 0) if expected == expected.strip() else (expected, 0)
                assert value in (expected, values[key])
            except ValueError:
                assert value == values[key]
        else:
            assert value == expected


@given(value=argument_objects, at=st.integers(0, 200), character=st.sampled_from('{}[],:"\\ 01-+.eEtfnx\x00\n'))
@settings(max_examples=100, deadline=None)
def test_json_is_taken_as_strictly_as_by_the_library(value: Any, at: int, character: str) -> None:
    good = json.dumps(value)
    text = good[: at % (len(good) + 1)] + character + good[at % (len(good) + 1) :]
    walk = JsonWalk()
    taken = 0
    for one in text:
        if walk.done or not walk.step(one):
            break
        taken += 1
    try:
        _, end = strict(text, 0)
    except ValueError:
        end = -1
    if text.startswith("{"):
        assert (walk.done and taken == end) if end >= 0 else not walk.done


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("chatml", None),
        ("hermes", "hermes"),
        ("llama", "llama3_json"),
        ("mistral", "mistral"),
        ("parts", None),
        ("qwen_xml", "qwen_xml"),
    ],
)
def test_the_format_is_known_by_the_template(template: str, name: str | None) -> None:
    found = find_format("auto", chat_templates.ALL[template])
    assert (found.name if found else None) == name
    assert find_format("none", chat_templates.ALL[template]) is None
    chosen = find_format("hermes", chat_templates.ALL[template])
    assert chosen is not None
    assert chosen.name == "hermes"


def test_pieces_say_what_they_are_of() -> None:
    parser = made("hermes")
    news = heard(parser, [HERMES_CALL])
    assert news[0].calls == [CallPiece(0, "f", ""), CallPiece(0, None, '{"a": 1}')]
    assert parser.calls == 1
