"""Tools and forms of answers, asked for by OpenAI's own client."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from support import scripted_language
from support.scripted_language import HERMES, LLAMA
from support.server import RunningServer, serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

HERMES_SCRIPTS = (
    'Well.\n<tool_call>\n{"name": "get", "arguments": {"n": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "set", "arguments": {}}\n</tool_call>',
    'No <tool_call>{"name": "got", "arguments": {}}</tool_call>',
    '{"n": 2}',
    '<tool_call>\n{"name": "get", "arguments": {"n": 2}}\n</tool_call>',
)
LLAMA_SCRIPTS = (
    '\x01{"name": "get", "parameters": {"n": 1}}; {"name": "set", "parameters": {}}',
    '{"name": "got", "parameters": {}}',
)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get", "description": "d", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "set"}},
]
MODELS = ("hermes", "llama", "plain")


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tools")
    models = folder / "models"
    scripted_language.export(models / "hermes", HERMES_SCRIPTS, HERMES, grammars="true")
    scripted_language.export(models / "llama", LLAMA_SCRIPTS, LLAMA, grammars="true")
    scripted_language.export(models / "plain", HERMES_SCRIPTS, "", tool_calls="none")
    running = serving(folder, models, load_model=MODELS, http_endpoint="port:0")
    async with running as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="client")
async def _client(server: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://{server.http}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
        yield client


def fields(model: str, script: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{script}"}]
    return {"model": model, "messages": messages, "temperature": 0, "tools": TOOLS, **more}


async def whole(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> Any:
    return (await client.chat.completions.create(**asked)).choices[0]


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]


async def streamed(
    client: openai.AsyncOpenAI, asked: dict[str, Any]
) -> tuple[str, list[list[Any]], str]:
    """Return text, each call as id, name and pieces of arguments, and why it ends."""
    text, reason = "", ""
    calls: list[list[Any]] = []
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        for delta in choice.delta.tool_calls or ():
            assert delta.function is not None
            if delta.id is not None:
                assert delta.type == "function"
                assert delta.index == len(calls)
                calls.append([delta.id, delta.function.name])
            calls[delta.index].append(delta.function.arguments)
        reason = choice.finish_reason or reason
    return text, calls, reason


async def test_calls_are_answered(client: openai.AsyncOpenAI) -> None:
    for model, text in (("hermes", "Well."), ("llama", None)):
        choice = await whole(client, fields(model, 0))

        assert "tool_calls" == choice.finish_reason
        assert text == choice.message.content
        assert [("get", '{"n": 1}'), ("set", "{}")] == calls_of(choice)
        assert 2 == len({call.id for call in choice.message.tool_calls})


async def test_calls_are_streamed(client: openai.AsyncOpenAI) -> None:
    """The name first, and the arguments as the model writes them."""
    for model, text in (("hermes", "Well."), ("llama", "")):
        said, calls, reason = await streamed(client, fields(model, 0))

        assert (text, "tool_calls") == (said, reason)
        assert ["get", "{", '"', "n", '"', ":", " ", "1", "}"] == calls[0][1:]
        assert ["set", "{", "}"] == calls[1][1:]


async def test_what_only_looks_like_a_call_is_text(client: openai.AsyncOpenAI) -> None:
    for model, script in (("hermes", HERMES_SCRIPTS[1]), ("llama", LLAMA_SCRIPTS[1])):
        choice = await whole(client, fields(model, 1))
        said, calls, reason = await streamed(client, fields(model, 1))

        assert (script, "stop", None) == (
            choice.message.content,
            choice.finish_reason,
            choice.message.tool_calls,
        )
        assert (script, [], "stop") == (said, calls, reason)


async def test_a_call_that_is_cut_says_so(client: openai.AsyncOpenAI) -> None:
    choice = await whole(client, fields("hermes", 0, max_tokens=55))

    assert "length" == choice.finish_reason
    name, arguments = calls_of(choice)[0]
    assert "get" == name
    assert '{"n": 1}'.startswith(arguments)
    assert arguments


async def test_calls_one_at_a_time(client: openai.AsyncOpenAI) -> None:
    """The answer ends with the first one, and its slot is free."""
    for model in ("hermes", "llama"):
        choice = await whole(client, fields(model, 0, parallel_tool_calls=False))

        assert ("tool_calls", [("get", '{"n": 1}')]) == (choice.finish_reason, calls_of(choice))


async def test_no_tool_is_called_where_none_is_to_be(client: openai.AsyncOpenAI) -> None:
    """And the template is given none: the prompt is that without tools."""
    asked = fields("hermes", 0, tool_choice="none")
    answer = await client.chat.completions.create(**asked)
    without = await client.chat.completions.create(**{**asked, "tools": []})

    assert (HERMES_SCRIPTS[0], "stop") == (
        answer.choices[0].message.content,
        answer.choices[0].finish_reason,
    )
    assert answer.usage == without.usage


async def test_a_call_is_required(client: openai.AsyncOpenAI) -> None:
    """A model that would say something else writes a call by the schema of the tool."""
    for model in ("hermes", "llama"):
        choice = await whole(client, fields(model, 1, tool_choice="required", max_tokens=120))
        assert "get" == calls_of(choice)[0][0]
        if choice.finish_reason != "length":
            assert ["n"] == list(json.loads(calls_of(choice)[0][1]))
        named = {"type": "function", "function": {"name": "set"}}
        choice = await whole(client, fields(model, 0, tool_choice=named))
        ((name, arguments),) = calls_of(choice)
        assert ("tool_calls", "set", {}) == (choice.finish_reason, name, json.loads(arguments))
    choice = await whole(client, fields("hermes", 3, tool_choice="required"))
    assert [("get", '{"n": 2}')] == calls_of(choice)


async def test_results_of_calls_are_given_to_the_template(client: openai.AsyncOpenAI) -> None:
    """The arguments as data, so that a template may write them as it likes."""
    call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"n":1}'}}
    messages: list[Any] = [
        {"role": "user", "content": "0"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "yes"},
    ]
    answer = await client.chat.completions.create(
        model="hermes", messages=messages, temperature=0, max_tokens=1
    )

    assert len('0|(get {"n": 1})|yes=c1|0.') == answer.usage.prompt_tokens  # type: ignore[union-attr]


async def test_an_answer_has_the_form_that_is_asked_for(client: openai.AsyncOpenAI) -> None:
    formats: list[Any] = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "a"}},
    ]
    for form in formats:
        asked = fields("hermes", 2, tools=[], response_format=form, max_tokens=20)
        assert {"n": 2} == json.loads((await whole(client, asked)).message.content)
    other = {"type": "object", "properties": {"m": {"const": 7}}, "required": ["m"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": other}}
    asked = fields("hermes", 2, tools=[], response_format=form, max_tokens=60)
    choice = await whole(client, asked)
    assert choice.message.content.startswith('{"m') or choice.finish_reason == "length"
    free = fields("hermes", 1, tools=[], response_format={"type": "text"})
    assert HERMES_SCRIPTS[1] == (await whole(client, free)).message.content


FUNCTION = {"type": "function", "function": {"name": "set"}}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "none"}}}
REFUSED: list[tuple[str, dict[str, Any], str, str | None, str]] = [
    ("plain", {}, "tools", "unsupported_parameter", "parameter 'tool_calls'"),
    (
        "plain",
        {"tools": [], "response_format": {"type": "json_object"}},
        "response_format",
        "unsupported_parameter",
        "none, since the model's configuration lacks the parameter 'grammars'",
    ),
    ("plain", {"tool_choice": "required"}, "tool_choice", "unsupported_parameter", "'grammars'"),
    ("hermes", {"tools": [], "response_format": BAD_SCHEMA}, "response_format", None, "compiled"),
    (
        "hermes",
        {"tools": [], "response_format": {"type": "json_object"}, "extra_body": {"min_tokens": 2}},
        "min_tokens",
        None,
        "none beside",
    ),
    (
        "hermes",
        {"response_format": {"type": "json_object"}},
        "response_format",
        "unsupported_parameter",
        "text format when tools may be called",
    ),
    ("hermes", {"tools": [], "tool_choice": "required"}, "tool_choice", None, "without tools"),
    ("hermes", {"tools": [FUNCTION] * 2}, "tools[1].function.name", None, "differ"),
    (
        "hermes",
        {"tool_choice": {"type": "function", "function": {"name": "no"}}},
        "tool_choice.function.name",
        None,
        "one of tools",
    ),
    ("hermes", {"tools": [{"type": "web"}]}, "tools[0].type", None, '"function"'),
    (
        "hermes",
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}]},
        "tools[0].function.parameters.type",
        None,
        '"object"',
    ),
    (
        "hermes",
        {"messages": [{"role": "tool", "content": "a"}]},
        "messages[0].tool_call_id",
        None,
        "role tool",
    ),
    ("hermes", {"messages": [{"role": "user"}]}, "messages[0].content", None, "a text"),
]


async def test_what_is_refused_names_its_field(client: openai.AsyncOpenAI) -> None:
    for model, more, param, code, expected in REFUSED:
        with pytest.raises(openai.BadRequestError, match=expected) as caught:
            await client.chat.completions.create(**fields(model, 0, **more))
        assert (param, code) == (caught.value.param, caught.value.code)


async def test_calls_beside_one_another_are_what_they_are_alone(
    client: openai.AsyncOpenAI,
) -> None:
    asked = [fields(model, 0, n=2) for model in ("hermes", "llama")] * 3
    answers = await asyncio.gather(*(client.chat.completions.create(**one) for one in asked))

    for answer in answers:
        for choice in answer.choices:
            assert [("get", '{"n": 1}'), ("set", "{}")] == calls_of(choice)
