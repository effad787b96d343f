"""OpenAI's Responses API without storage, with OpenAI's client."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from support import scripted_language
from support.server import RunningServer, serving

from xlaserve.openai.choices import Choice

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE_CALL = '<tool_call>\n{"name": "get", "arguments": {"of": "a"}}\n</tool_call>'
SCRIPTS = (
    "zero one two",
    f"first{ONE_CALL}{ONE_CALL}last",
    '{"of": "json"}',
    ONE_CALL,
)
KIND: Any = {
    "type": "object",
    "properties": {"of": {"type": "string"}},
    "required": ["of"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "get", "parameters": KIND, "strict": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    folder = tmp_path_factory.mktemp("responses")
    models = folder / "models"
    hermes = scripted_language.HERMES
    scripted_language.export(models / "story", SCRIPTS, hermes, grammars="true")
    scripted_language.export(
        models / "roles", SCRIPTS, "{% for one in messages %}{{ one.role }}{% endfor %}"
    )
    async with serving(folder, models, load_model=("*",), http_endpoint="port:0") as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="client")
async def _client(server: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://{server.http}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
        yield client


async def whole(client: openai.AsyncOpenAI, asked: Any, **more: Any) -> Any:
    return await client.responses.create(
        **{"model": "story", "input": asked, "temperature": 0, **more}
    )


async def streamed(client: openai.AsyncOpenAI, asked: Any, **more: Any) -> list[Any]:
    fields = {"model": "story", "input": asked, "temperature": 0, **more}
    return [event async for event in await client.responses.create(stream=True, **fields)]


def items_of(response: Any) -> list[tuple[str, ...]]:
    """Return the contents of a response's items, without ids."""
    return [
        (item.type, item.status, item.content[0].text)
        if item.type == "message"
        else (item.type, item.status, item.name, item.arguments)
        for item in response.output
    ]


def plain(response: Any) -> dict[str, Any]:
    """Return a response without ids and times."""
    found: dict[str, Any] = json.loads(response.model_dump_json())
    for item in (found, *found["output"]):
        for name in ("id", "call_id", "created_at", "completed_at"):
            item.pop(name, None)
    return found


# --- Forms of requests ---------------------------------------------------------------------------

FORMS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "a text": ("0", {}, len("0|0.")),
    "an easy message": ([{"role": "user", "content": "0"}], {}, len("0|0.")),
    "a message": (
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "0"}]}],
        {},
        len("0|0."),
    ),
    "parts": (
        [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": one} for one in ("0", "b")],
            }
        ],
        {},
        len("0\nb|0."),
    ),
    "messages": (
        [
            {"role": "user", "content": "0"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "said"}]},
            {"role": "user", "content": "more"},
        ],
        {},
        len("0|said|more|0."),
    ),
    "instructions": ("more", {"instructions": "0 before"}, len("0 before|more|0.")),
    "calls and their results": (
        [
            {"role": "user", "content": "0"},
            {"type": "function_call", "call_id": "c1", "name": "get", "arguments": '{"of": "a"}'},
            {"type": "function_call", "call_id": "c2", "name": "get", "arguments": '{"of": "b"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "A"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "B"}],
            },
        ],
        {},
        len('0|(get {"of": "a"})(get {"of": "b"})|A=c1|B=c2|0.'),
    ),
}


@pytest.mark.parametrize("form", FORMS)
async def test_every_form_of_input_is_given_to_the_template(
    client: openai.AsyncOpenAI, form: str
) -> None:
    asked, more, tokens = FORMS[form]
    response = await whole(client, asked, **more)

    assert SCRIPTS[0] == response.output_text
    assert tokens == response.usage.input_tokens
    assert len(SCRIPTS[0]) + 1 == response.usage.output_tokens
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


async def test_instructions_are_a_message_of_the_system(client: openai.AsyncOpenAI) -> None:
    response = await whole(client, "b", model="roles", instructions="0")

    assert len("systemuser0|b|0.") == response.usage.input_tokens


async def test_a_response_tells_what_it_was_asked(client: openai.AsyncOpenAI) -> None:
    told: dict[str, Any] = {
        "instructions": "0",
        "max_output_tokens": 4,
        "metadata": {"of": "mine"},
        "top_p": 0.5,
        "tools": [TOOL],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "truncation": "disabled",
        "store": False,
        "background": False,
    }
    response = await whole(client, "x", **told, reasoning={"effort": "low"})
    found = plain(response)

    assert told == {name: found[name] for name in told} | {"tools": [TOOL]}
    assert "low" == response.reasoning.effort
    assert TOOL.items() <= found["tools"][0].items()
    assert ("incomplete", "max_output_tokens") == (
        response.status,
        response.incomplete_details.reason,
    )
    assert [("message", "incomplete", SCRIPTS[0][:4])] == items_of(response)
    assert response.id.startswith("resp_")
    assert response.previous_response_id is None


HINTS: list[tuple[str, str, Any]] = [
    *(("text", "verbosity", value) for value in ("low", "medium", "high", None)),
    *(
        ("reasoning", name, value)
        for name in ("summary", "generate_summary")
        for value in ("auto", "concise", "detailed", None)
    ),
]


async def test_hints_are_taken_and_change_nothing(client: openai.AsyncOpenAI) -> None:
    found = [await whole(client, "0", **{name: {hint: value}}) for name, hint, value in HINTS]

    assert {SCRIPTS[0]} == {one.output_text for one in found}
    assert ["low", "medium", "high", "medium"] == [one.text.verbosity for one in found[:4]]
    assert ["auto", "concise", "detailed", None] * 2 == [one.reasoning.summary for one in found[4:]]


async def test_metadata_at_its_limits_is_returned(client: openai.AsyncOpenAI) -> None:
    given = {f"{number:064}": "é" * 512 for number in range(16)}

    assert given == (await whole(client, "0", metadata=given)).metadata


async def test_an_answer_may_be_asked_for_again_with_its_items(client: openai.AsyncOpenAI) -> None:
    """As clients do that keep the conversation themselves, sending items back unmodified."""
    first = await whole(client, "1", tools=[TOOL])
    asked = [{"role": "user", "content": "0"}, *first.output]
    for item in first.output:
        if item.type == "function_call":
            found = {"type": "function_call_output", "call_id": item.call_id, "output": "A"}
            asked.append(found)
    second = await whole(client, asked, tools=[TOOL])

    assert SCRIPTS[0] == second.output_text


# --- Tools and response formats ------------------------------------------------------------------

CALL = ("function_call", "completed", "get", '{"of": "a"}')
ANSWERS: dict[str, tuple[str, dict[str, Any], list[tuple[str, ...]]]] = {
    "a text": ("0", {}, [("message", "completed", SCRIPTS[0])]),
    "a text that is cut": ("0", {"max_output_tokens": 6}, [("message", "incomplete", "zero o")]),
    "calls between texts": (
        "1",
        {"tools": [TOOL]},
        [("message", "completed", "first"), CALL, CALL, ("message", "completed", "last")],
    ),
    "calls that nobody asked for": (
        "1",
        {},
        [("message", "completed", SCRIPTS[1])],
    ),
    "one call": (
        "1",
        {"tools": [TOOL], "parallel_tool_calls": False},
        [("message", "completed", "first"), CALL],
    ),
    "a call that is required": ("3", {"tools": [TOOL], "tool_choice": "required"}, [CALL]),
    "a call by its name": (
        "3",
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "get"}},
        [CALL],
    ),
    "a call that is cut": (
        "3",
        {"tools": [TOOL], "max_output_tokens": ONE_CALL.index('"a"')},
        [("function_call", "incomplete", "get", '{"of": ')],
    ),
    "JSON of a schema": (
        "2",
        {"text": {"format": {"type": "json_schema", "name": "of", "schema": KIND}}},
        [("message", "completed", '{"of": "json"}')],
    ),
    "JSON": (
        "2",
        {"text": {"format": {"type": "json_object"}}},
        [("message", "completed", '{"of": "json"}')],
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
async def test_a_stream_says_what_the_whole_response_says(
    client: openai.AsyncOpenAI, case: str
) -> None:
    """Events are numbered, and the deltas of an item add up to its final event."""
    asked, more, items = ANSWERS[case]
    response = await whole(client, asked, **more)
    events = await streamed(client, asked, **more)
    pieces = ["" for _ in items]
    for event in events:
        if event.type.endswith(".delta"):
            pieces[event.output_index] += event.delta
    done = [one.item for one in events if one.type == "response.output_item.done"]
    added = [one.item for one in events if one.type == "response.output_item.added"]

    assert items == items_of(response)
    assert plain(response) | {"usage": None} == plain(events[-1].response) | {"usage": None}
    assert response.usage.output_tokens == events[-1].response.usage.output_tokens
    assert [item[-1] for item in items] == pieces
    assert list(range(len(events))) == [one.sequence_number for one in events]
    assert ["response.created", "response.in_progress"] == [one.type for one in events[:2]]
    assert f"response.{response.status}" == events[-1].type
    assert done == events[-1].response.output
    assert [item.id for item in done] == [item.id for item in added]
    assert {"in_progress"} == {item.status for item in added}
    assert [[]] * len(added) == [getattr(one, "content", None) or [] for one in added]


async def test_the_helper_of_the_client_gathers_a_stream(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(
        model="story", input="1", temperature=0, tools=[TOOL]
    ) as stream:
        texts = [one.delta async for one in stream if one.type == "response.output_text.delta"]
        response: Any = await stream.get_final_response()

    assert "firstlast" == response.output_text == "".join(texts)
    assert [CALL, CALL] == [one for one in items_of(response) if one[0] == "function_call"]


async def test_log_probabilities_are_those_of_the_tokens(client: openai.AsyncOpenAI) -> None:
    more: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await whole(client, "0", **more)
    events = await streamed(client, "0", **more)
    (part,) = response.output[0].content
    deltas = [
        one
        for event in events
        if event.type == "response.output_text.delta"
        for one in event.logprobs
    ]

    assert list(SCRIPTS[0]) == [one.token for one in part.logprobs]
    assert all(2 == len(one.top_logprobs) for one in part.logprobs)
    assert list(SCRIPTS[0]) == [one.token for one in deltas]
    assert part.logprobs == events[-1].response.output[0].content[0].logprobs


# --- Rejected requests ---------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"previous_response_id": "resp_1"},
        "previous_response_id",
        "expected null, since responses are not stored: send the earlier items in 'input'",
    ),
    (
        {"conversation": "conv_1"},
        "conversation",
        "responses are not stored: send the earlier items in 'input'",
    ),
    (
        {"store": True},
        "store",
        "expected false or null, since responses are not stored: send the response's items",
    ),
    ({"background": True}, "background", "expected false or null, since responses are not stored"),
    (
        {"prompt": {"id": "p"}},
        "prompt",
        "prompts are not stored: send the text in 'instructions' and 'input'",
    ),
    (
        {"truncation": "auto"},
        "truncation",
        'expected "disabled" or null, since input is not truncated',
    ),
    ({"service_tier": "flex"}, "service_tier", 'expected "auto" or "default" or null'),
    ({"extra_body": {"n": 2}}, "n", "expected 1 or null"),
    ({"extra_body": {"messages": []}}, "messages", "got an unknown one; docs/openai.md lists"),
    ({"extra_body": {"temperaturee": 1}}, "temperaturee", "one; did you mean 'temperature'?"),
    (
        {"input": [{"role": "user", "content": "x", "rol": "y"}]},
        "input[0].rol",
        "one; did you mean 'role'?",
    ),
    ({"input": []}, "input", "length >= 1"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", '"assistant" or "developer"'),
    (
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "input[0].type",
        'expected "message" or "function_call" or "function_call_output", got "item_reference"',
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        'expected "input_text" or "output_text", got "input_image"',
    ),
    (
        {"input": ["0", {"type": "function_call_output", "call_id": "c"}]},
        "input[0]",
        "expected object",
    ),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "got none"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", 'expected "function", got "web_search"'),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "unique names"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "put"}},
        "tool_choice.name",
        "expected one of tools, got 'put'",
    ),
    ({"top_logprobs": 2}, "top_logprobs", '"message.output_text.logprobs" in include'),
    (
        {"text": {"verbosity": "most"}},
        "text.verbosity",
        'expected "high" or "low" or "medium", got "most"',
    ),
    ({"metadata": dict.fromkeys(map(str, range(17)), "")}, "metadata", "at most 16 pairs, got 17"),
    ({"metadata": {"k" * 65: ""}}, "metadata", "keys of at most 64 characters, got 65 in"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k", "at most 512 characters, got 513"),
    (
        {"tools": [{**TOOL, "description": "d" * (1 << 15)}], "tool_choice": "none"},
        "input",
        "at most 32768 bytes of JSON for the input, instructions, tools and text",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "of", "schema": {"type": "nothing"}}}},
        "text.format",
        "parameter 'json_schema'",
    ),
    (
        {"model": "roles", "text": {"format": {"type": "json_object"}}},
        "text.format",
        "expected text, since the model's configuration lacks the parameter 'grammars'",
    ),
    (
        {"tools": [TOOL], "text": {"format": {"type": "json_object"}}},
        "text.format",
        "text format when tools may be called",
    ),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", 'got "much"'),
    ({"instructions": "0" * 600}, "input", "1 to 512 tokens"),
]


@pytest.mark.parametrize(
    ("more", "param", "text"),
    [pytest.param(*row, id=f"{at} {row[1]}") for at, row in enumerate(REFUSED)],
)
async def test_what_is_refused_says_what_to_send(
    client: openai.AsyncOpenAI, more: dict[str, Any], param: str, text: str
) -> None:
    """Streamed or not: with an HTTP status, before any event."""
    for streams in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            await whole(client, **{"asked": "0", "stream": streams, **renamed(more)})

        assert param == refused.value.param
        assert text in str(refused.value)


def renamed(more: dict[str, Any]) -> dict[str, Any]:
    return {"asked" if name == "input" else name: value for name, value in more.items()}


async def test_nothing_is_there_to_be_fetched(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(
        openai.NotFoundError,
        match="responses are not stored: send the items in the 'input' of a POST to /v1/responses",
    ):
        await client.responses.retrieve("resp_1")
    with pytest.raises(
        openai.NotFoundError,
        match="responses are not stored: send the items in the 'input' of a POST to /v1/responses",
    ):
        await client.responses.delete("resp_1")


async def test_names_of_models_that_are_not_there(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await whole(client, "0", model="nobody")

    assert ("model", "model_not_found") == (refused.value.param, refused.value.code)


async def test_events_have_their_types_as_names_and_nothing_behind(server: RunningServer) -> None:
    """SSE clients dispatch by event name; there is no `[DONE]`."""
    asked = {"model": "story", "input": "0", "stream": True}
    async with (
        aiohttp.ClientSession(f"http://{server.http}") as session,
        session.post("/openai/v1/responses", json=asked) as answer,
    ):
        text = await answer.read()
    events = [one.split(b"\n") for one in text.split(b"\n\n")[:-1]]

    assert (200, "text/event-stream") == (answer.status, answer.content_type)
    for name, data in events:
        kind = json.loads(data.removeprefix(b"data: "))["type"]
        assert name.removeprefix(b"event: ").decode() == kind
    assert b"event: response.completed" == events[-1][0]


async def test_a_schema_of_several_lines_is_data_of_one(server: RunningServer) -> None:
    """Line breaks in a request must not create additional SSE fields."""
    form = {"type": "json_schema", "name": "of", "schema": KIND}
    asked = {"model": "story", "input": "2", "stream": True, "text": {"format": form}}
    async with (
        aiohttp.ClientSession(f"http://{server.http}") as session,
        session.post("/v1/responses", data=json.dumps(asked, indent=1).encode()) as answer,
    ):
        events = [one.split(b"\n") for one in (await answer.read()).split(b"\n\n")[:-1]]
    data = [json.loads(lines[1].removeprefix(b"data: ")) for lines in events]
    told = [one["response"]["text"]["format"]["schema"] for one in data if "response" in one]

    assert {2} == {len(lines) for lines in events}
    assert [KIND] * 3 == told


async def test_a_response_that_fails_says_so(
    client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first event, as an error event and the final event of the response."""
    take, taken = Choice.take, list[int]()

    def fails(self: Choice, response: Any) -> Any:
        taken.append(1)
        if len(taken) > 2:
            raise RuntimeError("broken")
        return take(self, response)

    monkeypatch.setattr(Choice, "take", fails)
    events = await streamed(client, "0")

    assert ["error", "response.failed"] == [one.type for one in events[-2:]]
    assert "internal error" == events[-2].message == events[-1].response.error.message
    assert "server_error" == events[-1].response.error.code
    assert "failed" == events[-1].response.status
