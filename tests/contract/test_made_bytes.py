"""Memory for encoding an answer (JSON, events, compression) is on the ledger."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support import identity_models
from support.conditions import until
from support.http import SECONDS, Connection, chunked, connect, message
from support.server import RunningServer, serving

from xlaserve.http.connection import server as gateway
from xlaserve.http.json.json_tensors import MOST_CHARACTERS, write_elements
from xlaserve.http.sagemaker import sagemaker
from xlaserve.http.threads import OffLoop
from xlaserve.http.v2 import fast_infer, generate, inference
from xlaserve.http.v2.infer_response import most_json_bytes
from xlaserve.serving.inference import InferOutput, InferResponse
from xlaserve.tensors import DATATYPES

pytestmark = pytest.mark.asyncio(loop_scope="module")

ELEMENTS = 24_000
"""Short enough for JSON on the fast path, too long to be encoded in one piece."""
TIGHT = 1 << 20
"""A limit with memory for a request and its tensors, but not for encoding the answer."""
PLAIN = json.dumps([0] * ELEMENTS, separators=(",", ":")).encode()
MADE = 25 * ELEMENTS
WRITTEN = len("0.0,") * ELEMENTS
TEXT = "x" * 600_000
JSON = ("Content-Type", "application/json")
GZIP = ("Accept-Encoding", "gzip")
EVENTS = ("Accept", "text/event-stream")


def of_numbers(shape: int = ELEMENTS) -> bytes:
    return b'{"inputs":[{"name":"x","datatype":"FP64","shape":[%d],"data":%s}]}' % (shape, PLAIN)


def of_texts() -> bytes:
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1], "data": [TEXT]}
    return json.dumps({"inputs": [tensor]}).encode()


def posted(path: str, body: bytes, *headers: tuple[str, str], general: bool = False) -> bytes:
    if general:
        return message("POST", path, JSON, ("Transfer-Encoding", "chunked"), *headers) + chunked(
            body
        )
    return message("POST", path, JSON, *headers, body=body)


PACKS = "deflate_where_worth"
INFER = "/v2/models/m/infer"
DOORS: dict[str, tuple[str, bytes, int]] = {
    "V2, on the fast path": ("write_infer_answer", posted(INFER, of_numbers()), MADE),
    "V2": ("write_infer_answer", posted(INFER, of_numbers(), general=True), MADE),
    "V2, of text": (
        "write_infer_answer",
        posted("/v2/models/texts/infer", of_texts()),
        2 * len(TEXT),
    ),
    "V2, events": ("write_infer_answer", posted(INFER, of_numbers(), EVENTS), MADE),
    "generate": (
        "write_generate_answer",
        posted("/v2/models/m/generate", b'{"x":%b}' % PLAIN),
        MADE,
    ),
    "generate_stream": (
        "write_generate_answer",
        posted("/v2/models/m/generate_stream", b'{"x":%b}' % PLAIN),
        MADE,
    ),
    "SageMaker, of V2": (
        "write_infer_response",
        posted("/models/m/invoke", of_numbers()),
        MADE,
    ),
    "SageMaker": ("write_plain_response", posted("/models/m/invoke", PLAIN), MADE),
    "compressed, on the fast path": (
        PACKS,
        posted(INFER, of_numbers(), GZIP),
        2 * WRITTEN,
    ),
    "compressed": (
        PACKS,
        posted(INFER, of_numbers(), GZIP, general=True),
        2 * WRITTEN,
    ),
}
"""The function that encodes the answer, a request, and the encoded size beyond its tensors."""
TIGHT_DOORS = [door for door, (name, *_) in DOORS.items() if name != PACKS and "text" not in door]
MODULES: tuple[Any, ...] = (fast_infer, inference, generate, sagemaker, gateway)


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def one_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    folder = tmp_path_factory.mktemp("made")
    identity_models.write(folder / "models", "m", "FP64")
    identity_models.write(folder / "models", "texts", "BYTES")
    async with serving(folder, folder / "models", http_endpoint="port:0", sagemaker=True) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="tight")
async def tight_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tight")
    identity_models.write(folder / "models", "m", "FP64")
    identity_models.write(folder / "models", "texts", "BYTES")
    settings: Any = {"max_held_bytes": TIGHT, "sagemaker": True, "http_endpoint": "port:0"}
    async with serving(folder, folder / "models", **settings) as server:
        yield server


class Noted:
    """Records what is held when encoding an answer begins and ends."""

    def __init__(self, server: RunningServer, changed: pytest.MonkeyPatch, name: str) -> None:
        self._ledger = server.application.ledger
        self._write = OffLoop.write
        self._before = 0
        self.made: list[int] = []
        noted = self

        async def write(threads: OffLoop, *given: Any, **named: Any) -> Any:
            noted._before = noted._ledger.held
            return await noted._write(threads, *given, **named)

        changed.setattr(OffLoop, "write", write)
        for module in MODULES:
            if hasattr(module, name):
                changed.setattr(module, name, self._noting(getattr(module, name)))

    def _noting(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            self.made.append(self._ledger.held - self._before)
            return make(*given, **named)

        return called


async def read_whole(connection: Connection) -> int:
    """Read an answer with either framing; return its status."""
    answer = await connection.answer()
    if answer.headers.get("transfer-encoding") == "chunked":
        async with asyncio.timeout(SECONDS):
            await connection.reader.readuntil(b"\r\n0\r\n\r\n")
    return answer.status


@pytest.mark.parametrize("door", DOORS)
async def test_what_is_made_counts_while_it_is(
    door: str, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times: the first request of a form takes another path than the next ones."""
    name, sent, made = DOORS[door]
    ledger = server.application.ledger
    noted = Noted(server, monkeypatch, name)
    async with connect(str(server.http)) as connection:
        for _ in range(3):
            await until(lambda: not ledger.held)
            await connection.send(sent)
            assert await read_whole(connection) == 200
        await until(lambda: not ledger.held)

    assert len(noted.made) == 3
    assert min(noted.made) >= made


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name in MOST_CHARACTERS])
async def test_no_number_takes_more_than_what_counts_for_it(datatype: str) -> None:
    row = DATATYPES[datatype]
    if row.dtype.kind == "f":
        info = np.finfo(row.dtype)
        found = [-info.max, -info.tiny, -info.smallest_subnormal, -info.tiny * (1 + info.eps)]
        found += [*-np.random.default_rng(3).random(1000) * float(info.tiny)]
    elif row.dtype.kind == "b":
        found = [True, False]
    else:
        found = [np.iinfo(row.dtype).min, np.iinfo(row.dtype).max]
    array = np.array(found, row.dtype)
    response = InferResponse("m", "1", "", outputs=(InferOutput("y", row, array),))

    for one in array:
        text = b"".join(write_elements(row, np.array([one], row.dtype)))
        assert len(text) - len("[]") < MOST_CHARACTERS[datatype], text
    most = most_json_bytes(response)
    assert isinstance(most, int)
    assert 0 <= most - len(array) * MOST_CHARACTERS[datatype] < 1 << 10


@pytest.mark.parametrize("door", TIGHT_DOORS)
async def test_what_there_is_no_memory_for_is_refused_before_it_is_made(
    door: str, tight: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times: a rejection leaves nothing on the ledger."""
    name, sent, _ = DOORS[door]
    ledger = tight.application.ledger
    noted = Noted(tight, monkeypatch, name)
    async with connect(str(tight.http)) as connection:
        for _ in range(3):
            await until(lambda: not ledger.held)
            answer = await connection.ask(sent)
            assert answer.status == 503, answer.body[:200]
            assert "the answer" in answer.error
            assert "max_held_bytes" in answer.error
        await until(lambda: not ledger.held)

    assert not noted.made
