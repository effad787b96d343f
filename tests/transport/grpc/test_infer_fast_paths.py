"""Selection of the ModelInfer fast path, and the information available on it."""

import asyncio
import gc
import gzip
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpclib.const import Cardinality
from structlog.contextvars import get_contextvars

from xlaserve.concurrency.host import HostThreads
from xlaserve.errors import VersionNotFound
from xlaserve.grpc.http2.headers import Head, HeaderReader, RequestKind, encode_fields
from xlaserve.grpc.http2.messages import Placement
from xlaserve.grpc.http2.stream import Route, ServerStream
from xlaserve.grpc.infer.infer_codec import InferCodec
from xlaserve.grpc.infer.infer_fast_path import InferFastPath
from xlaserve.grpc.infer.infer_fast_paths import InferFastPaths
from xlaserve.grpc.infer.long_messages import LongMessages
from xlaserve.grpc.protobuf.splice import InjectionPath, splice_string
from xlaserve.grpc.routes import Refused, Router
from xlaserve.net.ledger import Ledger
from xlaserve.serving.call import Peer
from xlaserve.serving.gates import Gates
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferRequest
from xlaserve_proto import inference as pb

LONG = LongMessages(HostThreads(1), 1 << 20)
LIMITS: dict[str, Any] = {"max_fields": 1000, "max_depth": 10}
PSEUDO = ((":method", "POST"), (":scheme", "http"), (":path", "/a"))
MESSAGE = b"\x0a\x06client"


def splice(value: str, data: Any) -> Any:
    return splice_string(data, InjectionPath((1,)), value, **LIMITS)


class Otherwise:
    """The general route; records that it was taken."""

    message_first = True
    placement: Placement | None = None
    begun = False

    def begin(self, stream: ServerStream) -> None:
        self.begun = True


class Seen(Exception):
    """Raised when the engine was asked."""


def never(call: InferCall) -> None:
    """Leave the call unanswered."""


class Engine:
    """Records each request and its context, and answers never or later."""

    def __init__(self, answer: Callable[[InferCall], object]) -> None:
        self._answer = answer
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.call: InferCall | None = None

    def begin(self, call: InferCall, request: InferRequest) -> None:
        self.asked.append((request.model_name, get_contextvars()))
        self.call = call
        self._answer(call)


class Stream:
    """A stream whose request has arrived whole."""

    compressed = False
    call: Any = None
    deadline: float | None = None
    opened_ns = 0
    refused = b""

    def __init__(self, head: Head[Any]) -> None:
        self.message: bytes | None = MESSAGE
        self.head = head

    def send_headers(self, block: bytes, *, end: bool) -> None:
        self.refused = block


def fast_paths_of(engine: Engine, otherwise: Route, *, mesh: bool = True) -> InferFastPaths:
    codec, splicing = InferCodec(**LIMITS), splice if mesh else None
    return InferFastPaths(cast(Any, engine), Gates(), codec, splicing, otherwise, long=LONG)


def asked(engine: Engine, *headers: tuple[str, str], mesh: bool = True) -> tuple[Stream, bool]:
    """Send a request with these headers; also tell whether it took the general route."""
    otherwise = Otherwise()
    fast_paths = fast_paths_of(engine, otherwise, mesh=mesh)
    reader: HeaderReader[Route] = HeaderReader(1 << 14, fast_paths)
    head = reader.read(encode_fields((*PSEUDO, *headers)))
    stream = Stream(head)
    assert head.route is not None
    head.route.begin(cast(ServerStream, stream))
    return stream, otherwise.begun


@pytest.mark.parametrize(("answer", "held"), [(never, 8 * 3), (InferCall.end, 0)])
def test_what_a_short_message_becomes_is_held_while_it_waits(
    answer: Callable[[InferCall], object], held: int
) -> None:
    contents = pb.InferTensorContents(int64_contents=[1, 2, 3])
    tensor = pb.ModelInferRequestInferInputTensor(
        name="x", datatype="INT64", shape=[3], contents=contents
    )
    account = Ledger(1 << 20).open()
    engine = Engine(answer)
    codec = InferCodec(**LIMITS)
    peer = Peer(account=account)
    fast_path = InferFastPath(cast(Any, engine), Gates(), codec, Otherwise(), LONG, peer=peer)
    stream = Stream(HeaderReader(1 << 14, lambda kind: fast_path).read(encode_fields(PSEUDO)))
    stream.message = bytes(pb.ModelInferRequest(model_name="m", inputs=[tensor]))
    fast_path.begin(cast(ServerStream, stream))

    assert held == account.held
    assert engine.call is not None
    engine.call.end()
    assert 0 == account.held


NAMED = (("mm-model-id", "m"), ("mm-vmodel-id", "v"))
CONTEXT = {"model_id": "m", "vmodel_id": "v"}


@pytest.mark.parametrize(
    ("headers", "mesh", "model", "context"),
    [
        ((), True, "client", {}),
        (NAMED, True, "m", CONTEXT),
        ((*NAMED, ("grpc-timeout", "9S")), True, "m", CONTEXT),
        ((("mm-model-id-bin", "bQ"),), True, "m", {"model_id": "m", "vmodel_id": None}),
        (NAMED[1:], True, "client", {}),
        (NAMED, False, "client", {}),
    ],
)
async def test_the_engine_is_asked_for_the_model_that_the_headers_name(
    headers: Any, mesh: bool, model: str, context: dict[str, Any]
) -> None:
    engine = Engine(never)

    assert not asked(engine, *headers, mesh=mesh)[1]
    assert [(model, context)] == engine.asked
    assert {} == get_contextvars()


async def test_headers_that_name_no_model_go_the_way_that_says_so() -> None:
    engine = Engine(never)

    assert asked(engine, ("mm-model-id", ""))[1]
    assert [] == engine.asked


async def test_models_that_vary_are_decoded_by_fast_paths_of_one_route() -> None:
    """Each request gets the model of its own headers; no header layout stores a model."""
    engine, kinds = Engine(never), []
    fast_paths = fast_paths_of(engine, Otherwise())

    def route(kind: RequestKind[Route]) -> Route:
        kinds.append(kind)
        return fast_paths(kind)

    reader: HeaderReader[Route] = HeaderReader(1 << 14, route)
    names = [f"m{number % 400}" for number in range(1000)]
    for name in names:
        head = reader.read(encode_fields((*PSEUDO, ("mm-model-id", name))))
        assert head.route is not None
        head.route.begin(cast(ServerStream, Stream(head)))

    assert [(name, {"model_id": name, "vmodel_id": None}) for name in names] == engine.asked
    assert 1 == len(kinds)


async def test_one_id_in_two_headers_is_not_one_with_a_comma() -> None:
    """This holds even if the fast path for the id with a comma is already known."""
    engine, otherwise = Engine(never), Otherwise()
    reader: HeaderReader[Route] = HeaderReader(1 << 14, fast_paths_of(engine, otherwise))
    for ids in (["a, b"], ["a, b"], ["a", "b"]):
        headers = [("mm-model-id", name) for name in ids]
        head = reader.read(encode_fields((*PSEUDO, *headers)))
        assert head.route is not None
        head.route.begin(cast(ServerStream, Stream(head)))

    assert ["a, b", "a, b"] == [model for model, _ in engine.asked]
    assert otherwise.begun


@pytest.mark.parametrize(
    ("first", "then"),
    [("3S", "x"), ("3S", "0n"), ("3S", "123456789S"), ("x", "3S")],
)
def test_a_timeout_is_checked_for_each_request(first: str, then: str) -> None:
    """gRPC over HTTP/2, Timeout: a known header layout says only that a timeout exists."""
    router = Router(cast(Any, None), {"/a": cast(Any, Method())}, {})
    reader: HeaderReader[Route] = HeaderReader(1 << 14, router)
    head = (*PSEUDO, ("content-type", "application/grpc"), ("te", "trailers"))
    routes = [
        reader.read(encode_fields((*head, ("grpc-timeout", value)))).route
        for value in (first, then, first)
    ]

    assert [value != "3S" for value in (first, then, first)] == [
        isinstance(route, Refused) for route in routes
    ]


def test_one_wrong_timeout_of_several_is_refused() -> None:
    router = Router(cast(Any, None), {"/a": cast(Any, Method())}, {})
    reader: HeaderReader[Route] = HeaderReader(1 << 14, router)
    head = (*PSEUDO, ("content-type", "application/grpc"), ("te", "trailers"))
    times = [
        [("grpc-timeout", value) for value in values] for values in (["3S", "4S"], ["3S", "x"])
    ]
    routes = [reader.read(encode_fields((*head, *several))).route for several in times]

    assert [False, True] == [isinstance(route, Refused) for route in routes]


class Method:
    handler = SimpleNamespace(cardinality=Cardinality.UNARY_UNARY)


MISSING = VersionNotFound("m", "7")


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("headers", "status"), [((), b"5"), (NAMED, b"3")])
async def test_a_mesh_is_not_told_that_a_model_is_gone(
    headers: Any, status: bytes, later: bool
) -> None:
    """NOT_FOUND is only for clients that ask for a version without a mesh."""
    engine = Engine(never if later else lambda call: call.fail(MISSING))
    stream, _ = asked(engine, *headers)
    if later:
        assert engine.call is not None
        engine.call.fail(MISSING)

    assert b"\x0bgrpc-status\x01" + status in stream.refused


@pytest.mark.parametrize("later", [False, True])
async def test_what_nobody_expected_is_logged_with_the_model_of_the_headers(
    monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    logged: list[dict[str, Any]] = []

    class Log:
        def error(self, event: str, **facts: Any) -> None:
            logged.append(get_contextvars())

    monkeypatch.setattr("xlaserve.grpc.edge._log", Log())
    engine = Engine(never if later else lambda call: call.fail(Seen()))
    asked(engine, *NAMED)
    if later:
        assert engine.call is not None
        engine.call.fail(Seen())

    assert [CONTEXT] == logged


async def test_a_client_may_leave_before_its_message_is_inflated() -> None:
    """No reference cycle is left for the garbage collector."""
    headers = (*PSEUDO, ("grpc-encoding", "gzip"))
    route = fast_paths_of(Engine(never), Otherwise())
    stream = Stream(HeaderReader(1 << 14, route).read(encode_fields(headers)))
    stream.compressed, stream.message = True, gzip.compress(MESSAGE)
    assert stream.head.route is not None
    stream.head.route.begin(cast(ServerStream, stream))
    stream.call.cancel("gone")
    await asyncio.sleep(0)
    with warnings.catch_warnings(record=True) as said:
        gc.collect()

    assert [] == said
