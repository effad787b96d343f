"""Bodies to OpenAI's endpoints with invalid UTF-8, or with numbers beyond a float's range."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support.server import RunningServer, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    folder = tmp_path_factory.mktemp("octets")
    models = folder / "models"
    models.mkdir()
    async with serving(folder, models, http_endpoint="port:0") as server:
        yield server


SPOILED: dict[str, tuple[str, Any]] = {
    "a hint of a completion": ("completions", {"prompt": "0", "user": "@"}),
    "a neutral field of a completion": ("completions", {"prompt": "0", "suffix": "@"}),
    "a schema of a chat": (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "2"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "of", "schema": {"title": "@"}},
            },
        },
    ),
    "a message of a chat": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "0", "refusal": "@"}]},
    ),
    "a hint of embeddings": ("embeddings", {"input": "0", "user": "@"}),
    "a message": ("responses", {"input": [{"role": "user", "content": "@"}]}),
    "a kind of item": ("responses", {"input": [{"type": "@"}]}),
    "a name in an item": ("responses", {"input": [{"role": "user", "@": "0"}]}),
    "a schema": (
        "responses",
        {"input": "2", "text": {"format": {"type": "json_schema", "name": "of", "schema": ["@"]}}},
    ),
    "a neutral field": ("responses", {"input": "0", "background": "@"}),
}


async def posted(server: RunningServer, path: str, body: bytes) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession(f"http://{server.http}") as session,
        session.post(f"/v1/{path}", data=body) as answer,
    ):
        return answer.status, await answer.read()


@pytest.mark.parametrize("case", SPOILED)
async def test_what_is_no_utf_8_is_no_body_wherever_it_is(server: RunningServer, case: str) -> None:
    path, more = SPOILED[case]
    body = json.dumps({"model": "story", **more}).encode()
    for octets in (b"\xff", b"\xed\xa0\x80", b"\xc3"):
        status, text = await posted(server, path, body.replace(b"@", octets))
        error = json.loads(text)["error"]

        assert (400, "invalid_request_error") == (status, error["type"])
        assert (
            f"expected a body of JSON in UTF-8, got the octet 0x{octets[0]:02x}"
            in (error["message"])
        )


@pytest.mark.parametrize(
    ("path", "field"),
    [("completions", "suffix"), ("chat/completions", "verbosity"), ("responses", "background")],
)
async def test_numbers_that_no_float_holds_ask_for_something(
    server: RunningServer, path: str, field: str
) -> None:
    given = '"prompt": "0"' if path == "completions" else '"input": "0"'
    if path == "chat/completions":
        given = '"messages": [{"role": "user", "content": "0"}]'
    body = f'{{"model": "story", {given}, "{field}": 1e999}}'
    status, text = await posted(server, path, body.encode())

    assert (400, field) == (status, json.loads(text)["error"]["param"])


async def test_such_a_number_beside_another_fault_of_an_item(server: RunningServer) -> None:
    item = '{"role": "tool", "content": [{"type": "output_text", "text": "", "parsed": 1e999}]}'
    body = f'{{"model": "story", "input": [{item}]}}'
    status, text = await posted(server, "responses", body.encode())

    assert 400 == status
    assert "Number out of range" in json.loads(text)["error"]["message"]


async def test_texts_beyond_one_chunk_may_have_a_character_at_its_end(
    server: RunningServer,
) -> None:
    body = json.dumps({"model": "nobody", "input": "é" * (1 << 17)}, ensure_ascii=False).encode()
    whole_text = await posted(server, "responses", body + b" ")
    shifted = await posted(server, "responses", b" " + body)
    cut = await posted(server, "responses", body[:-3] + b'"}')

    assert [404, 404, 400] == [whole_text[0], shifted[0], cut[0]]
