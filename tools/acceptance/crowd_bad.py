"""Kinds of clients that send invalid requests, disconnect, stall, load models, or send signals."""

# pyright: reportAttributeAccessIssue=false
# protobuf generates the classes of service_pb2 at import time, so type checkers do not see them.

import asyncio
import json
import signal
from random import Random

import grpc
import numpy as np
from support import hoarders, wire
from support.http import connect, message
from support.victim import infer_request
from tritonclient.grpc import service_pb2 as pb

from acceptance.asking import SECONDS, infer_message
from acceptance.books import Fate
from acceptance.crowd import TURN_SECONDS, Kind, Place
from acceptance.crowd_good import echoes, json_of, programs, some
from acceptance.subjects import PLUS, WIDTH

_INFER = "/inference.GRPCInferenceService/ModelInfer"
_TOO_LARGE = 9 << 20
"""Larger than the server's message limit (MESSAGE_BYTES)."""
MESSAGE_BYTES = 8 << 20
_WIDE = 1 << 18
_STALL_SECONDS = 60.0
_ABSENT_CHAT = b'{"model": "absent", "messages": [{"role": "user", "content": "a"}]}'
_REFUSED_REST: tuple[tuple[str, str, bytes, int], ...] = (
    ("POST", "/v2/models/absent/infer", b'{"inputs": []}', 404),
    ("POST", "/v2/models/bad-rest.echo/infer", b'{"inputs": [', 400),
    ("POST", "/v2/models/bad-rest.echo/infer", b"\xff\xfe", 400),
    ("POST", "/v2/models/bad-rest.echo/infer", b"[" * 10_000, 400),
    ("PUT", "/v2/models/bad-rest.echo", b"", 405),
    ("GET", "/v2/models/bad-rest.echo/versions/99", b"", 404),
    ("GET", "/v3/nothing", b"", 404),
    ("POST", "/v1/chat/completions", _ABSENT_CHAT, 404),
    ("POST", "/v2/repository/models/absent/load", b"{}", 404),
)
_GARBAGE: tuple[bytes, ...] = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a port that does not speak it
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x00" * 100,
    b"POST /v2/models/x/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n",
    b"GET /v2 HTTP/9.9\r\n\r\n",
    b"",
)


# --- Rejected requests -------------------------------------------------------------------------


async def _bad_grpc(place: Place, random: Random) -> None:
    raw = place.channel.unary_unary(_INFER)
    argument, large = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
    await place.refused(raw(b"\xff" * 20, timeout=SECONDS), argument, grpc.StatusCode.INTERNAL)
    if not random.randrange(10):
        await place.refused(raw(bytes(_TOO_LARGE), timeout=SECONDS), large)
    absent = infer_message("absent", some(random))
    infer = place.stub.ModelInfer
    await place.refused(infer(absent, timeout=SECONDS), grpc.StatusCode.NOT_FOUND)
    wrong = infer_message("bad-grpc.plus", np.zeros((1, WIDTH + 1), np.float32))
    await place.refused(infer(wrong, timeout=SECONDS), argument)
    place.books.note("bad-grpc.plus", Fate.FAILED)
    nothing = place.channel.unary_unary("/inference.GRPCInferenceService/Nothing")
    await place.refused(nothing(b"", timeout=SECONDS), grpc.StatusCode.UNIMPLEMENTED)
    async with wire.connect(place.subject.grpc) as connection:
        headers = wire.request_headers(_INFER, ("grpc-encoding", "zstd"))
        stream = connection.open(headers)
        connection.h2.send_data(stream, b"\1\0\0\0\3abc", end_stream=True)
        connection.flush()
        async with asyncio.timeout(SECONDS):
            status = (await connection.trailers(stream))["grpc-status"]
    place.books.expect(status == "12", f"zstd was {status}")


async def _bad_rest(place: Place, random: Random) -> None:
    method, path, body, status = random.choice(_REFUSED_REST)
    async with connect(place.subject.http) as connection:
        answer = await connection.ask(message(method, path, body=body))
    if path == "/v2/models/bad-rest.echo/infer":
        place.books.note("bad-rest.echo", Fate.FAILED)
    place.books.expect(answer.status == status, f"{method} {path} was {answer.status}")
    body = json.dumps(json_of(["text"], "BYTES")).encode()
    path = "/v2/models/bad-rest.echo/infer"
    async with place.session.post(path, data=body) as refused:
        text = await refused.text()
    place.books.note("bad-rest.echo", Fate.FAILED)
    place.books.expect(refused.status == 400, f"a wrong datatype was {refused.status} {text}")


async def _odd(place: Place, random: Random) -> None:
    """Open connections with nonsensical contents to either port."""
    url = random.choice((place.subject.grpc, place.subject.http))
    async with connect(url) as connection:
        octets = random.choice((*_GARBAGE, random.randbytes(random.randint(1, 300))))
        await connection.send(octets)
        await place.pause(random.uniform(0, 0.3))


# --- Disconnecting and slow clients ------------------------------------------------------------


async def _cancels(place: Place, random: Random) -> None:
    rows = np.ones((1, WIDTH), np.float32)
    calls = [
        place.stub.ModelInfer(infer_message("cancels.plus", rows), timeout=SECONDS)
        for _ in range(10)
    ]
    await asyncio.sleep(random.uniform(0, 0.01))
    for call in calls:
        call.cancel()
    place.books.note("cancels.plus", Fate.UNSURE, len(calls))
    await asyncio.gather(*calls, return_exceptions=True)


async def _deadlines(place: Place, random: Random) -> None:
    asked = infer_message("deadlines.plus", np.ones((1, WIDTH), np.float32))
    try:
        await place.stub.ModelInfer(asked, timeout=random.uniform(1e-4, 1e-2))
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        place.books.note("deadlines.plus", Fate.UNSURE)
    else:
        place.books.note("deadlines.plus", Fate.ANSWERED)


async def _leaves(place: Place, random: Random) -> None:
    """Disconnect at a random byte of a message."""
    grpc_octets = hoarders.grpc_opening(1 << 20)
    asked = infer_message("leaves.echo", np.ones(WIDTH, np.float32)).SerializeToString()
    grpc_octets += hoarders.grpc_requests(asked, range(1, 21, 2))
    body = json.dumps(json_of([1.0] * 200)).encode()
    http_octets = hoarders.http_request("leaves.echo", len(body)) + body
    for url, octets, most in (
        (place.subject.grpc, grpc_octets, 10),
        (place.subject.http, http_octets, 1),
    ):
        place.books.note("leaves.echo", Fate.UNSURE, most)
        async with connect(url) as connection:
            await connection.send(octets[: random.randrange(1, len(octets))])
            await place.pause(random.uniform(0, 0.05))
            connection.writer.transport.abort()


async def _slow(place: Place, random: Random) -> None:
    """Send a request in small pieces and read a large answer slowly."""
    body = json.dumps(json_of([1.5] * _WIDE)).encode()
    request = message("POST", "/v2/models/slow.echo/infer", body=body)
    async with connect(place.subject.http) as connection:
        for start in range(0, len(request), len(request) // 5 + 1):
            await connection.send(request[start : start + len(request) // 5 + 1])
            await place.pause(random.uniform(0, 0.3))
        async with asyncio.timeout(SECONDS):
            head = await connection.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r")[0])
            found = b""
            while len(found) < length:
                found += await connection.reader.read(1 << 18)
                await place.pause(0.02)
    place.books.note("slow.echo", Fate.ANSWERED)
    data = json.loads(found)["outputs"][0]["data"]
    place.books.expect(data == [1.5] * _WIDE, "a slow answer was another")


async def _stalls(place: Place, random: Random) -> None:
    """Send the beginning of a message, then nothing until the server disconnects."""
    octets = hoarders.grpc_opening(1 << 20)
    octets += hoarders.grpc_requests(infer_request("absent", WIDTH), range(1, 3, 2))[:-20]
    async with connect(place.subject.grpc) as connection:
        await connection.send(octets)
        await place.pause(_STALL_SECONDS)


# --- Loads and signals -------------------------------------------------------------------------


async def _loads(place: Place, random: Random) -> None:
    await place.unload("loads.plus")
    place.books.note("loads.plus", Fate.UNLOADED)
    asked = infer_message("loads.plus", np.ones((1, WIDTH), np.float32))
    call = place.stub.ModelInfer(asked, timeout=SECONDS)
    await place.refused(call, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE)
    await place.load("loads.plus")
    place.books.note("loads.plus", Fate.LOADED)
    found = await place.infer("loads.plus", np.ones((1, WIDTH), np.float32))
    place.books.expect(bool((found == 1 + PLUS).all()), f"1 + 1 was {found}")


async def _reloads(place: Place, random: Random) -> None:
    """Change a model and reload it while it serves requests."""
    config = place.models / "reloads.plus" / "config.json"
    written = config.with_name(".config")
    written.write_text(json.dumps({"max_batch_size": place.books.turns % 3 + 1}))
    written.replace(config)

    async def ask() -> None:
        for _ in range(5):
            found = await place.infer("reloads.plus", np.ones((1, WIDTH), np.float32))
            place.books.expect(bool((found == 1 + PLUS).all()), f"1 + 1 was {found}")

    async with asyncio.TaskGroup() as group:
        group.create_task(ask())
        group.create_task(place.load("reloads.plus"))
    place.books.note("reloads.plus", Fate.LOADED)


async def _bad_loads(place: Place, random: Random) -> None:
    """Send loads that fail; the model must stay as it was."""
    missing, failed = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION
    await place.refused(place.load("absent"), missing)
    await place.refused(place.load("bad-loads.echo", config='{"backend": '), failed)
    place.books.note("bad-loads.echo", Fate.NOT_LOADED)
    request = pb.RepositoryModelLoadRequest(model_name="bad-loads.echo")
    request.parameters["config"].string_param = json.dumps({"backend": "onnxruntime"})
    request.parameters["file:1/model.onnx"].bytes_param = random.randbytes(200)
    load = place.stub.RepositoryModelLoad(request, timeout=TURN_SECONDS)
    await place.refused(load, failed)
    place.books.note("bad-loads.echo", Fate.NOT_LOADED)
    sent = some(random)
    found = await place.infer("bad-loads.echo", sent)
    place.books.expect(np.array_equal(found, sent), f"echo of {sent} was {found}")


async def _overrides(place: Place, random: Random) -> None:
    """Load a model whose files are part of the request."""
    source = place.models / "overrides.plus" / "1"
    request = pb.RepositoryModelLoadRequest(model_name="overrides.plus")
    request.parameters["config"].string_param = json.dumps({"max_batch_size": 2})
    for path in source.iterdir():
        request.parameters[f"file:1/{path.name}"].bytes_param = path.read_bytes()
    await place.stub.RepositoryModelLoad(request, timeout=TURN_SECONDS)
    place.books.note("overrides.plus", Fate.LOADED)
    found = await place.infer("overrides.plus", np.ones((1, WIDTH), np.float32))
    place.books.expect(bool((found == 1 + PLUS).all()), f"1 + 1 was {found}")


async def _signals(place: Place, random: Random) -> None:
    place.subject.process.send_signal(signal.SIGHUP)


KINDS = (
    Kind("bad-grpc", _bad_grpc, ("bad-grpc.plus",), programs("bad-grpc.plus"), pause_seconds=0.1),
    Kind("bad-rest", _bad_rest, ("bad-rest.echo",), echoes("bad-rest.echo"), pause_seconds=0.05),
    Kind("odd", _odd, clients=2),
    Kind("cancels", _cancels, ("cancels.plus",), programs("cancels.plus"), pause_seconds=3),
    Kind(
        "deadlines", _deadlines, ("deadlines.plus",), programs("deadlines.plus"), pause_seconds=0.5
    ),
    Kind("leaves", _leaves, ("leaves.echo",), echoes("leaves.echo")),
    Kind("slow", _slow, ("slow.echo",), echoes("slow.echo")),
    Kind("stalls", _stalls),
    Kind("loads", _loads, ("loads.plus",), programs("loads.plus"), pause_seconds=0.5),
    Kind("reloads", _reloads, ("reloads.plus",), programs("reloads.plus"), pause_seconds=0.5),
    Kind("bad-loads", _bad_loads, ("bad-loads.echo",), echoes("bad-loads.echo"), pause_seconds=0.5),
    Kind("overrides", _overrides, ("overrides.plus",), programs("overrides.plus"), pause_seconds=1),
    Kind("signals", _signals, pause_seconds=5),
)
