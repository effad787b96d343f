"""Everything a model computes is returned as valid JSON, or rejected with advice."""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
import rapidjson
from support import identity_models, python_models
from support.http import Answer, Connection, connect, message
from support.server import Serve

from xlaserve.errors import InvalidSettings
from xlaserve.http.v2 import fast_infer
from xlaserve.settings import Settings

LENGTH = "Inference-Header-Content-Length"
NUMBERS = np.array([1.5, np.nan, np.inf, -np.inf], np.float64)
FROM_HEX = "return {'y': np.array([bytes.fromhex(t.decode()) for t in x], np.object_)}"
"""Body of a model that returns arbitrary bytes."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("FP32", "FP64"):
        identity_models.write(root, name, name)
    texts = {"data_type": "TYPE_STRING", "dims": [-1]}
    spec = "data_type: TYPE_STRING, dims: [ -1 ]"
    config = f'input [{{ name: "x", {spec} }}]\noutput [{{ name: "y", {spec} }}]'
    python_models.write_function(root, "hex", FROM_HEX, config)
    step = {"model_name": "hex", "model_version": -1, "input_map": {"x": "x"}}
    steps = {
        "platform": "ensemble",
        "input": [texts | {"name": "x"}],
        "output": [texts | {"name": "y"}],
        "ensemble_scheduling": {"step": [step | {"output_map": {"y": "y"}}]},
    }
    (root / "steps" / "1").mkdir(parents=True)
    (root / "steps" / "config.json").write_text(json.dumps(steps))
    # Classification labels are bytes, too.
    scores = {"data_type": "TYPE_FP32", "dims": [2]}
    labelled = {
        "backend": "identity",
        "input": [scores | {"name": "x"}],
        "output": [scores | {"name": "y", "label_filename": "labels.txt"}],
    }
    (root / "labels" / "1").mkdir(parents=True)
    (root / "labels" / "config.json").write_text(json.dumps(labelled))
    (root / "labels" / "labels.txt").write_bytes(b"\xe4\n\xf6\n")
    return root


@pytest.fixture(params=[False, True], ids=["", "strict"])
def strict(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
async def client(serve: Serve, repository: Path, *, strict: bool) -> AsyncIterator[Connection]:
    settings = {"load_model": ("FP32", "FP64"), "http_endpoint": "port:0", "strict_json": strict}
    async with serve(repository, **settings) as server:
        assert server.http is not None
        async with connect(server.http) as connection:
            yield connection


async def ask(client: Connection, datatype: str, count: int, raw: bytes) -> list[Answer]:
    """Send a binary tensor and request JSON output, in each kind of request."""
    parameters = {"binary_data_size": len(raw)}
    tensor = {"name": "x", "datatype": datatype, "shape": [count], "parameters": parameters}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = (LENGTH, str(len(head)))
    answers = []
    for more in ([], [], [("X-Varies", "1")]):
        request = message("POST", f"/v2/models/{datatype}/infer", headers, *more, body=head + raw)
        await client.send(request)
        answers.append(await client.answer())
    return answers


@pytest.mark.parametrize("repeats", [1, 10_000], ids=["short", "in pieces and in a thread"])
@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
async def test_numbers_that_are_not_finite(
    client: Connection, datatype: str, repeats: int, *, strict: bool
) -> None:
    tensor = np.tile(NUMBERS, repeats).astype("<f4" if datatype == "FP32" else "<f8")
    answers = await ask(client, datatype, len(tensor), tensor.tobytes())

    for answer in answers:
        assert (406 if strict else 200) == answer.status
        if strict:
            assert f"model '{datatype}', output 'y'" in answer.error
            assert "NaN or Infinity" in answer.error
        else:
            assert b"[1.5,NaN,Infinity,-Infinity" in answer.body
            np.testing.assert_array_equal(tensor, answer.json["outputs"][0]["data"])


async def test_answers_that_are_written_in_a_thread(
    client: Connection, monkeypatch: pytest.MonkeyPatch, *, strict: bool
) -> None:
    monkeypatch.setattr(fast_infer, "INLINE_BYTES", 0)
    answers = await ask(client, "FP64", len(NUMBERS), NUMBERS.tobytes())

    assert [406 if strict else 200] * 3 == [answer.status for answer in answers]


# --- BYTES that are not UTF-8 ------------------------------------------------------------------

PARSERS: Mapping[str, Callable[[bytes], Any]] = {
    "json": lambda body: json.loads(body.decode()),
    "orjson": orjson.loads,
    "rapidjson": rapidjson.loads,
    "msgspec": msgspec.json.decode,
}
"""JSON parsers of V2 clients: the third is tritonclient's, the second KServe's."""


@dataclass(frozen=True)
class Door:
    """A way to get BYTES returned as text."""

    path: str
    accept: str = "application/json"
    is_v2: bool = True
    """Whether it is a V2 request; otherwise the texts are bare."""
    is_plain: bool = False
    """Whether it is a generate request."""
    has_lines: bool = False
    """Whether each line of the answer is JSON."""


DOORS = {
    "infer": Door("/v2/models/hex/infer"),
    "infer of a version": Door("/v2/models/hex/versions/1/infer"),
    "infer of an ensemble": Door("/v2/models/steps/infer"),
    "events of infer": Door("/v2/models/hex/infer", "text/event-stream"),
    "generate": Door("/v2/models/hex/generate", is_plain=True),
    "generate_stream": Door("/v2/models/hex/generate_stream", is_plain=True),
    "generate of an ensemble": Door("/v2/models/steps/generate", is_plain=True),
    "invocations": Door("/models/hex/invoke"),
    "bare invocations": Door("/models/hex/invoke", is_v2=False),
    "lines of invocations": Door(
        "/models/hex/invoke", "application/jsonlines", is_v2=False, has_lines=True
    ),
}
NOT_TEXT = b"a\xff", "\u00e9\u4e16".encode(), b"\xed\xa0\x80"
"""Bytes that are not UTF-8, a valid text, and a UTF-8-encoded surrogate."""
TEXT = "\u00e9\u4e16".encode(), b"", b'"\\'


@asynccontextmanager
async def connected(serve: Serve, repository: Path, **settings: Any) -> AsyncIterator[Connection]:
    more = {"sagemaker": True, "sagemaker_multi_model": True, "allow_python_models": True}
    models = {"load_model": ("hex", "steps", "labels")}
    async with serve(repository, http_endpoint="port:0", **more, **models, **settings) as server:
        assert server.http is not None
        async with connect(server.http) as connection:
            yield connection


async def asked(
    client: Connection, door: Door, texts: Sequence[bytes], *varying: tuple[str, str]
) -> tuple[int, bytes]:
    """Request texts through a door; return the status, and the body or its first event."""
    given = [text.hex() for text in texts]
    tensor = {"name": "x", "datatype": "BYTES", "shape": [len(given)], "data": given}
    if door.is_plain:
        body: Any = {"x": given}
    else:
        body = {"inputs": [tensor]} if door.is_v2 else given
    headers = ("Accept", door.accept), ("Content-Type", "application/json"), *varying
    await client.send(message("POST", door.path, *headers, body=json.dumps(body).encode()))
    answer = await client.answer()
    found = answer.body
    if answer.headers.get("transfer-encoding") == "chunked":
        while size := int(await client.reader.readline(), 16):
            found += (await client.reader.readexactly(size + 2))[:-2]
        await client.reader.readline()
        found = found.removeprefix(b"data: ").split(b"\n", maxsplit=1)[0]
    return answer.status, found


def texts_in(door: Door, body: bytes, parse: Callable[[bytes], Any]) -> Sequence[Any]:
    """Return the elements in an answer, decoded by this parser."""
    if door.has_lines:
        return [parse(line) for line in body.splitlines()]
    told = parse(body)
    if "predictions" in told:
        return list(told["predictions"])
    return list(told["outputs"][0]["data"] if "outputs" in told else told["y"])


async def test_texts_are_read_by_every_parser(serve: Serve, repository: Path) -> None:
    async with connected(serve, repository) as client:
        for name, door in DOORS.items():
            for varying in ([], [], [("X-Varies", "1")]):
                status, body = await asked(client, door, TEXT, *varying)
                for parse in PARSERS.values():
                    found = [text.encode() for text in texts_in(door, body, parse)]
                    assert (200, name, [*TEXT]) == (status, name, found)


async def test_bytes_that_are_not_utf_8_are_refused_with_advice(
    serve: Serve, repository: Path
) -> None:
    """Over every protocol with JSON answers, repeatedly, at any position in a tensor."""
    async with connected(serve, repository) as client:
        for name, door in DOORS.items():
            for texts in (NOT_TEXT, NOT_TEXT, [*TEXT * 6000, *NOT_TEXT], NOT_TEXT):
                status, body = await asked(client, door, texts)
                if name == "generate_stream":
                    body = body.removeprefix(b"data: ").rstrip()
                for parse in PARSERS.values():
                    error = parse(body)["error"]
                    assert (400, name) == (status, name)
                    assert "output 'y'" in error
                    assert "binary_data" in error


async def test_labels_that_are_not_utf_8_are_refused_in_json(
    serve: Serve, repository: Path
) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}
    answers = []
    async with connected(serve, repository) as client:
        for binary in (False, True, False, True):
            wanted = {"name": "y", "parameters": {"classification": 1, "binary_data": binary}}
            body = json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode()
            await client.send(message("POST", "/v2/models/labels/infer", body=body))
            answers.append(await client.answer())

    assert [400, 200, 400, 200] == [answer.status for answer in answers]
    assert "binary_data" in answers[0].error == answers[2].error
    assert answers[1].body.endswith(b"2.000000:1:\xf6")


async def test_a_setting_has_bytes_written_as_surrogates(serve: Serve, repository: Path) -> None:
    async with connected(serve, repository, json_surrogates=True) as client:
        for name, door in DOORS.items():
            for _ in range(3):
                status, body = await asked(client, door, NOT_TEXT)
                texts = texts_in(door, body, json.loads)
                found = [text.encode(errors="surrogateescape") for text in texts]
                assert (200, name, [*NOT_TEXT]) == (status, name, found)
                assert body.isascii()


def test_surrogates_are_no_strict_json(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="json_surrogates: expected false with strict_json"):
        Settings.read({}, repository=tmp_path, json_surrogates=True, strict_json=True)
