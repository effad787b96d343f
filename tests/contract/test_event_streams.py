"""REST inference with several answers as server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import identity_models
from support.events import EventReader
from support.gate_watch import RULE, Watch
from support.http import SECONDS, connect, message
from support.server import RunningServer, Serve

from xlaserve.http.connection.connection import Connection
from xlaserve.runtime import identity
from xlaserve.runtime.identity import IdentityModel
from xlaserve.runtime.loaded import Answer
from xlaserve.tensors import Parameter

ENDLESS = 1 << 20
EVENTS = ("Accept", "text/event-stream")
JSON = ("Accept", "application/json")
REFUSE = (RULE, "refuse")


def request(*headers: tuple[str, str], count: int = 3, model: str = "m", **more: Any) -> bytes:
    """Return a request for `count` answers."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [count]}
    body = json.dumps({"id": "i", "inputs": [tensor], **more}).encode()
    return message("POST", f"/v2/models/{model}/infer", *headers, body=body)


class Counting(IdentityModel):
    """A model that answers 1, 2, 3 and so on, as often as requested."""

    def generate(
        self, inputs: Mapping[str, Any], parameters: Mapping[str, Parameter], *, replica: int = 0
    ) -> Iterator[Answer]:
        for number in range(int(inputs["x"][0])):
            yield Answer({"y": np.array([number + 1], np.float32)})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    identity_models.write(tmp_path / "models", "m", "FP32")
    return tmp_path / "models"


@pytest.fixture
async def plain(serve: Serve, repository: Path) -> AsyncIterator[RunningServer]:
    """A server whose model gives one answer."""
    async with serve(repository, http_endpoint="port:0", load_model=("m",)) as running:
        yield running


@pytest.fixture
async def generating(
    serve: Serve, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningServer]:
    """A server whose model gives as many answers as requested."""
    monkeypatch.setattr(identity, "IdentityModel", Counting)
    async with serve(
        repository, http_endpoint="port:0", load_model=("m",), grace_seconds=0.2
    ) as running:
        yield running


def address_of(server: RunningServer) -> str:
    assert server.http is not None
    return server.http


def shown(event: Any) -> tuple[str, str, list[float], bool]:
    """Return an event's name, id, numbers, and whether it is the last one."""
    name, data = event
    numbers = [number for output in data["outputs"] for number in output["data"]]
    return name, data["id"], numbers, data["parameters"]["triton_final_response"]


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_a_model_answers_many_times(generating: RunningServer, count: int) -> None:
    """The final event has no outputs, because the model does not announce its last answer."""
    async with connect(address_of(generating)) as client:
        reader = EventReader(client)
        await client.send(request(EVENTS, count=count))
        await reader.head()
        found = [shown(event) for event in await reader.events()]

    numbers = [("message", "i", [float(n)], False) for n in range(1, count + 1)]
    assert [*numbers, ("message", "i", [], True)] == found


async def test_a_model_that_answers_once_gives_one_event(plain: RunningServer) -> None:
    async with connect(address_of(plain)) as client:
        reader = EventReader(client)
        await client.send(request(EVENTS))
        await reader.head()
        found = [shown(event) for event in await reader.events()]

    assert [("message", "i", [3.0], True)] == found


async def test_many_answers_need_a_client_that_accepts_events(generating: RunningServer) -> None:
    async with connect(address_of(generating)) as client:
        answers = [await client.ask(request(JSON)) for _ in range(3)]

    assert [501] * 3 == [answer.status for answer in answers]


@pytest.mark.parametrize(
    ("wrong", "status", "text"),
    [
        ({"model": "nobody"}, 404, "'nobody'"),
        ({"inputs": []}, 400, "x"),
        ({"parameters": {"binary_data_output": True}}, 400, "text/event-stream"),
        ({"outputs": [{"name": "y", "parameters": {"binary_data": True}}]}, 400, "binary_data"),
    ],
)
async def test_what_is_refused_before_an_answer_has_its_status(
    plain: RunningServer, wrong: dict[str, Any], status: int, text: str
) -> None:
    async with connect(address_of(plain)) as client:
        answer = await client.ask(request(EVENTS, **wrong))

    assert status == answer.status
    assert text in answer.error


async def test_a_known_header_block_never_takes_events_along(
    plain: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast path gives one answer, so a request that accepts events must never take it."""
    general: list[bytes] = []
    take_over = Connection.take_over

    def note(self: Connection, data: bytes) -> None:
        general.append(data)
        take_over(self, data)

    monkeypatch.setattr(Connection, "take_over", note)
    async with connect(address_of(plain)) as client:
        for _ in range(3):
            assert 200 == (await client.ask(request(JSON))).status
            reader = EventReader(client)
            await client.send(request(EVENTS))
            await reader.head()
            assert [True] == [shown(event)[-1] for event in await reader.events()]

    assert 3 == sum(b"event-stream" in data for data in general)


async def test_a_stream_passes_the_gates_every_time(serve: Serve, repository: Path) -> None:
    watch = Watch()
    with watch.watching():
        running = serve(repository, http_endpoint="port:0", load_model=("m",))
        async with running as server, connect(address_of(server)) as client:
            for _ in range(5):
                reader = EventReader(client)
                await client.send(request(EVENTS))
                await reader.head()
                await reader.events()
                assert 403 == (await client.ask(request(EVENTS, REFUSE))).status

    assert 10 == len(watch.gate) == len(set(watch.gate))
    assert watch.begun == watch.gate == watch.ended_calls
    assert {"m"} == {call.model for call in watch.gate}


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "does not read"])
async def test_a_client_that_leaves_ends_the_model_s_work(
    generating: RunningServer, *, reads: bool
) -> None:
    """The model stops computing, and no request remains in progress."""
    version, _ = generating.application.registry.resolve("m")
    async with connect(address_of(generating)) as client:
        reader = EventReader(client)
        await client.send(request(EVENTS, count=ENDLESS))
        await reader.head()
        assert 1 == version.admission.in_progress
        if not reads:
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        client.writer.transport.abort()
    async with asyncio.timeout(SECONDS):
        while version.admission.in_progress:
            await asyncio.sleep(0)


async def test_a_server_that_ends_tells_a_client_whose_stream_does_not(
    generating: RunningServer,
) -> None:
    async with connect(address_of(generating)) as client:
        reader = EventReader(client)
        await client.send(request(EVENTS, count=ENDLESS))
        await reader.head()
        assert generating.application.http is not None
        draining = asyncio.ensure_future(generating.application.http.drain(0.05))
        (name, data) = (await reader.events())[-1]
        await draining

    assert ("error", "the server is shutting down, try again") == (name, data["error"])
