"""Tool calls in answers: which texts are calls, however the stream is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.language.json_following import JsonFollower
from xlaserve.language.tool_calls import MOST_HELD, Parsed, ToolCalls, joined
from xlaserve.language.tool_families import FAMILIES, recognised

TOOLS = ("get", "set")


def parser(family: str, most: int = 9) -> ToolCalls:
    return FAMILIES[family].parser(TOOLS, most)


def parsed(family: str, *parts: str, most: int = 9) -> tuple[str, list[tuple[str, str]]]:
    found = parser(family, most)
    return joined([*(found.push(part) for part in parts), found.end()])


GET = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("Hello, <b>you</b> \n", "Hello, <b>you</b> \n", []),
        (f"Well:\n{GET}\n", "Well:", [("get", "{}")]),
        (f"{GET}\n{GET} bye", " bye", [("get", "{}")] * 2),
        (
            '<tool_call>\n{"name": "set", "arguments": {"a": ["}", {"b": "\\"}"}]}}\n</tool_call>',
            "",
            [("set", '{"a": ["}", {"b": "\\"}"}]}')],
        ),
        # Other orders, other fields, and the keyword of another model family.
        ('<tool_call>{"arguments":{"a":1},"name":"get"}', "", [("get", '{"a":1}')]),
        ('<tool_call>{"id":"name","name":"get","parameters":{}}', "", [("get", "{}")]),
        ('<tool_call>{"name":"\\u0067et","arguments":{}}', "", [("get", "{}")]),
        ('<tool_call>{"x":{"name":"no"},"name":"get","arguments":{}}', "", [("get", "{}")]),
        # A call's name cannot change later.
        ('<tool_call>{"name":"get","arguments":{"a":1},"name":"no"}', "", [("get", '{"a":1}')]),
        # Truncated or malformed arguments are passed on to the client.
        ('<tool_call>{"name":"get","arguments":{"a": "b', "", [("get", '{"a": "b')]),
        ('<tool_call>{"name":"get","arguments":{oh}}</tool_call>!', "!", [("get", "{oh}}")]),
        ('<tool_call>{"name":"get","arguments":{oh</tool', "", [("get", "{oh</tool")]),
        ('<tool_call>{"name":"get","arguments":{}} and', " and", [("get", "{}")]),
        (f"<tool_call>no{GET}", "<tool_call>no", [("get", "{}")]),
        (f"<tool_<tool_call>{GET}", "<tool_<tool_call>", [("get", "{}")]),
    ],
)
def test_calls_between_marks(text: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert (said, calls) == parsed("hermes", text)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "get", "arguments": []}</tool_call>',
        '<tool_call>{"name": "get", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": ["get"], "arguments": {}}</tool_call>',
        '<tool_call>{"a": {"name": "get"}, "arguments": {}}</tool_call>',
        '<tool_call>{"name" "get"}',
        "<tool_call>get</tool_call>\n",
        "<tool_call>",
        "<tool_call> \n",
        " <tool_cal",
        '<tool_call>{"name": "get", "arg',
        '<tool_call>{"a": "' + "b" * MOST_HELD + '", "name": "get", "arguments": {}}',
        '<tool_call>{"a":' + "[" * 100 + "1" + "]" * 100 + ',"name": "get", "arguments": {}}',
        " " * 600,
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_only_looks_like_a_call_is_text(family: str, text: str) -> None:
    assert (text, []) == parsed(family, text)


CALL = '{"name": "get", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (CALL, "", [("get", '{"a": 1}')]),
        (f"\n<|python_tag|>{CALL}", "", [("get", '{"a": 1}')]),
        (f"{CALL}; {CALL}\n<|python_tag|> {CALL} ; ", "", [("get", '{"a": 1}')] * 3),
        (f"{CALL} That is it", " That is it", [("get", '{"a": 1}')]),
        (f'{CALL}; {{"name": "no"}}', '; {"name": "no"}', [("get", '{"a": 1}')]),
        ('{"type": "function", "name": "set", "arguments": {}}', "", [("set", "{}")]),
        (f"I call {CALL}", f"I call {CALL}", []),
        (f"; {CALL}", f"; {CALL}", []),
        ('{"name": "get", "parameters": {oh} well', "", [("get", "{oh} well")]),
    ],
)
def test_bare_calls(text: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert (said, calls) == parsed("llama", text)


def test_no_more_calls_than_there_may_be() -> None:
    found = parser("hermes", most=1)
    parts = [found.push(f"a {GET[:-5]}"), found.push("call>"), found.push(GET), found.end()]

    assert ("a", [("get", "{}")]) == joined(parts)
    assert found.is_complete


def test_a_call_is_told_as_it_is_written() -> None:
    """The name is sent with the first brace of the arguments, which are then streamed."""
    found = parser("hermes")
    before = found.push('<tool_call>{"name": "get", "arguments": ')
    parts = [found.push(text) for text in ("{", '"a', '":', " 1}")]

    assert Parsed() == before
    assert [("get", "{"), (None, '"a'), (None, '":'), (None, " 1}")] == [
        (delta.name, delta.arguments) for part in parts for delta in part.calls
    ]


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "<", "<tool", "{", "}", "[", "]", '"'),
        *('{"name": ', '"get"', '"set"', '"no"', ', "arguments": ', ', "parameters": ', "{}"),
        *(" ", "\n", ";", ",", ":", "\\", "1", "-", "true", "text", GET, CALL, '{"a": "b"}'),
    ]
)


@given(
    family=st.sampled_from(sorted(FAMILIES)), pieces=st.lists(PIECES, max_size=14), data=st.data()
)
def test_any_cut_of_the_stream_gives_what_the_whole_gives(
    family: str, pieces: list[str], data: st.DataObject
) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    whole = parsed(family, text)

    assert whole == parsed(family, *parts) == parsed(family, *text)
    if not whole[1]:
        assert text == whole[0]


@pytest.mark.parametrize(
    ("text", "is_json"),
    [
        ('{"a": [1, -2.5e+3, true, false, null, {}, [], "\\u00e9\\n"], "b": {"c": ""}}', True),
        *((text, False) for text in ("1", "[1]", '{"a"}', '{"a":}', '{"a":1,}', '{,"a":1}')),
        *((text, False) for text in ('{"a":[1,]}', '{"a":1]', '{"a":01}', '{"a":+1}', "{a:1}")),
        *((text, False) for text in ('{"a":"\n"}', '{"a":"\\x"}', '{"a":"\\u12g4"}', '{"a":tt}')),
        *((text, False) for text in ('{"a":1 2}', '{"a" 1}', '{"a":"b}', '{"a":[}', "{1:2}")),
    ],
)
def test_json_is_followed(text: str, is_json: bool) -> None:
    follower = JsonFollower()
    goes_on = text.startswith("{") and all(follower.push(letter) for letter in text)

    assert is_json == (goes_on and follower.is_over)


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{% if tools %}<tool_call></tool_call>{% endif %}", "hermes"),
        ("{{ '<|python_tag|>' + tool_call.name }}", "llama"),
        ("""{{ '{"name": "' + name + '", ' }}{{ '"parameters": ' }}""", "llama"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
    ],
)
def test_families_are_recognised(template: str, family: str | None) -> None:
    found = recognised(template)

    assert family == (found and found[0].name)
