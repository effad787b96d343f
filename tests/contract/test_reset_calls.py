"""Calls cancelled at every stage, on both HTTP/2 engines: both count them alike."""

import re
import urllib.request
from asyncio import sleep, timeout, to_thread
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h2.events
import h2.settings
import numpy as np
import pytest
import pytest_asyncio
from h2.errors import ErrorCodes
from support.conditions import MOST_SECONDS, until
from support.python_models import write
from support.server import RunningServer, serving
from support.wire import Wire, connect, framed, request_headers
from tritonclient.grpc import service_pb2 as pb

from xlaserve.settings.choices import Http2Engine

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVICE = "/inference.GRPCInferenceService"
UNARY, STREAM = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"
CONFIG = """
input [{ name: "x", data_type: TYPE_FP32, dims: [ 1 ] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ 1 ] }]
"""
GATED = """
import pathlib, time

class Model(PythonModel):
    def infer(self, inputs):
        number = int(inputs["x"][0])
        if number:  # warm-ups are of zeros
            pathlib.Path({place!r}, f"begun-{{number}}").touch()
            while not pathlib.Path({place!r}, f"free-{{number}}").exists():
                time.sleep(0.01)
        return {{"y": inputs["x"]}}
"""
COUNTED = re.compile(
    r"^(?:nv_inference_request_(success)|nv_inference_request_failure|xlaserve_refusals_total)"
    r'{(?:.*reason="(\w+)")?.*} (\S+)$',
    re.M,
)


@dataclass
class Place:
    """A server with a model whose answers the test releases."""

    server: RunningServer
    wire: Wire
    folder: Path
    number: int

    def message(self) -> bytes:
        request = pb.ModelInferRequest(model_name="held")
        request.inputs.add(name="x", datatype="FP32", shape=[1])
        request.raw_input_contents.append(np.full(1, self.number, np.float32).tobytes())
        return bytes(request.SerializeToString())

    def let_go(self) -> None:
        (self.folder / f"free-{self.number}").touch()

    async def begun(self) -> None:
        await until((self.folder / f"begun-{self.number}").exists)

    async def opened(self, path: str) -> int:
        """Send headers; return the stream id once the server has read them."""
        stream = self.wire.open(request_headers(path))
        await self.wire.ping()
        return stream

    async def executing(self, path: str = UNARY) -> int:
        """Send a complete call; return its stream id once the model executes it."""
        stream = self.wire.send(request_headers(path), self.message())
        await self.begun()
        return stream

    async def reset(self, stream: int) -> None:
        """Reset a stream, and wait until the server has read that."""
        self.wire.h2.reset_stream(stream, ErrorCodes.CANCEL)
        await self.wire.ping()


async def reset_before_a_message(place: Place) -> None:
    await place.reset(await place.opened(UNARY))


async def reset_within_a_message(place: Place) -> None:
    stream = await place.opened(UNARY)
    place.wire.h2.send_data(stream, framed(place.message())[:20])
    await place.wire.ping()
    await place.reset(stream)


async def reset_while_executed(place: Place) -> None:
    await place.reset(await place.executing())


async def reset_behind_its_answer(place: Place) -> None:
    stream = await place.executing()
    place.let_go()
    await place.wire.until(h2.events.StreamEnded, stream)
    await place.wire.ping()


async def reset_with_an_answer_unsent(place: Place) -> None:
    """Flow control keeps the whole answer unsent, then the client cancels."""
    place.wire.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
    await place.wire.ping()
    stream = await place.executing()
    place.let_go()
    await place.wire.until(h2.events.ResponseReceived, stream)
    await place.reset(stream)


async def ended_without_a_message(place: Place) -> None:
    stream = place.wire.send_nothing(request_headers(UNARY))
    await place.wire.until(h2.events.StreamEnded, stream)


async def ended_within_a_message(place: Place) -> None:
    stream = place.wire.open(request_headers(UNARY))
    place.wire.h2.send_data(stream, framed(place.message())[:20], end_stream=True)
    place.wire.flush()
    await place.wire.until(h2.events.StreamEnded, stream)


async def sent_with_a_wrong_flag(place: Place) -> None:
    stream = place.wire.open(request_headers(UNARY))
    place.wire.h2.send_data(stream, b"\2" + framed(place.message())[1:], end_stream=True)
    place.wire.flush()
    await place.wire.until(h2.events.StreamEnded, stream)


async def goaway_while_executed(place: Place) -> None:
    """The client begins no more calls, but those in progress are answered."""
    await place.executing()
    place.wire.h2.close_connection()
    place.wire.flush()
    place.let_go()


async def closed_before_a_message(place: Place) -> None:
    await place.opened(UNARY)
    place.wire.writer.close()


async def closed_while_executed(place: Place) -> None:
    await place.executing()
    place.wire.writer.close()


async def expired_while_executed(place: Place) -> None:
    headers = request_headers(UNARY, ("grpc-timeout", "100m"))
    stream = place.wire.send(headers, place.message())
    await place.wire.until(h2.events.StreamEnded, stream)


async def stream_reset_before_a_message(place: Place) -> None:
    await place.reset(await place.opened(STREAM))


async def stream_reset_while_executed(place: Place) -> None:
    stream = place.wire.open(request_headers(STREAM))
    place.wire.h2.send_data(stream, framed(place.message()))
    place.wire.flush()
    await place.begun()
    await place.reset(stream)


async def stream_ended_while_executed(place: Place) -> None:
    stream = await place.executing(STREAM)
    place.let_go()
    await place.wire.until(h2.events.StreamEnded, stream)


async def stream_closed_while_executed(place: Place) -> None:
    await place.executing(STREAM)
    place.wire.writer.close()


Moment = Callable[[Place], Awaitable[None]]
MOMENTS: Mapping[Moment, Mapping[str, int]] = {
    reset_before_a_message: {},
    reset_within_a_message: {},
    reset_while_executed: {"Cancelled": 1, "CANCELED": 1},
    reset_behind_its_answer: {"success": 1},
    reset_with_an_answer_unsent: {"success": 1},
    ended_without_a_message: {"RpcUnimplemented": 1},
    ended_within_a_message: {"RpcInternal": 1},
    sent_with_a_wrong_flag: {"RpcInternal": 1},
    goaway_while_executed: {"success": 1},
    closed_before_a_message: {},
    closed_while_executed: {"Cancelled": 1, "CANCELED": 1},
    expired_while_executed: {"DeadlineExceeded": 1, "CANCELED": 1},
    stream_reset_before_a_message: {"Cancelled": 1},
    stream_reset_while_executed: {"Cancelled": 2, "CANCELED": 1},
    stream_ended_while_executed: {"success": 1},
    stream_closed_while_executed: {"Cancelled": 2, "CANCELED": 1},
}
"""Expected counts per stage: answers, model failures, and refusals by reason."""
H2: Mapping[Moment, Mapping[str, int]] = {
    reset_before_a_message: {"Cancelled": 1},
    reset_within_a_message: {"Cancelled": 1},
    closed_before_a_message: {"Cancelled": 1},
    reset_with_an_answer_unsent: {"Cancelled": 1, "CANCELED": 1},
}
"""Different counts with grpclib. There a unary call begins with its headers, and ends when the
answer has been sent; with our engine it begins with its message, so earlier stages have no call to
cancel.
"""
NAMES = [moment.__name__ for moment in MOMENTS]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(Http2Engine), ids=str)
async def held(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[RunningServer, Path, Http2Engine]]:
    folder = tmp_path_factory.mktemp("held")
    write(folder / "models", "held", GATED.format(place=str(folder)), CONFIG)
    more: Any = {"http_endpoint": "port:0", "load_model": ("held",), "allow_python_models": True}
    async with serving(folder, folder / "models", http2_engine=request.param, **more) as server:
        yield server, folder, request.param


async def counts(server: RunningServer) -> Counter[str]:
    """Return the current counts, by the names in MOMENTS."""

    def read() -> str:
        with urllib.request.urlopen(f"http://{server.http}/metrics") as answer:
            return str(answer.read().decode())

    found = Counter[str]()
    for done, reason, value in COUNTED.findall(await to_thread(read)):
        found[done or reason] += int(float(value))
    return found


@pytest.mark.parametrize(
    "number", range(1, len(MOMENTS) + 1), ids=[one.__name__ for one in MOMENTS]
)
async def test_a_call_that_is_given_up_is_counted(
    held: tuple[RunningServer, Path, Http2Engine], number: int
) -> None:
    server, folder, engine = held
    moment, expected = [*MOMENTS.items()][number - 1]
    if engine is Http2Engine.H2:
        expected = H2.get(moment, expected)
    before = await counts(server)
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(connect(server.url))
        place = Place(server, wire, folder, number)
        try:
            await moment(place)
            found: Counter[str] = Counter()
            async with timeout(MOST_SECONDS):
                while (found := await counts(server) - before) < Counter(expected):
                    await sleep(0.01)
        finally:
            place.let_go()

    assert expected == dict(found)
