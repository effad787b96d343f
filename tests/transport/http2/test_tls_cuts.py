"""HTTP/2 over TLS: no data is lost, wherever records and segments end."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop
from hpack import Decoder
from support import identity_models
from support.engines import own_engine_only
from support.frames import PREFACE, SETTINGS_ACK, Kind, data, headers, literals, parse, settings
from support.server import Serve
from support.tls import TlsClient, connected, trusting, write_certificate
from support.wire import framed, request_headers

from xlaserve_proto import inference as pb

pytestmark = own_engine_only
SERVICE = "/inference.GRPCInferenceService/"
RECORD_BYTES = 1 << 14
HEAD_OF_RECORD = 5

INFER, LIVE = (literals(request_headers(SERVICE + name)) for name in ("ModelInfer", "ServerLive"))


def echo(octets: bytes) -> bytes:
    """Make a request that returns these bytes."""
    tensor = pb.ModelInferRequestInferInputTensor(name="x", datatype="UINT8", shape=[len(octets)])
    message = pb.ModelInferRequest("echo", inputs=[tensor], raw_input_contents=[octets])
    return framed(bytes(message))


def asked(stream: int, block: bytes, message: bytes) -> bytes:
    return bytes(headers(stream, block)) + bytes(data(stream, message, end_stream=True))


GREETING = PREFACE + bytes(settings()) + bytes(SETTINGS_ACK)


def exchange(stream: int) -> bytes:
    """Make two requests."""
    return asked(stream, INFER, echo(b"one")) + asked(stream + 2, LIVE, framed(b""))


EXCHANGE_BYTES = len(exchange(1))
STREAMS = 2

LONG = bytes(range(256)) * 200
"""Long enough that the rest of its frame is received directly into the message buffer."""
LONG_CONVERSATION = PREFACE + bytes(settings()) + asked(1, INFER, echo(LONG))


def answers(received: bytes) -> dict[int, tuple[bytes, str]]:
    """Return the answer to each request: the bytes of its tensor, and its status."""
    decoder, bodies, statuses = Decoder(), dict[int, bytes](), dict[int, str]()
    for frame in parse(received)[0]:
        if frame.kind == Kind.DATA:
            bodies[frame.stream] = bodies.get(frame.stream, b"") + frame.payload
        elif frame.kind == Kind.HEADERS:
            lines = {str(name): str(value) for name, value in decoder.decode(frame.payload)}
            statuses[frame.stream] = lines.get("grpc-status", "")
    return {stream: (_tensor(bodies.get(stream, b"")), statuses[stream]) for stream in statuses}


def _tensor(body: bytes) -> bytes:
    contents = pb.ModelInferResponse().parse(body[5:]).raw_output_contents
    return contents[0] if contents else b""


def ended(*streams: int) -> Callable[[bytes], bool]:
    """Make a predicate that tells whether these requests were answered, in any order."""
    return lambda received: (
        {*streams} == {frame.stream for frame in parse(received)[0] if frame.ends_stream}
    )


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Signs the certificate of the server."""
    return trustme.CA()


Connect = Callable[[], Any]
Run = Callable[[Callable[[Connect], Awaitable[Any]]], Any]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, serve: Serve, tmp_path: Path, authority: trustme.CA) -> Run:
    """Run a coroutine against a server, with each kind of event loop."""
    models = tmp_path / "models"
    identity_models.write(models, "echo", "UINT8")
    certificate = write_certificate(authority, tmp_path)
    context = trusting(authority)

    async def beside(conversation: Callable[[Connect], Awaitable[Any]]) -> Any:
        endpoint = f"unix:{tmp_path}/grpc.sock"
        async with serve(
            models, load_model=("echo",), grpc_endpoint=endpoint, **certificate
        ) as server:
            return await conversation(lambda: connected(server.url, context))

    def run(conversation: Callable[[Connect], Awaitable[Any]]) -> Any:
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(beside(conversation))

    return run


async def answered(client: TlsClient, stream: int) -> bool:
    """Tell whether both requests of an exchange, starting at this stream, were answered."""
    received = await client.receive(ended(stream, stream + 2))
    return {stream: (b"one", "0"), stream + 2: (b"", "0")} == answers(received)


def in_pieces(record: bytes) -> list[bytes]:
    """Cut a record after the first byte of its payload, and before its last byte."""
    return [record[: HEAD_OF_RECORD + 1], record[HEAD_OF_RECORD + 1 : -1], record[-1:]]


def test_a_record_may_end_anywhere_in_a_greeting(run: Run) -> None:
    async def conversation(connect: Connect) -> None:
        said = GREETING + exchange(1)
        for cut in range(1, len(GREETING) + 1):
            async with connect() as client:
                await client.send(client.record(said[:cut]))
                await client.send(*in_pieces(client.record(said[cut:])))

                assert await answered(client, 1), cut

    run(conversation)


def test_a_record_may_end_anywhere_in_a_request(run: Run) -> None:
    """The next record may come in pieces: an incomplete record yields no bytes of a frame."""

    async def conversation(connect: Connect) -> None:
        async with connect() as client:
            await client.send(client.record(GREETING))
            for cut in range(1, EXCHANGE_BYTES):
                stream = 2 * STREAMS * cut + 1
                said = exchange(stream)
                await client.send(client.record(said[:cut]))
                await client.send(*in_pieces(client.record(said[cut:])))

                assert await answered(client, stream), cut

    run(conversation)


def test_a_segment_may_end_anywhere(run: Run) -> None:
    async def conversation(connect: Connect) -> None:
        async with connect() as client:
            await client.send(client.record(GREETING))
            for cut in range(1, EXCHANGE_BYTES + 2 * HEAD_OF_RECORD):
                stream = 2 * STREAMS * cut + 1
                said = exchange(stream)
                # Two records, so that the first ends inside a frame.
                octets = client.record(said[:3]) + client.record(said[3:])
                await client.send(octets[:cut], octets[cut:])

                assert await answered(client, stream), cut

    run(conversation)


def test_every_byte_may_be_a_record_in_segments(run: Run) -> None:
    async def conversation(connect: Connect) -> None:
        async with connect() as client:
            for octet in GREETING + exchange(1):
                await client.send(*in_pieces(client.record(bytes((octet,)))))

            assert await answered(client, 1)

    run(conversation)


def test_long_messages_are_received_whatever_their_records(run: Run) -> None:
    async def conversation(connect: Connect) -> None:
        for size in (4099, RECORD_BYTES - 1, RECORD_BYTES):
            async with connect() as client:
                for start in range(0, len(LONG_CONVERSATION), size):
                    record = client.record(LONG_CONVERSATION[start : start + size])
                    await client.send(record[:3], record[3:9], record[9:1500], record[1500:])

                assert {1: (LONG, "0")} == answers(await client.receive(ended(1)))

    run(conversation)
