"""Clients that exercise every API of a server and verify each answer."""

# pyright: reportAttributeAccessIssue=false
# protobuf generates the classes of service_pb2 at import time, so type checkers do not see them.

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

import grpc
import numpy as np
from support.http import Connection, connect, message
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from acceptance.subjects import PLUS, WIDTH

SECONDS = 30.0
"""Timeout for an answer; a request without one by then counts as lost."""
_OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]

Ask: TypeAlias = Callable[[Random], Awaitable[str]]
"""Sends one request; returns a description of a wrong answer, or an empty string."""


@dataclass(slots=True)
class Tally:
    """Counts the requests of all clients, and the faults in the answers."""

    asked: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Requests that got no answer, or an unexpected error."""
    seconds: list[float] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


def infer_message(model: str, array: "np.ndarray[Any, Any]", name: str = "x") -> Any:
    """Write a request with one raw FP32 tensor."""
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()])
    request.inputs.add(name=name, datatype="FP32", shape=array.shape)
    return request


def floats(raw: bytes) -> "np.ndarray[Any, Any]":
    """Read raw FP32 contents."""
    return np.frombuffer(raw, np.float32)


class GrpcClient:
    """Sends requests over gRPC, on its own connection."""

    def __init__(self, channel: Any, seconds: float = SECONDS) -> None:
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._seconds = seconds
        self.kinds: Sequence[tuple[str, Ask]] = (
            ("gRPC FP32", self.echo),
            ("gRPC FP32", self.echo),
            ("gRPC BYTES", self.texts),
            ("gRPC of a program", self.plus),
            ("gRPC of a program", self.plus),
            ("gRPC metadata", self.metadata),
            ("gRPC, wrong on purpose", self.refused),
        )

    async def echo(self, random: Random) -> str:
        """Send inputs to a model that must return them unchanged."""
        sent = np.array([random.random() for _ in range(random.randint(1, WIDTH))], np.float32)
        answer = await self.stub.ModelInfer(infer_message("echo", sent), timeout=self._seconds)
        found = floats(answer.raw_output_contents[0])
        return "" if np.array_equal(found, sent) else f"echo of {sent} was {found}"

    async def texts(self, random: Random) -> str:
        """Send a request for BYTES tensors."""
        texts = [random.randbytes(random.randint(0, 20)) for _ in range(random.randint(1, 4))]
        request = pb.ModelInferRequest(model_name="texts")
        tensor = request.inputs.add(name="x", datatype="BYTES", shape=[len(texts)])
        tensor.contents.bytes_contents.extend(texts)
        answer = await self.stub.ModelInfer(request, timeout=self._seconds)
        raw = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        return "" if answer.raw_output_contents[0] == raw else f"texts of {texts} were others"

    async def plus(self, random: Random) -> str:
        """Request a sum whose rows are batched with those of other clients."""
        rows = random.randint(1, 4)
        sent = np.full((rows, WIDTH), random.randrange(1000), np.float32)
        answer = await self.stub.ModelInfer(infer_message("plus", sent), timeout=self._seconds)
        found = floats(answer.raw_output_contents[0])
        return "" if np.array_equal(found, sent.ravel() + PLUS) else f"plus of {sent} was {found}"

    async def metadata(self, random: Random) -> str:
        """Request the metadata of a model."""
        request = pb.ModelMetadataRequest(name="plus")
        answer = await self.stub.ModelMetadata(request, timeout=self._seconds)
        return "" if answer.name == "plus" else f"metadata of plus were of {answer.name!r}"

    async def refused(self, random: Random) -> str:
        """Send a tensor of the wrong shape; the server must refuse it."""
        try:
            request = infer_message("plus", np.zeros((1, WIDTH + 1), np.float32))
            await self.stub.ModelInfer(request, timeout=self._seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                return ""
            raise
        return "a tensor of a wrong shape was taken"


class HttpClient:
    """Sends requests over HTTP, on its own connection."""

    def __init__(self, connection: Connection, seconds: float = SECONDS) -> None:
        self._connection = connection
        self._seconds = seconds
        self.kinds: Sequence[tuple[str, Ask]] = (
            ("REST JSON", self.json),
            ("REST JSON of a program", self.plus),
            ("REST binary", self.binary),
            ("REST ready", self.ready),
            ("REST, wrong on purpose", self.refused),
        )

    async def _ask(self, method: str, path: str, *headers: tuple[str, str], body: bytes) -> Any:
        async with asyncio.timeout(self._seconds):
            return await self._connection.ask(message(method, path, *headers, body=body))

    async def _infer(self, model: str, data: Sequence[float], shape: Sequence[int]) -> Any:
        tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": data}
        body = json.dumps({"inputs": [tensor]}).encode()
        answer = await self._ask("POST", f"/v2/models/{model}/infer", body=body)
        if answer.status != 200:
            raise LookupError(f"{model}: {answer.status} {answer.body[:200]!r}")
        return answer.json["outputs"][0]["data"]

    async def json(self, random: Random) -> str:
        """Send inputs as JSON to a model that must return them unchanged."""
        data = [random.randrange(1000) for _ in range(random.randint(1, WIDTH))]
        found = await self._infer("echo", data, [len(data)])
        return "" if found == data else f"echo of {data} was {found}"

    async def plus(self, random: Random) -> str:
        """Request a sum."""
        value = random.randrange(1000)
        found = await self._infer("plus", [value] * WIDTH, [1, WIDTH])
        return "" if found == [value + PLUS] * WIDTH else f"plus of {value} was {found}"

    async def binary(self, random: Random) -> str:
        """Send and request binary tensors."""
        sent = np.array([random.random() for _ in range(random.randint(1, WIDTH))], np.float32)
        size = {"binary_data_size": sent.nbytes}
        tensor = {"name": "x", "datatype": "FP32", "shape": [len(sent)], "parameters": size}
        wanted = [{"name": "y", "parameters": {"binary_data": True}}]
        head = json.dumps({"inputs": [tensor], "outputs": wanted}).encode()
        header = ("Inference-Header-Content-Length", str(len(head)))
        path = "/v2/models/echo/infer"
        answer = await self._ask("POST", path, header, body=head + sent.tobytes())
        if answer.status != 200:
            raise LookupError(f"binary: {answer.status} {answer.body[:200]!r}")
        found = answer.body[int(answer.headers["inference-header-content-length"]) :]
        return "" if found == sent.tobytes() else f"binary echo of {sent} was another"

    async def ready(self, random: Random) -> str:
        """Ask whether a model is ready."""
        answer = await self._ask("GET", "/v2/models/plus/ready", body=b"")
        if answer.status != 200:
            raise LookupError(f"plus is not ready: {answer.status}")
        return ""

    async def refused(self, random: Random) -> str:
        """Request a missing model; the server must refuse."""
        answer = await self._ask("POST", "/v2/models/absent/infer", body=b'{"inputs": []}')
        if answer.status == 503:  # 503: a starting server does not know its models yet
            raise LookupError(f"absent: {answer.status}")
        return "" if answer.status == 404 else f"a model that is not there: {answer.status}"


Client: TypeAlias = GrpcClient | HttpClient


@asynccontextmanager
async def clients(
    grpc_url: str, http_url: str, count: int, seconds: float = SECONDS
) -> AsyncIterator[list[Client]]:
    """Open `count` connections, every other one over HTTP, for the duration of a block."""
    async with AsyncExitStack() as stack:
        found: list[Client] = []
        for number in range(count):
            if number % 2:
                connection = await stack.enter_async_context(connect(http_url))
                found.append(HttpClient(connection, seconds))
            else:
                channel = grpc.aio.insecure_channel(grpc_url, options=_OWN_CONNECTION)
                found.append(GrpcClient(await stack.enter_async_context(channel), seconds))
        yield found


async def ask_once(client: Client, tally: Tally, random: Random) -> None:
    """Send one random request and record its outcome."""
    kind, ask = random.choice(client.kinds)
    began = time.monotonic()
    try:
        wrong = await ask(random)
    except grpc.aio.AioRpcError as error:
        tally.lost.append(f"{kind}: {error.code().name} {error.details()}"[:300])
    except (OSError, EOFError, LookupError, TimeoutError, ValueError) as error:
        tally.lost.append(f"{kind}: {type(error).__name__} {error}"[:300])
    else:
        if wrong:
            tally.wrong.append(f"{kind}: {wrong}"[:300])
    tally.asked += 1
    tally.kinds[kind] += 1
    tally.seconds.append(time.monotonic() - began)


async def ask_many(
    found: Sequence[Client], count: int, tally: Tally, *, depth: int = 4, seed: int = 0
) -> None:
    """Send `count` requests of all kinds over all connections, `depth` at a time over gRPC.

    Stops after 100 lost requests.
    """
    numbers = itertools.count()

    async def work(client: Client, random: Random) -> None:
        while next(numbers) < count and len(tally.lost) < 100:
            await ask_once(client, tally, random)

    async with asyncio.TaskGroup() as group:
        for number, client in enumerate(found):
            # An HTTP/1.1 connection carries one request at a time.
            for lane in range(depth if isinstance(client, GrpcClient) else 1):
                group.create_task(work(client, Random(seed * 1000 + number * 10 + lane)))
