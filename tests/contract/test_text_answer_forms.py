"""All ways to request text from a language model give the same answers, in any order."""

import json
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support import scripted_language
from support.server import RunningServer, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCRIPTS = ("zero", "one two", "three\nfour")
TIMES = 5


@dataclass(frozen=True)
class Form:
    """A request, and how to find the texts in its answer."""

    path: str
    body: Mapping[str, Any]
    texts: Any
    """Maps the JSON of an answer or event to the texts of its choices by index."""
    expected: tuple[str, ...]
    headers: Mapping[str, str] = field(default_factory=dict)


def completion(found: Any) -> dict[int, str]:
    return {one["index"]: one["text"] for one in found["choices"]}


def chat(found: Any) -> dict[int, str]:
    told = {one["index"]: one.get("message") or one["delta"] for one in found["choices"]}
    return {index: one.get("content") or "" for index, one in told.items()}


def response(found: Any) -> dict[int, str]:
    if found["object" if "object" in found else "type"] == "response":
        return {0: "".join(part["text"] for item in found["output"] for part in item["content"])}
    return {0: found["delta"] if found["type"] == "response.output_text.delta" else ""}


def generated(found: Any) -> dict[int, str]:
    return {0: found["text_output"]}


def tensors(found: Any) -> dict[int, str]:
    return {0: "".join(one["data"][0] for one in found["outputs"] if one["name"] == "text")}


def forms() -> list[Form]:
    """Return every form: each route, complete, streamed, and compressed."""
    plain = {"model": "story", "temperature": 0}
    asked: list[Form] = []
    for number, text in enumerate(SCRIPTS):
        said = f"a{number}."
        messages = [{"role": "user", "content": f"{number}"}]
        prompts = {"prompt": [said, "a1."], "n": 2}
        for prefix in ("/v1", "/openai/v1")[number % 2 :][:1]:
            asked += [
                *(
                    Form(f"{prefix}/completions", {**plain, **more}, completion, expected)
                    for more, expected in (
                        ({"prompt": said, "max_tokens": 400}, (text,)),
                        ({"prompt": [*said.encode()], "max_tokens": 3}, (text[:3],)),
                        ({"prompt": said, "max_tokens": 400, "echo": True}, (said + text,)),
                        ({**prompts, "max_tokens": 2}, (text[:2],) * 2 + (SCRIPTS[1][:2],) * 2),
                        ({"prompt": said, "max_tokens": 400, "logprobs": 2}, (text,)),
                        ({"prompt": said, "max_tokens": 400, "stop": text[2]}, (text[:2],)),
                    )
                ),
                Form(
                    f"{prefix}/chat/completions",
                    {**plain, "messages": messages, "n": 2},
                    chat,
                    (text, text),
                ),
                Form(f"{prefix}/responses", {**plain, "input": f"{number}"}, response, (text,)),
            ]
        whole = {"text_input": said, "max_tokens": 400}
        tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [said]}
        wanted = {
            "inputs": [tensor],
            "outputs": [{"name": "text"}],
            "parameters": {"max_tokens": 400},
        }
        asked += [
            Form("/v2/models/story/generate", whole, generated, (text,)),
            Form("/v2/models/story/generate_stream", whole, generated, (text,)),
            Form("/v2/models/story/infer", wanted, tensors, (text,)),
            Form("/models/story/invoke", wanted, tensors, (text,)),
        ]
    streamed = [
        Form(one.path, {**one.body, "stream": True}, one.texts, one.expected)
        for one in asked
        if one.body.get("model")
    ]
    return [
        Form(one.path, one.body, one.texts, one.expected, {"Accept-Encoding": coding})
        for one, coding in zip((*asked, *streamed), cycle(("identity", "gzip", "deflate")))
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    folder = tmp_path_factory.mktemp("forms")
    scripted_language.export(folder / "models" / "story", SCRIPTS, "")
    settings: Any = {"load_model": ("story",), "sagemaker": True, "http_endpoint": "port:0"}
    async with serving(folder, folder / "models", **settings) as server:
        yield server


def texts_of(form: Form, body: bytes) -> tuple[str, ...]:
    found: dict[int, str] = {}
    if body.startswith(b"{"):
        parts = [body]
    else:
        lines = body.split(b"\n")
        parts = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: {")]
    for part in parts:
        said = json.loads(part)
        if said.get("type", "").startswith("response.") and "delta" not in said:
            continue
        for index, text in form.texts(said).items():
            found[index] = found.get(index, "") + text
    return tuple(found[index] for index in sorted(found))


async def test_each_form_five_times_in_any_order(server: RunningServer) -> None:
    every = forms() * TIMES
    random.Random(1).shuffle(every)
    wrong = []
    async with aiohttp.ClientSession(f"http://{server.http}") as session:
        for form in every:
            async with session.post(form.path, json=form.body, headers=form.headers) as answer:
                body = await answer.read()
            if answer.status != 200 or texts_of(form, body) != form.expected:
                wrong.append((answer.status, form, texts_of(form, body), body[:300]))

    assert [] == wrong
