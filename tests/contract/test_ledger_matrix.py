"""Every kind of body on every route, with every way a request can end, checked on the ledger.

Routes, media types and protocols come from the server's own tables. A body is charged while it
arrives and while the request is answered; afterwards nothing is held, and nothing was released
twice. If the connection stays open, the next request confirms this.
"""

import asyncio
import gzip
import io
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from math import isqrt
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import h2.events
import numpy as np
import pytest
import pytest_asyncio
from h2.errors import ErrorCodes
from support import identity_models, scripted_language, tiny_embedding
from support.conditions import until
from support.doors import GRPC, HTTP, ROUTES, WEB, Asking, cells, read_chunks
from support.engines import own_engine_only
from support.grpc_web import plain as plain_web
from support.http import Connection, chunked, message
from support.python_models import VECTORS, write
from support.server import RunningServer, serving
from support.wire import Wire, request_headers
from tritonclient.grpc import service_pb2 as pb

from xlaserve.grpc_web.frames import to_text
from xlaserve.net.ledger import Account, Kind, Ledger
from xlaserve.serving.access.objects import Doors

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

pytestmark = [pytest.mark.asyncio(loop_scope="module"), own_engine_only]

MIB = 1 << 20
LIMIT = 512 * MIB
"""The ledger's limit: enough for answers larger than the socket buffers."""
MOST_BYTES = 448 * MIB
"""Maximum message size: more than one connection may hold."""
WIDE, WIDE_BYTES = 1 << 20, 16 * MIB
"""The model answers numbers from this one on with WIDE_BYTES bytes."""
PAD = {GRPC: 40_000, WEB: 100_000, HTTP: 100_000}
"""Padding: more than a frame, and more than the HTTP bytes read before charging; less than an
HTTP/2 window, so that it is sent immediately.
"""
GATED = f"""
import pathlib, time

class Model(PythonModel):
    def infer(self, inputs):
        number = int(inputs["x"].ravel()[0])
        if number:  # warm-ups are of zeros
            pathlib.Path({{place!r}}, f"begun-{{{{number}}}}").touch()
            while not pathlib.Path({{place!r}}, f"free-{{{{number}}}}").exists():
                time.sleep(0.005)
        size = {WIDE_BYTES // 4} if number >= {WIDE} else 1
        return {{{{"y": np.zeros(size, np.float32)}}}}
"""
ONE, HELD, STORY, WORDS, REGION = "one", "held", "story", "words", "region"
_numbers = count(1)

# --- Bodies --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """An encoded body and the headers to send with it."""

    data: bytes
    headers: tuple[tuple[str, str], ...] = ()
    length: bool = True
    """Whether its length is announced."""


Make = Callable[["Place", "Body", float], Sent]


def padding(size: int) -> bytes:
    """Return white space that compresses poorly."""
    chosen = np.random.default_rng(7).integers(4, size=size)
    return bytes(np.frombuffer(b" \n\r\t", np.uint8)[chosen])


def text(place: "Place", body: "Body", value: float) -> bytes:
    asked = replace(place.asking, value=value)
    written = json.dumps(asked.json(body.door, body.model)).encode()
    return written + padding(PAD[body.protocol])


def in_json(place: "Place", body: "Body", value: float) -> Sent:
    return Sent(text(place, body, value), (("Content-Type", "application/json"),))


def in_chunks(place: "Place", body: "Body", value: float) -> Sent:
    whole = text(place, body, value)
    parts = [whole[at : at + 30_000] for at in range(0, len(whole), 30_000)]
    return Sent(chunked(*parts), (("Transfer-Encoding", "chunked"),), length=False)


def in_gzip(place: "Place", body: "Body", value: float) -> Sent:
    return Sent(gzip.compress(text(place, body, value)), (("Content-Encoding", "gzip"),))


def in_deflate(place: "Place", body: "Body", value: float) -> Sent:
    return Sent(zlib.compress(text(place, body, value)), (("Content-Encoding", "deflate"),))


def vector(value: float) -> "np.ndarray[Any, Any]":
    found = np.random.default_rng(7).random(PAD[HTTP] // 4).astype(np.float32)
    found[0] = value
    return found


def in_binary(place: "Place", body: "Body", value: float) -> Sent:
    """JSON header before binary data (binary tensor data extension; SageMaker's as well)."""
    raw = vector(value)
    given = {"binary_data_size": raw.nbytes}
    tensor = {"name": "x", "shape": [raw.size], "datatype": "FP32", "parameters": given}
    head = json.dumps({"inputs": [tensor]}).encode()
    kind = body.form
    headers = [("Inference-Header-Content-Length", str(len(head)))]
    if "sagemaker" in kind:
        kind, headers = f"{kind};json-header-size={len(head)}", []
    return Sent(head + raw.tobytes(), (("Content-Type", kind), *headers))


def of_gzip(make: Make) -> Make:
    """Compress the data that another function makes."""

    def made(place: "Place", body: "Body", value: float) -> Sent:
        sent = make(place, replace(body, form="application/octet-stream"), value)
        return Sent(gzip.compress(sent.data), (*sent.headers, ("Content-Encoding", "gzip")))

    return made


def in_csv(place: "Place", body: "Body", value: float) -> Sent:
    cells = ",".join(map(str, vector(value).tolist()))
    return Sent(cells.encode(), (("Content-Type", body.form),))


def in_npy(place: "Place", body: "Body", value: float) -> Sent:
    written = io.BytesIO()
    np.save(written, vector(value))
    return Sent(written.getvalue(), (("Content-Type", body.form),))


def in_lines(place: "Place", body: "Body", value: float) -> Sent:
    lines = b"%r\n2.0%b" % (value, b" " * PAD[HTTP])
    return Sent(lines, (("Content-Type", body.form),))


def as_image(place: "Place", body: "Body", value: float) -> Sent:
    """No model here accepts images: the request is rejected once the body has arrived."""
    kind = body.form.replace("*", "png")
    return Sent(bytes(PAD[HTTP]), (("Content-Type", kind),))


def proto(place: "Place", body: "Body", value: float) -> bytes:
    """Return a message with a long unknown field."""
    asked = replace(place.asking, value=value)
    known = asked.message(body.row, body.door, body.model)
    size = PAD[body.protocol]
    unknown = b"\xfa\x3e" + bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14])
    return known + unknown + np.random.default_rng(7).bytes(size)


def prefixed(data: bytes, *, packed: bool = False) -> bytes:
    return bytes([packed]) + len(data).to_bytes(4, "big") + data


def plain(place: "Place", body: "Body", value: float) -> Sent:
    return Sent(prefixed(proto(place, body, value)))


def packed(place: "Place", body: "Body", value: float) -> Sent:
    data = gzip.compress(proto(place, body, value))
    return Sent(prefixed(data, packed=True), (("grpc-encoding", "gzip"),))


def typed(place: "Place", body: "Body", value: float) -> Sent:
    """Numbers in typed contents, which are converted to an array."""
    request = pb.ModelInferRequest(model_name=body.model)
    values = vector(value)[: PAD[GRPC] // 4].tolist()
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[len(values)])
    tensor.contents.fp32_contents.extend(values)
    return Sent(prefixed(request.SerializeToString()))


def of_web(place: "Place", body: "Body", value: float) -> Sent:
    kind = ("Content-Type", "application/grpc-web+proto")
    return Sent(prefixed(proto(place, body, value)), (kind,))


def of_web_text(place: "Place", body: "Body", value: float) -> Sent:
    kind = ("Content-Type", "application/grpc-web-text+proto")
    return Sent(to_text(prefixed(proto(place, body, value))), (kind,))


MEDIA: Mapping[str, Make] = {
    "application/json": in_json,
    "application/octet-stream": in_binary,
    "application/vnd.sagemaker-triton.binary+json": in_binary,
    "text/csv": in_csv,
    "application/x-npy": in_npy,
    "application/jsonlines": in_lines,
    "image/*": as_image,
    "application/x-image": as_image,
}
"""Every media type that a route accepts."""
CODINGS: Mapping[str, Make] = {
    "chunks": in_chunks,
    "gzip": in_gzip,
    "deflate": in_deflate,
    "binary in gzip": of_gzip(in_binary),
}
RPC: Mapping[str, Mapping[str, Make]] = {
    GRPC: {"plain": plain, "packed": packed, "typed": typed},
    WEB: {"plain": of_web, "text": of_web_text},
}
EXECUTED = ("infer", "invoke", "invocations", "generate", "generate_stream")
"""Last path segments of routes that execute a model which the test can block."""
FORMS: Mapping[str, Make] = {**MEDIA, **CODINGS}


@dataclass(frozen=True)
class Body:
    """A kind of body for a route."""

    row: Doors
    door: str
    protocol: str
    form: str

    def __str__(self) -> str:
        """Return the test id."""
        return f"{self.door} {self.protocol} {self.form}"

    @property
    def infers(self) -> bool:
        """Return whether the route executes a model that the test can block."""
        name = self.door.rpartition("/")[2]
        return "Infer" in name.replace("ServerReflectionInfo", "") or name in EXECUTED

    @property
    def is_executed(self) -> bool:
        """Return whether the request reaches the model: images are rejected."""
        return self.infers and "image" not in self.form

    @property
    def is_endless(self) -> bool:
        """Return whether the answer continues until the client leaves."""
        return self.door.endswith("/Watch")

    @property
    def model(self) -> str:
        """Return the name of the model or region in the request."""
        if "haredmemory" in self.door.lower():
            return REGION
        if "/embeddings" in self.door:
            return WORDS
        if "/v1/" in self.door:
            return STORY
        return HELD if self.infers or "/trace/" in self.door else ONE

    @property
    def is_read(self) -> bool:
        """Return whether the route reads the body; others answer immediately."""
        if self.protocol != HTTP:
            return True
        return ROUTES[self.door].takes is not None and not self._is_refused_before

    @property
    def _is_refused_before(self) -> bool:
        return "{repository}" in self.door or "cudashared" in self.door

    @property
    def make(self) -> Make:
        """Return the function that makes the body."""
        return FORMS[self.form] if self.protocol == HTTP else RPC[self.protocol][self.form]


def forms(door: str, protocol: str) -> Iterator[str]:
    if protocol != HTTP:
        for form in RPC[protocol]:
            if form != "typed" or door.endswith("/ModelInfer"):
                yield form
        return
    takes = ROUTES[door].takes
    media = takes.media_types if takes is not None else ("application/json",)
    yield from media
    yield from ("chunks", "gzip", "deflate")
    if "application/octet-stream" in media:
        yield "binary in gzip"


def bodies() -> Iterator[Body]:
    """Yield each kind of body for each route that takes one."""
    seen = set()
    for row, door, protocol in cells():
        if (door, protocol) in seen or (protocol == HTTP and not door.startswith("POST")):
            continue
        seen.add((door, protocol))
        for form in forms(door, protocol):
            yield Body(row, door, protocol, form)


BODIES = sorted(bodies(), key=str)

# --- Client --------------------------------------------------------------------------------------


class Client:
    """A connection with one request."""

    def __init__(self, body: Body, reader: asyncio.StreamReader, writer: Any) -> None:
        self.body = body
        self.writer = writer
        self.http = Connection(reader, writer)
        self._reader = reader
        self.wire: Wire | None = None
        self.stream = 0

    async def begin(self, sent: Sent, *more: tuple[str, str], length: int | None = None) -> None:
        """Send the headers; `length` overrides the announced length."""
        headers = [*sent.headers, *more]
        if self.body.protocol == GRPC:
            self.wire = Wire(self._reader, self.writer)
            await self.wire.ping()
            self.stream = self.wire.open(request_headers(self.body.door, *headers))
            return
        names = {"model": self.body.model, "version": "1", "repository": "r", "region": REGION}
        method, path = ("POST", self.body.door)
        if self.body.protocol == HTTP:
            method, _, path = self.body.door.partition(" ")
        told = (len(sent.data) if length is None else length) if sent.length else None
        await self.http.send(message(method, path.format_map(names), *headers, length=told))

    async def send(self, data: bytes, *, last: bool) -> None:
        """Send a part of the body."""
        if self.wire is None:
            await self.http.send(data)
            return
        for at in range(0, len(data), 1 << 14):
            piece = data[at : at + (1 << 14)]
            ends = last and at + len(piece) == len(data)
            self.wire.h2.send_data(self.stream, piece, end_stream=ends)
        self.wire.flush()

    async def answer(self) -> str:
        """Read the whole answer, or the first message of an endless one; return the status."""
        is_endless = self.body.is_endless
        if self.wire is not None:
            if is_endless:
                kinds: Any = (h2.events.DataReceived, h2.events.StreamEnded)
                if isinstance(await self.wire.until(kinds, self.stream), kinds[0]):
                    return "0"
            else:
                await self.wire.until(h2.events.StreamEnded, self.stream)
            blocks: Any = [e for e in self.wire.events if hasattr(e, "headers")]
            return str(dict(blocks[-1].headers)["grpc-status"])
        answer = await self.http.answer()
        if "transfer-encoding" in answer.headers:
            told = await read_chunks(self.http, first=is_endless)
            answer = replace(answer, body=told)
        if self.body.protocol == HTTP:
            return str(answer.status)
        if "grpc-status" in answer.headers:
            return answer.headers["grpc-status"]
        told = plain_web(answer.body) if self.body.form == "text" else answer.body
        return (
            told.rpartition(b"grpc-status:")[2].split()[0].decode() if b"-status" in told else "0"
        )

    async def reset(self) -> None:
        """Cancel the request, by closing the connection if the protocol has no other way."""
        if self.wire is None:
            self.close()
        else:
            self.wire.h2.reset_stream(self.stream, ErrorCodes.CANCEL)
            await self.wire.ping()

    def close(self) -> None:
        """Close the connection without ending the protocol."""
        self.writer.transport.abort()


@dataclass
class Place:
    """The server under test."""

    server: RunningServer
    asking: Asking
    folder: Path
    faults: list[str]
    """Double releases since the last check."""

    @property
    def ledger(self) -> Ledger:
        return self.server.application.ledger

    @property
    def held(self) -> Any:
        return self.server.application.registry.resolve(HELD)[1]

    async def load(self) -> None:
        """Load the models that are not loaded."""
        for name in (HELD, STORY, WORDS):
            if not self.server.application.registry.ready(name):
                path = f"/v2/repository/models/{name}/load"
                loaded = await self.asking.send("POST", path, "")
                assert loaded.status == 200, loaded.body

    def free(self, number: float) -> None:
        """Release the execution for a number."""
        (self.folder / f"free-{int(number)}").touch()

    async def begun(self, number: float) -> None:
        await until((self.folder / f"begun-{int(number)}").exists)

    @asynccontextmanager
    async def client(self, body: Body) -> AsyncIterator[Client]:
        """Connect with a small receive buffer."""
        url = self.server.url if body.protocol == GRPC else str(self.server.http)
        host, _, port = url.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
        try:
            yield Client(body, reader, writer)
        finally:
            writer.close()

    async def is_even(self) -> None:
        """Wait until nothing of any kind is held; fail if anything was released twice."""
        kinds = [*Kind]
        await until(lambda: not any([self.ledger.held, *map(self.ledger.held_for, kinds)]))
        faults, self.faults[:] = self.faults[:], []
        assert not faults, faults[0]
        assert not self.ledger.waiting


@asynccontextmanager
async def running(folder: Path, faults: list[str], **settings: Any) -> AsyncIterator[Place]:
    models = folder / "models"
    identity_models.write(models, ONE, "FP32")
    write(models, HELD, GATED.format(place=str(folder)), VECTORS)
    scripted_language.export(models / STORY, ["x" * 200], scripted_language.HERMES)
    tiny_embedding.export(models / WORDS)
    memory = shared_memory.SharedMemory(create=True, size=16)
    settings = {
        "http_endpoint": "port:0",
        "modelmesh": True,
        "shared_memory": "all",
        "default_model": HELD,
        "cors_origin": ("https://app.example",),  # gRPC-Web is off without it
        "trace_file": str(folder / "traces"),
        "allow_python_models": True,
        "max_held_bytes": LIMIT,
        "max_message_bytes": MOST_BYTES,
        **settings,
    }
    try:
        async with serving(folder, models, **settings) as server:
            assert server.http is not None
            asking = Asking(server.url, server.http, memory.name, ONE, models)
            place = Place(server, asking, folder, faults)
            await place.load()
            yield place
        await place.is_even()
    finally:
        memory.close()
        memory.unlink()


def noting_faults(changed: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records each release of more than was held."""
    faults: list[str] = []
    release = Account.release

    def noted(account: Account, size: int, kind: Kind = Kind.REQUESTS) -> None:
        release(account, size, kind)
        if min(size, account.held_for(kind), account.ledger.held_for(kind)) < 0:
            faults.append(f"{size} bytes of {kind.name} leave {account.held_for(kind)}")

    changed.setattr(Account, "release", noted)
    return faults


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="place")
async def _place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    with pytest.MonkeyPatch.context() as changed:
        faults = noting_faults(changed)
        async with running(tmp_path_factory.mktemp("matrix"), faults) as place:
            yield place


# --- How requests end ----------------------------------------------------------------------------


def new_number(*, wide: bool = False) -> float:
    return float(next(_numbers) + (WIDE if wide else 0))


async def whole(place: Place, client: Client, *more: tuple[str, str], wide: bool = False) -> float:
    """Send a body; return its number once the model executes it."""
    number = new_number(wide=wide)
    sent = client.body.make(place, client.body, number)
    await client.begin(sent, *more)
    await client.send(sent.data, last=True)
    if client.body.is_executed:
        await place.begun(number)
    return number


async def partly(place: Place, client: Client, *more: tuple[str, str]) -> bytes:
    """Send all but the last byte of a body; return that byte once the others are charged."""
    sent = client.body.make(place, client.body, new_number())
    await client.begin(sent, *more)
    await client.send(sent.data[:-1], last=False)
    if client.body.is_read:
        around = 200 if client.body.form == "chunks" else 5
        await until(lambda: place.ledger.held >= len(sent.data) - around)
    return sent.data[-1:]


async def answered(place: Place, body: Body) -> None:
    """Two requests on one connection, because the second may take a fast path."""
    async with place.client(body) as client:
        for _ in range(1 if body.protocol == GRPC or body.is_endless else 2):
            number = new_number()
            sent = body.make(place, body, number)
            place.free(number)
            await client.begin(sent)
            await client.send(sent.data, last=True)
            assert await client.answer() not in ("500", "13", "2")
            if not body.is_endless:
                await place.is_even()


async def answered_late(place: Place, body: Body) -> None:
    """The ledger holds it while the model executes."""
    async with place.client(body) as client:
        number = await whole(place, client)
        if body.is_executed:
            assert place.ledger.held > 0
        place.free(number)
        await client.answer()
        if not body.is_endless:
            await place.is_even()


async def too_large(place: Place, body: Body) -> None:
    await _announced(place, body, MOST_BYTES + 1, ("413", "8"))


async def without_memory(place: Place, body: Body) -> None:
    await _announced(place, body, place.ledger.most + 1, ("503", "8"))


async def without_memory_to_parse(place: Place, body: Body) -> None:
    """There is memory for the body, but not for the parsed objects."""
    sent = body.make(place, body, new_number())
    sent = replace(sent, data=sent.data + padding(MIB))
    other = place.ledger.open()
    # The more others hold, the smaller a connection's share of the limit.
    other.hold(LIMIT - isqrt(LIMIT * len(sent.data) * 5 // 2))
    try:
        async with place.client(body) as client:
            await client.begin(sent)
            await client.send(sent.data, last=True)
            answer = await client.http.answer()
    finally:
        other.close()
    assert answer.status == 503
    assert b"the parsed body" in answer.body
    await place.is_even()


async def _announced(place: Place, body: Body, size: int, refused: tuple[str, ...]) -> None:
    sent = body.make(place, body, new_number())
    async with place.client(body) as client:
        await client.begin(sent, length=size)
        prefix = sent.data[:1] + size.to_bytes(4, "big")
        await client.send(prefix + sent.data[5:1000] if body.protocol == GRPC else b"{", last=False)
        status = await client.answer()
        if body.is_read:
            assert status in refused
        await place.is_even()


async def given_up_as_it_came(place: Place, body: Body) -> None:
    async with place.client(body) as client:
        await partly(place, client)
        await client.reset()
        await place.is_even()


async def gone_as_it_came(place: Place, body: Body) -> None:
    async with place.client(body) as client:
        await partly(place, client)
        client.close()
        await place.is_even()


async def expired_as_it_came(place: Place, body: Body) -> None:
    async with place.client(body) as client:
        sent = body.make(place, body, new_number())
        await client.begin(sent, ("grpc-timeout", "20m"))
        await client.send(sent.data[:-1], last=False)
        assert await client.answer() == "4"
        await place.is_even()


async def gone_as_it_waited_for_memory(place: Place, body: Body) -> None:
    other = place.ledger.open()
    other.hold(LIMIT - MIB)
    try:
        async with place.client(body) as client:
            sent = body.make(place, body, new_number())
            await client.begin(sent)
            await client.send(sent.data[:-1], last=False)
            await until(lambda: place.ledger.waiting)
            client.close()
            await until(lambda: not place.ledger.waiting and place.ledger.held == other.held)
    finally:
        other.close()
    await place.is_even()


async def given_up_as_it_was_executed(place: Place, body: Body) -> None:
    async with place.client(body) as client:
        number = await whole(place, client)
        await client.reset()
        if not body.is_endless:
            await place.is_even()
        place.free(number)
    await place.is_even()


async def expired_as_it_was_executed(place: Place, body: Body) -> None:
    """On a busy machine, possibly earlier."""
    async with place.client(body) as client:
        number = new_number()
        sent = body.make(place, body, number)
        await client.begin(sent, ("grpc-timeout", "300m"))
        await client.send(sent.data, last=True)
        assert await client.answer() == "4"
        await place.is_even()
        place.free(number)


async def given_up_in_the_queue(place: Place, body: Body) -> None:
    async with place.client(body) as first, place.client(body) as second:
        number = await whole(place, first)
        before, queued = place.ledger.held, new_number()
        sent = body.make(place, body, queued)
        await second.begin(sent)
        await second.send(sent.data, last=True)
        await until(lambda: place.held.pending)
        assert place.ledger.held > before
        await second.reset()
        await until(lambda: place.ledger.held == before)
        place.free(number)
        place.free(queued)
        await first.answer()
        await place.is_even()


async def gone_as_its_answer_was_written(place: Place, body: Body) -> None:
    async with place.client(body) as client:
        number = await whole(place, client, wide=True)
        if client.wire is not None:
            client.wire.acknowledges = False
        place.free(number)
        kind = Kind.REQUESTS if body.door.endswith("_stream") else Kind.ANSWERS  # of event streams
        await until(lambda: place.ledger.held_for(kind) >= MIB)
        await client.reset()
        await place.is_even()


End = Callable[[Place, Body], Awaitable[None]]
ENDS: Mapping[End, Callable[[Body], bool]] = {
    answered: lambda body: True,
    answered_late: lambda body: body.is_executed,
    too_large: lambda body: body.form != "chunks",
    without_memory: lambda body: body.form != "chunks",
    without_memory_to_parse: lambda body: body.is_read and body.form == "application/json",
    given_up_as_it_came: lambda body: True,
    gone_as_it_came: lambda body: True,
    expired_as_it_came: lambda body: body.protocol != HTTP,
    gone_as_it_waited_for_memory: lambda body: body.protocol != GRPC and body.is_read,
    given_up_as_it_was_executed: lambda body: True,
    expired_as_it_was_executed: lambda body: body.protocol != HTTP and body.infers,
    given_up_in_the_queue: lambda body: body.is_executed,
    # Python-encoded answers are rejected: they may be longer than a connection may hold.
    gone_as_its_answer_was_written: lambda body: (
        body.is_executed and body.form.rpartition("/")[2] not in ("jsonlines", "csv", "x-npy")
    ),
}
"""Ways to end, each with the bodies it applies to."""
SAMPLE = 23
"""For each way to end, one in SAMPLE bodies runs in quick tests."""


def cases() -> Iterator[Any]:
    """Yield all pairs; a sample with every way to end is quick."""
    for row, (end, is_of) in enumerate(ENDS.items()):
        for column, body in enumerate(filter(is_of, BODIES)):
            is_quick = end is without_memory_to_parse or (column + 2 * row) % SAMPLE == 0
            marks = [] if is_quick else [pytest.mark.slow]
            yield pytest.param(end, body, marks=marks, id=f"{end.__name__} {body}")


@pytest.mark.parametrize(("end", "body"), [*cases()])
async def test_the_ledger_is_what_it_was_before(place: Place, end: End, body: Body) -> None:
    await place.load()  # a mesh that asks for the status unloads everything
    first = next(_numbers)
    try:
        await end(place, body)
    finally:
        # Release everything, or the next test would wait for a failed one.
        for number in range(first, next(_numbers)):
            place.free(number)
            place.free(number + WIDE)

    await place.is_even()


async def test_every_media_type_of_a_route_has_a_body() -> None:
    taken = [route.takes for route in ROUTES.values() if route.takes is not None]

    assert set(MEDIA) == {kind for body in taken for kind in body.media_types}


async def test_a_server_that_drains_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies that have not arrived, and requests being executed."""
    faults = noting_faults(monkeypatch)
    kinds = {(body.protocol, body.form): body for body in BODIES if body.is_read}
    async with AsyncExitStack() as stack:
        async with running(tmp_path, faults, grace_seconds=0.5) as place:
            for body in kinds.values():
                await partly(place, await stack.enter_async_context(place.client(body)))
            executed = [body for body in BODIES if body.is_executed][::SAMPLE]
            client = await stack.enter_async_context(place.client(executed[0]))
            number = await whole(place, client)
            queued = await stack.enter_async_context(place.client(executed[1]))
            sent = executed[1].make(place, executed[1], number)
            await queued.begin(sent)
            await queued.send(sent.data, last=True)
            await until(lambda: place.held.pending)
            held = place.ledger.held
            asyncio.get_running_loop().call_later(1.0, place.free, number)

    assert held >= sum(PAD[body.protocol] for body in kinds.values() if body.form == "plain")
