"""The KServe compatible RESTful API in the fast path: the same bytes as the general path answers.

Every request is sent twice; the server knows the head of the second, and reads no header of it.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.http import Connection as Client
from support.http import connect, message
from support.server import RunningServer, Serve

from xlaserve.http.connection.connection import Connection
from xlaserve.residence.registry import Registry

LENGTH = "Inference-Header-Content-Length"
END = b"\r\n\r\n"

MODELS = {
    "floats": ("FP32", [4]),
    "texts": ("STRING", [1]),
    "wide": ("FP32", [-1]),
    "integers": ("INT64", [2]),
}


def identity(datatype: str, dims: list[int]) -> dict[str, Any]:
    tensor = {"data_type": f"TYPE_{datatype}", "dims": dims}
    return {
        "backend": "identity",
        "max_batch_size": 8,
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
    }


@pytest.fixture
async def server(serve: Serve, tmp_path: Path) -> AsyncIterator[RunningServer]:
    repository = tmp_path / "repository"
    for name, (datatype, dims) in MODELS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.json").write_text(json.dumps(identity(datatype, dims)))
    async with serve(
        repository, http_endpoint="port:0", load_model=tuple(MODELS), max_message_bytes=1 << 20
    ) as running:
        yield running


@pytest.fixture
def address(server: RunningServer) -> str:
    assert server.http is not None
    return server.http


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What went the general path."""
    noted: list[bytes] = []
    take_over = Connection.take_over

    def note(self: Connection, data: bytes) -> None:
        noted.append(data)
        take_over(self, data)

    monkeypatch.setattr(Connection, "take_over", note)
    return noted


@dataclass(frozen=True)
class Case:
    """A request."""

    name: str
    body: bytes
    path: str = "/v2/models/floats/infer"
    headers: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return self.name

    @property
    def request(self) -> bytes:
        """What is sent."""
        return message("POST", self.path, *self.headers, body=self.body, length=len(self.body))


def tensor(data: Any = (1, 2.5, -3, 4e10), shape: Any = (1, 4), **more: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": list(shape), "data": data} | more


def case(name: str, *inputs: Any, model: str = "floats", path: str = "", **more: Any) -> Case:
    body = json.dumps({"inputs": list(inputs), **more}).encode()
    return Case(name, body, path or f"/v2/models/{model}/infer")


def binary(name: str, *, tail: bytes, model: str = "floats", length: int = 0, **more: Any) -> Case:
    described: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, len(tail) // 4]}
    described["parameters"] = {"binary_data_size": len(tail)}
    head = json.dumps({"inputs": [described], **more}).encode()
    header = (LENGTH, str(length or len(head)))
    return Case(name, head + tail, f"/v2/models/{model}/infer", [header])


FOUR = np.arange(4, dtype="<f4").tobytes()
OUTPUT = {"name": "y", "parameters": {"binary_data": True}}

CASES = [
    case("plain", tensor()),
    case("nested", tensor([[1, 2, 3, 4]])),
    case("rows", tensor(list(range(32)), (8, 4))),
    case("id", tensor(), id="a \u00e9 b"),
    case("parameters", tensor(), parameters={"sequence_id": 3, "sequence_start": True}),
    case("an output", tensor(), outputs=[{"name": "y"}]),
    case("a binary output", tensor(), outputs=[OUTPUT]),
    case("all outputs binary", tensor(), parameters={"binary_data_output": True}),
    case("a version", tensor(), path="/v2/models/floats/versions/1/infer"),
    case("a query and a slash", tensor(), path="/v2/models/floats/infer/?a=b"),
    case("an address", tensor(), path="http://localhost:10/v2/models/floats/infer"),
    case("a large answer", tensor([0.1] * 9000, (1, 9000)), model="wide"),
    binary("binary", tail=FOUR),
    binary("binary both ways", tail=FOUR, parameters={"binary_data_output": True}),
    binary("a large binary answer", tail=FOUR * 4000, model="wide", outputs=[OUTPUT]),
    binary("a large answer to binary", tail=FOUR * 4000, model="wide"),
    Case("raw", FOUR, headers=[(LENGTH, "0")]),
    case("texts", tensor(["h\u00e9"], (1, 1), datatype="BYTES"), model="texts"),
    case("integers", tensor([2**62, -1], (1, 2), datatype="INT64"), model="integers"),
    # what is wrong
    case("no such model", tensor(), model="nobody"),
    case("no such version", tensor(), path="/v2/models/floats/versions/7/infer"),
    case("no such input", tensor(name="z")),
    case("no such output", tensor(), outputs=[{"name": "z"}]),
    case("two inputs", tensor(), tensor()),
    case("no input"),
    case("a wrong shape", tensor([1, 2], (1, 2))),
    case("too many rows", tensor(list(range(40)), (10, 4))),
    case("a wrong datatype", tensor(datatype="INT32")),
    case("a wrong element", tensor([1, 2, "3", 4])),
    case("a wrong count", tensor([1, 2, 3])),
    case("a number out of range", tensor([1, 2, 3, 1e300])),
    case("a wrong parameter", tensor(), parameters={"binary_data_output": 3}),
    case("a reserved parameter", tensor(), parameters={"triton_x": 3}),
    Case("NaN", b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[1,NaN,3,4]}]}'),
    Case("too deep", b'{"inputs":' + b"[" * 200 + b"]" * 200 + b"}"),
    Case("no JSON", b"nonsense"),
    Case("nothing", b""),
    Case("no text", b'{"inputs":"\xff"}'),
    binary("too few bytes", tail=FOUR[:8]),
    binary("a length that is too great", tail=FOUR, length=4000),
    binary("NaN that is wanted in JSON", tail=np.full(4, np.nan, "<f4").tobytes()),
]


async def answer(client: Client, request: bytes) -> tuple[list[str], bytes]:
    """Return the head of an answer without its date, and the body."""
    await client.send(request)
    head = (await client.reader.readuntil(END)).decode()
    lines = [line for line in head.split("\r\n") if not line.startswith("Date: ")]
    length = next(line for line in lines if line.startswith("Content-Length: "))
    return lines, await client.reader.readexactly(int(length.split(" ")[1]))


@pytest.mark.parametrize("accepted", ["", "gzip, deflate"])
async def test_every_request_is_answered_byte_for_byte_as_the_general_path_does(
    address: str, general: list[bytes], accepted: str
) -> None:
    async with connect(address) as client:
        for number, case in enumerate(CASES):
            headers = [*case.headers, *([("Accept-Encoding", accepted)] if accepted else [])]
            request = Case(case.name, case.body, case.path, headers).request
            # Nobody else has sent a head like it.
            request = request.replace(b"Host: localhost", f"Host: localhost:{number}".encode())
            general.clear()
            first = await answer(client, request)
            assert 1 == len(general), case
            second = await answer(client, request)
            assert 1 == len(general), case
            assert first == second, case


async def test_what_is_wrong_with_the_length_of_the_json_never_has_the_fast_path(
    address: str, general: list[bytes]
) -> None:
    """Whether there is such a model matters more."""
    known = Case("", b"{}", headers=[(LENGTH, "many")]).request
    unknown = Case("", b"{}", "/v2/models/nobody/infer", [(LENGTH, "many")]).request
    async with connect(address) as client:
        statuses = [(await client.ask(request)).status for request in (known, unknown) * 2]

    assert [400, 404, 400, 404] == statuses
    assert 4 == len(general)


async def test_both_ways_are_counted_alike(address: str, general: list[bytes]) -> None:
    """Statistics extension: successes and failures of a model, whichever way they came."""
    good, bad, worse = (
        case("", tensor()).request,
        case("", tensor(name="z")).request,
        Case("", b"nonsense").request,
    )

    async def counts() -> dict[str, int]:
        found = await client.ask(message("GET", "/v2/models/floats/stats"))
        stats = found.json["model_stats"][0]["inference_stats"]
        return {name: stats[name]["count"] for name in ("success", "fail")}

    async with connect(address) as client:
        for request in (good, bad, worse):
            await client.ask(request)
        once = await counts()
        general.clear()
        for request in (good, bad, worse):
            await client.ask(request)
        assert not general
        twice = await counts()

    assert {"success": 1, "fail": 2} == once
    assert {"success": 2, "fail": 4} == twice


async def test_many_connections_are_answered_each_with_its_own(address: str) -> None:
    """Their requests are batched where they come at once."""

    async def ask_often(number: int) -> None:
        async with connect(address) as client:
            for turn in range(20):
                wanted = [float(number), float(turn), 0.5, 1.0]
                found = await client.ask(case("", tensor(wanted)).request)
                assert wanted == found.json["outputs"][0]["data"]

    async with asyncio.TaskGroup() as group:
        for number in range(30):
            group.create_task(ask_often(number))


async def test_a_model_that_is_loaded_anew_and_unloaded_is_asked_as_it_is(
    address: str, general: list[bytes]
) -> None:
    """What is known is the head, not the model."""
    request = case("", tensor()).request
    async with connect(address) as client:
        before = [(await client.ask(request)).status for _ in range(2)]
        await client.ask(message("POST", "/v2/repository/models/floats/unload", length=0))
        general.clear()
        without = (await client.ask(request)).status
        await client.ask(message("POST", "/v2/repository/models/floats/load", length=0))
        after = (await client.ask(request)).status

    assert ([200, 200], 404, 200) == (before, without, after)
    assert all(b"/infer" not in data for data in general)


async def test_a_model_is_found_once_for_each_turn_of_a_request(
    address: str, general: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a body comes in the general path its model may go; in the fast path it is there."""
    asked: list[str] = []
    resolve = Registry.resolve

    def note(self: Registry, name: str, number: str = "") -> Any:
        asked.append(name)
        return resolve(self, name, number)

    monkeypatch.setattr(Registry, "resolve", note)
    request = case("", tensor()).request
    found = []
    async with connect(address) as client:
        for _ in range(2):
            asked.clear()
            general.clear()
            await client.ask(request)
            found.append((len(general), asked.copy()))

    assert [(1, ["floats", "floats"]), (0, ["floats"])] == found
