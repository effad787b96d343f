"""`generate` and `generate_stream`: fields are tensors and parameters (generate extension)."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import generating, identity_models
from support.events import EventReader
from support.gate_watch import RULE, Watch
from support.generating import Generation
from support.http import Answer, connect, message
from support.server import RunningServer, Serve
from support.stepped import export_counter

SIZE = 1 << 12


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_counter(tmp_path_factory.mktemp("stepped") / "counter" / "1", max_steps=50).parent


@pytest.fixture
def repository(exported: Path, tmp_path: Path) -> Path:
    root = tmp_path / "models"
    shutil.copytree(exported, root / "counter")
    for name in ("count", "echo"):
        identity_models.write(root, name, "FP32")
    identity_models.write(root, "text", "BYTES")
    identity_models.write(root, "half", "FP16", [1])
    return root


@pytest.fixture
def generation(monkeypatch: pytest.MonkeyPatch) -> Generation:
    return generating.install(monkeypatch)


@pytest.fixture
async def server(
    serve: Serve, repository: Path, generation: Generation
) -> AsyncIterator[RunningServer]:
    settings = {"max_infer_stream_bytes": 1 << 16, "grace_seconds": 0.2}
    async with serve(repository, load_model=("*",), http_endpoint="port:0", **settings) as running:
        yield running


def http(server: RunningServer) -> str:
    assert server.http is not None
    return server.http


def request(model: str, body: Any, verb: str = "generate", *headers: tuple[str, str]) -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return message("POST", f"/v2/models/{model}/{verb}", *headers, body=text)


async def ask(server: RunningServer, model: str, body: Any, verb: str = "generate") -> Answer:
    async with connect(http(server)) as client:
        return await client.ask(request(model, body, verb))


async def streamed(server: RunningServer, model: str, body: Any) -> list[Any]:
    async with connect(http(server)) as client:
        reader = EventReader(client)
        await client.send(request(model, body, "generate_stream"))
        await reader.head()
        return await reader.events()


async def until_idle(server: RunningServer) -> None:
    application = server.application
    async with asyncio.timeout(60):
        while application.registry.requests or application.ledger.held:
            await asyncio.sleep(0.001)


TENSORS: list[tuple[str, Any, Any]] = [
    ("text", {"x": 'a ["b"] \\ \u00e9'}, 'a ["b"] \\ \u00e9'),
    ("text", {"x": ["a", "b"]}, ["a", "b"]),
    ("echo", {"x": 1.5}, 1.5),
    ("echo", {"x": [1, 2, 3]}, [1.0, 2.0, 3.0]),
    ("echo", {"x": [[1, 2], [3, 4]]}, [1.0, 2.0, 3.0, 4.0]),
    ("echo", {"x": []}, []),
    ("echo", {"parameters": {"x": 2}}, 2.0),
]


async def test_fields_are_tensors(server: RunningServer) -> None:
    """A value by itself is one element, and one element comes back by itself."""
    for model, given, expected in TENSORS:
        answer = await ask(server, model, given)

        assert 200 == answer.status, given
        assert "application/json" == answer.headers["content-type"]
        assert {"model_name": model, "model_version": "1", "y": expected} == answer.json


async def test_an_id_comes_back(server: RunningServer) -> None:
    answers = [await ask(server, "echo", {"x": 1, "id": identity}) for identity in ("q", 7)]

    assert ["q", "7"] == [answer.json["id"] for answer in answers]


async def test_other_fields_are_parameters(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the object `parameters`, and in it."""
    seen: list[Mapping[str, Any]] = []
    runner: Any = server.application.registry.resolve("count")[1].runner
    generate = runner.generate

    def note(inputs: Any, parameters: Any, *, replica: int = 0) -> Any:
        seen.append(parameters)
        return generate(inputs, parameters, replica=replica)

    monkeypatch.setattr(runner, "generate", note)
    body = {"x": [1, 1], "top": "a", "parameters": {"temperature": 0.5, "n": 3, "stream": False}}
    answer = await ask(server, "count", body)

    assert 200 == answer.status
    assert [{"top": "a", "temperature": 0.5, "n": 3, "stream": False}] == seen


@pytest.mark.parametrize("version", ["", "/versions/1"])
async def test_many_answers_are_events(server: RunningServer, version: str) -> None:
    body = {"start": 5, "count": 3, "id": "i"}
    async with connect(http(server)) as client:
        reader = EventReader(client)
        path = f"/v2/models/counter{version}/generate_stream"
        await client.send(message("POST", path, body=json.dumps(body).encode()))
        await reader.head()
        found = await reader.events()
    await until_idle(server)

    assert [("message", "i", n) for n in (5, 6, 7)] == [
        (name, data["id"], data["number"]) for name, data in found
    ]
    assert {"id", "model_name", "model_version", "number", "random", "sums"} == set(found[0][1])
    assert [5.0, 10.0] == found[0][1]["sums"]


async def test_answers_without_outputs_are_no_events(server: RunningServer) -> None:
    """Such a one only ends those of a model that does not know which is the last."""
    assert [0, 1] == [data["y"] for _, data in await streamed(server, "count", {"x": [2, 1]})]
    assert [3.0] == [data["y"] for _, data in await streamed(server, "echo", {"x": 3})]


async def test_an_error_behind_an_answer_is_an_event(server: RunningServer) -> None:
    """Its status was sent by then."""
    found = await streamed(server, "counter", {"start": 0, "count": 51})
    await until_idle(server)

    assert 51 == len(found)
    assert (
        "message",
        {"error": "model 'counter' did not finish within 50 answers: raise max_steps"},
    ) == (found[-1])


async def test_generate_is_for_one_answer(server: RunningServer, generation: Generation) -> None:
    """A model that gives many may give one; what gives more stops."""
    one = await ask(server, "counter", {"start": 4, "count": 1})
    other = await ask(server, "count", {"x": [1, 1]})
    many = [
        await ask(server, "counter", {"start": 4, "count": 2}),
        await ask(server, "count", {"x": [1_000_000, 1]}),
    ]
    await until_idle(server)
    async with asyncio.timeout(60):
        while generation.ended < 2:
            await asyncio.sleep(0.001)

    assert (200, 4) == (one.status, one.json["number"])
    assert (200, 0) == (other.status, other.json["y"])
    assert [500, 500] == [answer.status for answer in many]
    assert all("to produce exactly 1 response, got more" in answer.error for answer in many)
    assert generation.computed < 1000
    assert 2 == generation.ended


REFUSED: list[tuple[str, Any, int, str]] = [
    ("nobody", {"x": 1}, 404, "'nobody'"),
    ("echo", {}, 400, "missing 'x'"),
    ("echo", {"x": "1"}, 400, "input 'x': expected elements of FP32, got str"),
    ("echo", {"x": [[1, 2], [3]]}, 400, "of equal length"),
    ("echo", {"x": {"a": 1}}, 400, "input 'x'"),
    ("echo", {"x": None}, 400, "input 'x'"),
    ("half", {"x": 1}, 400, "FP16"),
    ("counter", {"start": [1, 2], "count": 1}, 400, "input 'start'"),
    ("echo", {"x": 1, "other": [1]}, 400, "parameter 'other'"),
    ("echo", {"x": 1, "other": {"a": 1}}, 400, "parameter 'other'"),
    ("echo", {"x": 1, "triton_other": 1}, 400, "parameter 'triton_other'"),
    ("echo", {"x": 1, "parameters": {"a": None}}, 400, "parameter 'a'"),
    ("echo", {"x": 1, "id": [1]}, 400, "expected 'id'"),
    ("echo", {"x": 1, "parameters": {"x": 1}}, 400, "input 'x' already exists"),
    ("echo", [1], 400, "an object of JSON"),
    ("echo", b"", 400, "an object of JSON"),
    ("echo", b'{"x": \xff}', 400, "JSON"),
    ("echo", b'{"x": 1', 400, "JSON"),
    ("echo", b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "levels deep"),
    ("echo", b'{"id": ' + b"9" * 5000 + b"}", 400, ""),
]


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
async def test_what_is_refused_before_an_answer_has_its_status(
    server: RunningServer, verb: str
) -> None:
    for model, body, status, text in REFUSED:
        answer = await ask(server, model, body, verb)

        assert status == answer.status, body
        assert text in answer.error, body
    await until_idle(server)


async def test_a_client_that_leaves_closes_its_answers(
    server: RunningServer, generation: Generation
) -> None:
    """And one that does not read has its model pause."""
    async with connect(http(server)) as client:
        reader = EventReader(client)
        await client.send(request("count", {"x": [1_000_000, SIZE]}, "generate_stream"))
        await reader.head()
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        version, _ = server.application.registry.resolve("count")
        async with asyncio.timeout(60):
            while (found := generation.computed) < 2 or server.application.ledger.held < SIZE:
                await asyncio.sleep(0.001)
        assert 1 == version.admission.in_progress
        client.writer.transport.abort()
    await until_idle(server)
    async with asyncio.timeout(60):
        while not generation.ended:
            await asyncio.sleep(0.001)

    assert found <= generation.computed < 1000


async def test_requests_pass_the_gates_every_time(serve: Serve, repository: Path) -> None:
    watch = Watch()
    with watch.watching():
        async with (
            serve(repository, load_model=("echo",), http_endpoint="port:0") as server,
            connect(http(server)) as client,
        ):
            for _ in range(3):
                assert 200 == (await client.ask(request("echo", {"x": 1}))).status
                refuse = request("echo", {"x": 1}, "generate", (RULE, "refuse"))
                assert 403 == (await client.ask(refuse)).status

    assert 6 == len(watch.gate) == len(watch.ended_calls)
    assert {"echo"} == {call.model for call in watch.gate}
