"""Every request over every protocol passes the gates, regardless of earlier decisions."""

import gzip
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h2.events
import pytest
import pytest_asyncio
import trustme
from support import echo_service, identity_models
from support.gate_watch import RULE, Watch
from support.server import RunningServer, serving
from support.tls import trusting, write_certificate
from support.wire import Wire, connect, framed, request_headers
from tritonclient.grpc import service_pb2 as pb

from xlaserve.serving.call import Operation
from xlaserve.settings.choices import Http2Engine

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

pytestmark = pytest.mark.asyncio(loop_scope="module")

TIMES = 5
CONNECTIONS = 3
REFUSED = "7"
"""PERMISSION_DENIED."""
FIRST_ANSWER = "an answer"
"""Outcome of a stream that never ends by itself, once it has sent an answer."""


# --- RPCs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Door:
    """An RPC, or one of several ways to call it."""

    name: str
    operation: Operation
    message: bytes = b""
    answer: str = "0"
    """Status of an admitted request."""
    h2_answer: str = ""
    """The status with the reference engine, if different."""
    calls: int = 1
    """Number of calls that an admitted request counts as; a rejected one counts as one."""
    headers: Sequence[tuple[str, str]] = ()
    compressed: bool = False
    label: str = ""
    """Distinguishes several ways to call an RPC."""
    of_a_mesh: bool = False
    ends: bool = True
    """Whether a request ends by itself."""


async def ask_grpc(door: Door, wire: Wire, headers: Sequence[tuple[str, str]]) -> str:
    """Make a call and return its status."""
    stream = wire.open(request_headers(door.name, *door.headers, *headers))
    message = gzip.compress(door.message) if door.compressed else door.message
    data = bytes([door.compressed]) + framed(message)[1:]
    wire.h2.send_data(stream, data, end_stream=True)
    wire.flush()
    if door.ends:
        return (await wire.trailers(stream))["grpc-status"]
    block: Any = await wire.until(h2.events.ResponseReceived, stream)
    status: str | None = dict(block.headers).get("grpc-status")
    if status is not None:
        await wire.until(h2.events.StreamEnded, stream)
        return status
    await wire.until(h2.events.DataReceived, stream)
    wire.h2.reset_stream(stream, 8)
    await wire.ping()
    return FIRST_ANSWER


def inference(
    method: str, operation: Operation, message: Any = b"", answer: str = "0", **more: Any
) -> Door:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return Door(f"/inference.GRPCInferenceService/{method}", operation, data, answer, **more)


def asking(model: str, *, is_typed: bool = False) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1])
    if is_typed:
        tensor.contents.fp32_contents.append(1)
    raw = [] if is_typed else [bytes(4)]
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=raw)


NOT_BUILT, FORBIDDEN = "12", "14"
NAME = b"\x0a\x04fp32"
"""Field 1 with the model's name."""
REFLECTION = b"\x3a\x00"
"""Requests the list of services."""

GZIP = (("grpc-encoding", "gzip"),)
COMPRESSED = {"headers": GZIP, "compressed": True, "h2_answer": NOT_BUILT}
OF_MESH = (("mm-model-id", "fp32"),)
MALFORMED = b"\x0a\x7f"
WAYS_TO_INFER: tuple[tuple[str, Any, str, dict[str, Any]], ...] = (
    ("raw", asking("fp32"), "0", {}),
    ("typed", asking("fp32", is_typed=True), "0", {}),
    ("compressed", asking("fp32"), "0", COMPRESSED),
    ("no model", asking("nope"), "5", {}),
    ("malformed", MALFORMED, "13", {}),
    ("mesh", asking("x"), "5", {"headers": OF_MESH, "of_a_mesh": True}),
    ("odd mesh", asking("x"), "3", {"headers": OF_MESH * 2, "of_a_mesh": True}),
)
"""The fast path, the general path, and errors on both."""

GRPC_DOORS = (
    *(
        inference("ModelInfer", Operation.INFER, message, answer, label=label, **more)
        for label, message, answer, more in WAYS_TO_INFER
    ),
    # The stream is one call, and each request in it is another.
    inference("ModelStreamInfer", Operation.INFER, asking("fp32"), calls=2),
    inference("ModelStreamInfer", Operation.INFER, MALFORMED, "13", label="malformed"),
    inference("Nothing", Operation.SERVICE, NAME, "12"),
    Door("/nobody.Knows/This", Operation.SERVICE, answer="12"),
    inference("ServerLive", Operation.HEALTH),
    inference("ServerReady", Operation.HEALTH),
    inference("ModelReady", Operation.READINESS, NAME),
    inference("ServerMetadata", Operation.METADATA),
    inference("ModelMetadata", Operation.METADATA, NAME),
    inference("ModelConfig", Operation.METADATA, NAME),
    inference("ModelStatistics", Operation.METADATA, NAME),
    inference("RepositoryIndex", Operation.METADATA),
    inference(
        "RepositoryModelLoad",
        Operation.MANAGE,
        pb.RepositoryModelLoadRequest(model_name="other"),
    ),
    inference(
        "RepositoryModelUnload",
        Operation.MANAGE,
        pb.RepositoryModelUnloadRequest(model_name="other"),
    ),
    inference("SystemSharedMemoryStatus", Operation.METADATA),
    inference("SystemSharedMemoryRegister", Operation.MANAGE, answer="3"),
    inference("SystemSharedMemoryUnregister", Operation.MANAGE),
    inference("CudaSharedMemoryStatus", Operation.METADATA),
    inference("CudaSharedMemoryRegister", Operation.MANAGE, answer=NOT_BUILT),
    inference("CudaSharedMemoryUnregister", Operation.MANAGE),
    inference("TraceSetting", Operation.MANAGE),
    inference("LogSettings", Operation.MANAGE),
    Door("/grpc.health.v1.Health/Check", Operation.HEALTH),
    Door("/grpc.health.v1.Health/List", Operation.HEALTH),
    Door("/grpc.health.v1.Health/Watch", Operation.HEALTH, answer=FIRST_ANSWER, ends=False),
    Door(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Operation.METADATA, REFLECTION
    ),
    Door(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        Operation.METADATA,
        REFLECTION,
    ),
    *(
        Door(f"/test.Echo/{method}", Operation.SERVICE)
        for method in ("Unary", "Last", "Many", "Chat")
    ),
    *(
        Door(f"/mmesh.ModelRuntime/{method}", Operation.RUNTIME, message, answer, of_a_mesh=True)
        for method, message, answer in (
            ("runtimeStatus", b"", "0"),
            ("loadModel", b"\x0a\x01m", "9"),
            ("unloadModel", b"\x0a\x01m", "0"),
            ("predictModelSize", b"\x0a\x01m", "0"),
            ("modelSize", b"\x0a\x01m", "5"),
        )
    ),
)


# --- Servers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A server with watched gates, and how to connect to it."""

    server: RunningServer
    watch: Watch
    tls: ssl.SSLContext | None
    engine: Http2Engine

    def answer(self, door: Door) -> str:
        """Return the status of an admitted request."""
        return (self.engine is Http2Engine.H2 and door.h2_answer) or door.answer

    async def wires(self, stack: AsyncExitStack, count: int) -> list[Wire]:
        """Open `count` connections for the duration of a block."""
        return [
            await stack.enter_async_context(connect(self.server.url, self.tls))
            for _ in range(count)
        ]


Reach = Callable[[bool], Awaitable[Place]]
"""Returns the server, with or without ModelMesh; starts it on first use."""


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[(engine, tls) for engine in Http2Engine for tls in (False, True)],
    ids=lambda param: f"{param[0]}-{'tls' if param[1] else 'plain'}",
)
async def reach(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Reach]:
    engine, over_tls = request.param
    authority = trustme.CA()
    started: dict[bool, Place] = {}
    async with AsyncExitStack() as stack:

        async def start(of_a_mesh: bool) -> Place:
            if of_a_mesh not in started:
                folder = tmp_path_factory.mktemp("gates")
                settings = write_certificate(authority, folder) if over_tls else {}
                watch = Watch()
                with watch.watching():
                    running = serving(
                        folder,
                        _repository(folder),
                        http2_engine=engine,
                        service=(echo_service.REFERENCE,),
                        load_model=() if of_a_mesh else ("fp32",),
                        modelmesh=of_a_mesh,
                        **settings,
                    )
                    server = await stack.enter_async_context(running)
                context = trusting(authority) if over_tls else None
                started[of_a_mesh] = Place(server, watch, context, engine)
            started[of_a_mesh].watch.clear()
            return started[of_a_mesh]

        yield start


def _repository(folder: Path) -> Path:
    for name in ("fp32", "other"):
        identity_models.write(folder / "models", name, "FP32")
    return folder / "models"


# --- Tests ---------------------------------------------------------------------------------------

on_every_door = pytest.mark.parametrize(
    "door",
    GRPC_DOORS,
    ids=[f"{door.name.rpartition('.')[2]} {door.label}".strip() for door in GRPC_DOORS],
)


def varying(number: int) -> list[tuple[str, str]]:
    """Return headers that differ for each request, as with real clients."""
    trace = f"00-{number:032x}-{number:016x}-01"
    return [("traceparent", trace), ("grpc-timeout", f"{9_000_000 + number}u")]


@on_every_door
async def test_equal_requests_are_counted_every_time(reach: Reach, door: Door) -> None:
    """Each begins and ends once, and states the operation, the caller, and its address."""
    place = await reach(door.of_a_mesh)
    async with AsyncExitStack() as stack:
        first, *others = await place.wires(stack, CONNECTIONS)
        wires = [*[first] * TIMES, *others]
        answers = [await ask_grpc(door, wire, ()) for wire in wires]
    calls = place.watch.gate

    assert [place.answer(door)] * len(wires) == answers
    assert len(wires) * door.calls == len(calls) == len(set(calls))
    assert {door.operation} == {call.operation for call in calls}
    assert Counter(calls) == Counter(place.watch.begun) == Counter(place.watch.ended_calls)
    assert {"grpc_endpoint"} == {call.peer.listener for call in calls}
    of_peers = Counter(id(call.peer) for call in calls)
    assert [n * door.calls for n in (TIMES, *[1] * len(others))] == list(of_peers.values())


RULES = ("refuse", "pass", "refuse", "refuse", "pass", "pass")


@on_every_door
async def test_a_header_refuses_every_time(reach: Reach, door: Door) -> None:
    """With and without admitted requests in between, on one connection or several, with
    constant or varying other headers.
    """
    place = await reach(door.of_a_mesh)
    async with AsyncExitStack() as stack:
        first, *others = await place.wires(stack, CONNECTIONS)
        wires = [*[first] * len(RULES), *others * 3]
        rules = [RULES[i % len(RULES)] for i in range(len(wires))]
        answers = [
            await ask_grpc(door, wire, [(RULE, rule), *(varying(i) if wire is not first else [])])
            for i, (wire, rule) in enumerate(zip(wires, rules, strict=True))
        ]
    passed = rules.count("pass")

    assert [REFUSED if rule == "refuse" else place.answer(door) for rule in rules] == answers
    assert len(rules) - passed + passed * door.calls == len(place.watch.gate)
    assert Counter(place.watch.begun) == Counter(place.watch.ended_calls)
