"""Whatever a model computes is answered in JSON, or refused without blame for who asked."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from support import identity_models
from support.http import Answer, Connection, connect, message
from support.server import Serve

from xlaserve.transport.rest import fast_infer

LENGTH = "Inference-Header-Content-Length"
NUMBERS = np.array([1.5, np.nan, np.inf, -np.inf], np.float64)
TEXTS = [b"\xff\x00", "é".encode(), b""]
PACKED = b"".join(len(text).to_bytes(4, "little") + text for text in TEXTS)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("FP32", "FP64", "BYTES"):
        identity_models.write(root, name, name)
    return root


@pytest.fixture(params=[False, True], ids=["", "strict"])
def strict(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
async def client(serve: Serve, repository: Path, *, strict: bool) -> AsyncIterator[Connection]:
    settings = {"load_model": ("*",), "http_endpoint": "port:0", "strict_json": strict}
    async with serve(repository, **settings) as server:
        assert server.http is not None
        async with connect(server.http) as connection:
            yield connection


async def ask(client: Connection, datatype: str, count: int, raw: bytes) -> list[Answer]:
    """Send a tensor as binary data that is wanted in JSON: by each of the ways of a request."""
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


async def test_bytes_that_are_not_text(client: Connection, *, strict: bool) -> None:
    for answer in await ask(client, "BYTES", len(TEXTS), PACKED):
        assert (406 if strict else 200) == answer.status
        if strict:
            assert "bytes that are not UTF-8" in answer.error
        else:
            texts = answer.json["outputs"][0]["data"]
            assert TEXTS == [text.encode(errors="surrogateescape") for text in texts]


async def test_answers_that_are_written_in_a_thread(
    client: Connection, monkeypatch: pytest.MonkeyPatch, *, strict: bool
) -> None:
    monkeypatch.setattr(fast_infer, "INLINE_BYTES", 0)
    answers = await ask(client, "FP64", len(NUMBERS), NUMBERS.tobytes())

    assert [406 if strict else 200] * 3 == [answer.status for answer in answers]
