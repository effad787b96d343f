"""Fields that clients of OpenAI's endpoints send first: of templates, of prompts, of tools."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from support import scripted_language
from support.server import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

THINKS = (
    "{{ 1 if enable_thinking else 0 }}{{ 1 if thinking else 0 }}{{ reasoning_effort }}{{ style }}|"
)
"""Writes the variables of a request before its messages."""
SCRIPTS = ("zero", "one", '\x02\n{"name": "get", "arguments": {}}\n\x03')
ADDED = {2: "<tool_call>", 3: "</tool_call>"}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "get", "parameters": NOTHING}}


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="client")
async def _client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[openai.AsyncOpenAI]:
    folder = tmp_path_factory.mktemp("fields")
    models = folder / "models"
    scripted_language.export(models / "thinks", SCRIPTS, THINKS)
    hermes = scripted_language.HERMES
    scripted_language.export(models / "calls", SCRIPTS, hermes, added=ADDED, grammars="true")
    running = serving(folder, models, load_model=("*",), http_endpoint="port:0")
    async with (
        running as server,
        openai.AsyncOpenAI(
            base_url=f"http://{server.http}/v1", api_key="-", max_retries=0
        ) as client,
    ):
        yield client


async def prompt_tokens(client: openai.AsyncOpenAI, **more: Any) -> int:
    """Return how many tokens the template made of a request: one for each character."""
    answer = await client.chat.completions.create(
        model="thinks", messages=[{"role": "user", "content": "0"}], **more
    )
    assert answer.usage is not None
    return int(answer.usage.prompt_tokens)


LENGTHS: list[tuple[dict[str, Any], str]] = [
    ({}, "00|0|0."),
    ({"reasoning_effort": "high"}, "11high|0|0."),
    ({"reasoning_effort": "none"}, "00none|0|0."),
    ({"extra_body": {"chat_template_kwargs": {"style": "terse"}}}, "00terse|0|0."),
    ({"extra_body": {"chat_template_kwargs": {"style": "</s>"}}}, "00</s>|0|0."),
    ({"extra_body": {"chat_template_kwargs": {"reasoning_effort": ""}}}, "00|0|0."),
]


@pytest.mark.parametrize(("more", "text"), LENGTHS)
async def test_variables_of_a_request_reach_the_template(
    client: openai.AsyncOpenAI, more: dict[str, Any], text: str
) -> None:
    assert len(text) == await prompt_tokens(client, **more)


async def test_effort_and_variables_are_told_apart(client: openai.AsyncOpenAI) -> None:
    """What a request says of the template itself counts."""
    given = {"reasoning_effort": "terribly high", "thinking": False}
    count = await prompt_tokens(
        client, reasoning_effort="low", extra_body={"chat_template_kwargs": given}
    )

    assert len("10terribly high|0|0.") == count


@pytest.mark.parametrize(
    ("more", "param", "text"),
    [
        (
            {"extra_body": {"chat_template_kwargs": {"messages": []}}},
            "chat_template_kwargs",
            "no reserved variable (add_generation_prompt, documents, messages, tools), "
            "got 'messages'",
        ),
        ({"extra_body": {"reasoning_effort": "much"}}, "reasoning_effort", 'got "much"'),
        ({"extra_body": {"verbosity": "high"}}, "verbosity", 'expected "medium" or null'),
    ],
)
async def test_what_is_refused_says_what_to_send(
    client: openai.AsyncOpenAI, more: dict[str, Any], param: str, text: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await prompt_tokens(client, **more)

    assert param == refused.value.param
    assert text in str(refused.value)


async def test_an_answer_begins_with_its_prompt_where_that_is_asked_for(
    client: openai.AsyncOpenAI,
) -> None:
    asked: dict[str, Any] = {"model": "thinks", "echo": True, "n": 2, "temperature": 0}
    texts = await client.completions.create(prompt=["a0.", "b1."], **asked)
    ids = await client.completions.create(prompt=[*b"c1."], **asked)
    streamed = ["", ""]
    async for chunk in await client.completions.create(prompt="d0.", stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    plain = await client.completions.create(model="thinks", prompt="a0.", temperature=0, echo=False)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(prompt="a0.", logprobs=1, **asked)

    assert ["a0.zero", "a0.zero", "b1.one", "b1.one"] == [one.text for one in texts.choices]
    assert ["c1.one", "c1.one"] == [one.text for one in ids.choices]
    assert ["d0.zero", "d0.zero"] == streamed
    assert "zero" == plain.choices[0].text
    assert "'echo': expected false or null with logprobs" in str(refused.value)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get"}}])
async def test_calls_are_required_of_tokens_that_are_added_and_not_special(
    client: openai.AsyncOpenAI, choice: Any
) -> None:
    """As those of Qwen are: `"special": false` in tokenizer.json."""
    answer: Any = await client.chat.completions.create(
        model="calls",
        messages=[{"role": "user", "content": "2"}],
        tools=[TOOL],
        tool_choice=choice,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls

    assert "tool_calls" == answer.choices[0].finish_reason
    assert call.type == "function"
    assert ("get", {}) == (call.function.name, json.loads(call.function.arguments))
