"""A JSON body with very many names and values is rejected on each route before it is parsed."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio
from support import identity_models
from support.http import ask
from support.server import RunningServer, serving

from xlaserve.http.json.json_text import MOST_ARRAYS, MOST_ELEMENTS, MOST_MEMBERS

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOLD = f"expected at most {MOST_MEMBERS} members in all JSON objects together, got "
TENSOR = {"name": "x", "datatype": "BYTES", "shape": [1], "data": [":"]}
MANY = {f"k{number}": 1 for number in range(MOST_MEMBERS + 1)}
NO_NEW_NAMES = [{"name": "y"}] * MOST_MEMBERS


def schema(properties: Any) -> Any:
    return {"type": "function", "function": {"name": "f", "parameters": properties}}


DOORS: Mapping[str, tuple[str, Any]] = {
    "parameters": ("/v2/models/m/infer", {"inputs": [TENSOR], "parameters": MANY}),
    "inputs": ("/v2/models/m/infer", {"inputs": [TENSOR] * MOST_MEMBERS}),
    "outputs": ("/v2/models/m/infer", {"inputs": [TENSOR], "outputs": NO_NEW_NAMES}),
    "generate": ("/v2/models/m/generate", {"x": ":", **MANY}),
    "generate_stream": ("/v2/models/m/generate_stream", {"x": ":", "parameters": MANY}),
    "load": ("/v2/repository/models/m/load", {"parameters": {"config": MANY}}),
    "index": ("/v2/repository/index", MANY),
    "logging": ("/v2/logging", MANY),
    "invoke": ("/models/m/invoke", {"inputs": [TENSOR], "parameters": MANY}),
    "logit_bias": ("/v1/completions", {"model": "m", "prompt": "a", "logit_bias": MANY}),
    "messages": (
        "/v1/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": ""}] * MOST_MEMBERS},
    ),
    "tools": ("/v1/chat/completions", {"model": "m", "messages": [], "tools": [schema(MANY)]}),
    "embeddings": ("/v1/embeddings", {"model": "m", "input": "a", **MANY}),
    "metadata": ("/v1/responses", {"model": "m", "input": "a", "metadata": MANY}),
}
IDS = [1] * MOST_ELEMENTS
STOPS = ["a"] * (MOST_ELEMENTS + 1)
HALF = [1] * (MOST_ELEMENTS // 2 + 1)
LISTS = [[1]] * MOST_ARRAYS
ARGUMENTS = json.dumps({"ids": [*IDS, 1]})
ELEMENTS: Mapping[str, tuple[str, Any]] = {
    "prompt": ("/v1/completions", {"model": "m", "prompt": IDS}),
    "prompts": ("/v1/completions", {"model": "m", "prompt": LISTS}),
    "stop": ("/v1/completions", {"model": "m", "prompt": "a", "stop": STOPS}),
    "chat": ("/v1/chat/completions", {"model": "m", "messages": IDS}),
    "arguments": (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "type": "function",
                            "id": "c",
                            "function": {"name": "f", "arguments": ARGUMENTS},
                        }
                    ],
                }
            ],
        },
    ),
    "input": ("/v1/responses", {"model": "m", "input": IDS}),
    "call": (
        "/v1/responses",
        {
            "model": "m",
            "input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": ARGUMENTS}
            ],
        },
    ),
    "embeddings": ("/v1/embeddings", {"model": "m", "input": IDS}),
    "parameters": ("/v2/models/m/infer", {"inputs": [TENSOR], "parameters": {"a": STOPS}}),
    "parameters of data": (
        "/v2/models/m/infer",
        {"inputs": [TENSOR], "parameters": {"inputs": {"data": STOPS}}},
    ),
    "of an input": (
        "/v2/models/m/infer",
        {"inputs": [{**TENSOR, "parameters": {"data": STOPS}}]},
    ),
    "of an output": (
        "/v2/models/m/infer",
        {"inputs": [TENSOR], "outputs": [{"name": "y", "parameters": {"a": STOPS}}]},
    ),
    "lists of parameters": (
        "/v2/models/m/infer",
        {"inputs": [TENSOR], "parameters": {"a": [*LISTS, []]}},
    ),
    "shape": ("/v2/models/m/infer", {"inputs": [{**TENSOR, "shape": [*IDS, 1]}]}),
    "inputs": ("/v2/models/m/infer", {"inputs": [{}] * (MOST_ELEMENTS + 1)}),
    "outputs": (
        "/v2/models/m/infer",
        {"inputs": [TENSOR], "outputs": [{}] * (MOST_ELEMENTS + 1)},
    ),
    "beside numbers": (
        "/v2/models/m/infer",
        {"inputs": [{**TENSOR, "data": IDS}], "parameters": {"a": STOPS}},
    ),
    "invoke": ("/models/m/invoke", {"inputs": [TENSOR], "parameters": {"a": STOPS}}),
    "load": ("/v2/repository/models/m/load", {"parameters": {"a": STOPS}}),
    "fields together": ("/v2/models/m/generate", {"x": ":", "a": HALF, "b": HALF}),
    "generate": ("/v2/models/m/generate", {"x": ":", "stop": STOPS}),
    "generate_stream": ("/v2/models/m/generate_stream", {"x": ":", "parameters": {"stop": STOPS}}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def one_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    folder = tmp_path_factory.mktemp("members")
    identity_models.write(folder / "models", "m", "BYTES")
    settings: Any = {"load_model": ("m",), "sagemaker": True, "http_endpoint": "port:0"}
    async with serving(folder, folder / "models", **settings) as server:
        yield server


@pytest.mark.parametrize("door", DOORS)
async def test_very_many_members_are_refused(door: str, server: RunningServer) -> None:
    path, body = DOORS[door]
    answer = await ask(str(server.http), "POST", path, body=json.dumps(body).encode())

    assert answer.status == 400
    assert TOLD in answer.error


@pytest.mark.parametrize("door", ELEMENTS)
async def test_very_many_elements_are_refused(door: str, server: RunningServer) -> None:
    """Before the parser creates an object per element, which would delay all other requests."""
    path, body = ELEMENTS[door]
    answer = await ask(str(server.http), "POST", path, body=json.dumps(body).encode())
    said: Any = answer.error
    error = said["message"] if isinstance(said, dict) else said
    most, what = (
        (MOST_ARRAYS, "arrays")
        if door in ("prompts", "lists of parameters")
        else (
            MOST_ELEMENTS,
            "elements of all arrays and objects",
        )
    )

    assert answer.status == 400
    assert f"expected at most {most} {what} in the JSON, got " in error


async def test_a_line_of_very_many_members_is_refused(server: RunningServer) -> None:
    """A line has the same limit as a body; all lines together may have more."""
    few = json.dumps({f"k{number}": 1 for number in range(10)})
    told = {}
    for name, body in (("one", json.dumps(MANY)), ("many", "\n".join([few] * MOST_MEMBERS))):
        answer = await ask(
            *(str(server.http), "POST", "/models/m/invoke"),
            ("Content-Type", "application/jsonlines"),
            body=body.encode(),
        )
        told[name] = answer.error

    assert TOLD in told["one"]
    assert "members in all JSON objects" not in told["many"]


LINES: Mapping[str, tuple[str, str]] = {
    "lists without elements": (json.dumps([[]] * (MOST_ARRAYS + 1)), "arrays"),
    "lists of different lengths": (
        json.dumps([["a"] * MOST_ELEMENTS, ["a"]]),
        "elements of all arrays",
    ),
}


PLAIN: Mapping[str, tuple[str, str]] = {
    "lines": ("application/jsonlines", "[]\n%s"),
    "a list": ("application/json", "%s"),
    "instances": ("application/json", '{"instances": %s}'),
}


@pytest.mark.parametrize("which", LINES)
@pytest.mark.parametrize("form", PLAIN)
async def test_plain_lists_of_very_many_elements_are_refused(
    form: str, which: str, server: RunningServer
) -> None:
    lists, what = LINES[which]
    kind, body = PLAIN[form]
    answer = await ask(
        *(str(server.http), "POST", "/models/m/invoke"),
        ("Content-Type", kind),
        body=(body % lists).encode(),
    )

    assert answer.status == 400
    assert what in answer.error
    assert " in the JSON, got " in answer.error


@pytest.mark.parametrize(
    ("door", "count"),
    [
        ("infer", 1_000_000),
        *((door, MOST_ELEMENTS + 1) for door in ("generate", "invoke", "lines")),
    ],
)
async def test_tensors_of_very_many_elements_are_read(
    door: str, count: int, server: RunningServer
) -> None:
    """Tensor elements do not count as parameters."""
    elements = ["a"] * count
    tensor = {**TENSOR, "shape": [len(elements)], "data": elements}
    path, kind, body = {
        "infer": ("/v2/models/m/infer", "application/json", {"inputs": [tensor]}),
        "generate": ("/v2/models/m/generate", "application/json", {"x": elements}),
        "invoke": ("/models/m/invoke", "application/json", {"inputs": [tensor]}),
        "lines": ("/models/m/invoke", "application/jsonlines", elements),
    }[door]
    text = json.dumps(body)
    if door == "infer":
        text = text.replace('"data"', '"d\\u0061t\\u0061"')  # the same key repeated
    answer = await ask(
        *(str(server.http), "POST", path), ("Content-Type", kind), body=text.encode()
    )

    if door == "lines":
        # The model has no batch dimension, but the client sent one.
        assert answer.error.endswith(f"got BYTES[1,{count}]")
    else:
        assert answer.status == 200, answer.body[:300]
        assert answer.body.count(b'"a"') == count


async def test_colons_of_a_text_are_no_members(server: RunningServer) -> None:
    """With escaped quotes, and the maximum number of members."""
    text = '\\":' * (2 * MOST_MEMBERS)
    tensor = {**TENSOR, "data": [text]}
    left = MOST_MEMBERS - len(tensor) - len(("inputs", "parameters"))
    for more, status in ((0, 200), (1, 400)):
        parameters = {f"k{number}": 1 for number in range(left + more)}
        body = {"inputs": [tensor], "parameters": parameters}
        answer = await ask(
            str(server.http), "POST", "/v2/models/m/infer", body=json.dumps(body).encode()
        )

        assert answer.status == status, answer.body[:300]
        if status == 200:
            assert answer.json["outputs"][0]["data"] == [text]
        else:
            assert f"{TOLD}{MOST_MEMBERS + 1}" in answer.error
