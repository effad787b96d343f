"""Health of the server, its services and its models, as seen by grpcio's client."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from xlaserve.grpc.services.health import HealthService
from xlaserve_proto.grpc.health import v1

UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN
SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING
EOF: Any = vars(grpc.aio)["EOF"]
SERVICE = "inference.GRPCInferenceService"
MAX_WATCHERS = 2

ServeHandlers: TypeAlias = Callable[[Any], AbstractAsyncContextManager[str]]
Connect: TypeAlias = Callable[[], AbstractAsyncContextManager[Any]]


class Source:
    """Readiness set by the test."""

    def __init__(self) -> None:
        self.server = True
        self.is_settled = True
        self.models: dict[str, bool] = {}
        self.left = asyncio.Event()
        self._subscribers: set[asyncio.Event] = set()

    def server_ready(self) -> bool:
        return self.server

    def model_ready(self, name: str) -> bool | None:
        return self.models.get(name)

    def model_names(self) -> list[str]:
        return [*self.models]

    @contextmanager
    def subscribe(self) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        self._subscribers.add(event)
        try:
            yield event
        finally:
            self._subscribers.discard(event)
            self.left.set()

    def change(self, *, server: bool | None = None, **models: bool) -> None:
        self.server = self.server if server is None else server
        self.models |= models
        for event in self._subscribers:
            event.set()


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def service(source: Source) -> HealthService:
    return HealthService(services=[SERVICE], source=source, max_watchers=MAX_WATCHERS)


@pytest.fixture
def connect(service: HealthService, serve_handlers: ServeHandlers) -> Connect:
    """Make a grpcio-health-checking stub connected to a running server."""

    @asynccontextmanager
    async def run() -> AsyncIterator[Any]:
        async with serve_handlers([service]) as url, grpc.aio.insecure_channel(url) as channel:
            yield HealthStub(channel)

    return run


async def checked(stub: Any, name: str) -> int:
    response = await stub.Check(HealthCheckRequest(service=name), timeout=5)
    return int(response.status)


def watching(stub: Any, name: str) -> Any:
    return stub.Watch(HealthCheckRequest(service=name), timeout=10)


async def seen(watch: Any) -> int:
    return int((await watch.read()).status)


async def refused(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    error: Any = caught.value
    return error.code(), error.details()


@pytest.mark.parametrize("name", ["", SERVICE])
async def test_server_and_services_are_as_ready_as_the_server(
    source: Source, connect: Connect, name: str
) -> None:
    """The empty name is the server (GRPC Health Checking Protocol)."""
    async with connect() as stub:
        assert SERVING == await checked(stub, name)
        source.change(server=False)
        assert NOT_SERVING == await checked(stub, name)


async def test_models_have_a_health_of_their_own(source: Source, connect: Connect) -> None:
    source.change(server=False, ready=True, loading=False)

    async with connect() as stub:
        assert SERVING == await checked(stub, "ready")
        assert NOT_SERVING == await checked(stub, "loading")


async def test_check_of_an_unknown_name_is_not_found(connect: Connect) -> None:
    async with connect() as stub:
        refusal = await refused(checked(stub, "nothing"))

    assert (grpc.StatusCode.NOT_FOUND, "unknown service 'nothing'") == refusal


async def listed(url: str) -> dict[str, int]:
    async with grpc.aio.insecure_channel(url) as channel:
        answer = await channel.unary_unary("/grpc.health.v1.Health/List")(b"", timeout=5)
    statuses = v1.HealthListResponse().parse(answer).statuses
    return {name: int(response.status) for name, response in statuses.items()}


async def test_list_tells_of_all_that_is_known(
    source: Source, service: HealthService, serve_handlers: ServeHandlers
) -> None:
    source.change(server=True, ready=True, loading=False)
    async with serve_handlers([service]) as url:
        statuses = await listed(url)
        source.change(**{f"m{number}": True for number in range(97)})
        refusal = await refused(listed(url))

    assert {"": SERVING, SERVICE: SERVING, "ready": SERVING, "loading": NOT_SERVING} == statuses
    assert grpc.StatusCode.RESOURCE_EXHAUSTED is refusal[0]
    assert "101 services and models, the limit of a list is 100" in refusal[1]


async def test_refusal_does_not_repeat_a_long_name(connect: Connect) -> None:
    async with connect() as stub:
        _, text = await refused(checked(stub, "x" * 100_000))

    assert f"unknown service '{'x' * 80}'" == text


async def test_watch_sends_the_status_now_and_at_every_change(
    source: Source, connect: Connect
) -> None:
    async with connect() as stub:
        watch = watching(stub, "m")
        assert UNKNOWN == await seen(watch)
        source.change(m=False)
        assert NOT_SERVING == await seen(watch)
        source.change(m=True)
        assert SERVING == await seen(watch)


def is_seen(hidden: frozenset[str], model: str) -> bool:
    return model not in hidden


async def test_a_watch_asks_each_time_what_its_caller_may_see(
    source: Source, serve_handlers: ServeHandlers
) -> None:
    """If new rules hide a model, it becomes unknown to the watcher."""
    hidden: set[str] = set()
    service = HealthService(
        services=[SERVICE],
        source=source,
        max_watchers=MAX_WATCHERS,
        sight=lambda: partial(is_seen, frozenset(hidden)),
    )
    source.change(m=True)
    async with serve_handlers([service]) as url, grpc.aio.insecure_channel(url) as channel:
        watch = watching(HealthStub(channel), "m")
        found = [await seen(watch)]
        hidden.add("m")
        source.change(m=False)
        found.append(await seen(watch))

    assert [SERVING, UNKNOWN] == found


async def test_watch_sends_nothing_where_nothing_changed(source: Source, connect: Connect) -> None:
    async with connect() as stub:
        watch = watching(stub, "")
        assert SERVING == await seen(watch)
        source.change(other=True)
        await checked(stub, "other")
        source.change(server=False)
        assert NOT_SERVING == await seen(watch)


async def test_watchers_are_bounded(connect: Connect) -> None:
    async with connect() as stub:
        watches = [watching(stub, "") for _ in range(MAX_WATCHERS)]
        assert [SERVING] * MAX_WATCHERS == [await seen(watch) for watch in watches]
        refusal = await refused(watching(stub, "").read())

    expected = "2 health watches are already open (max_health_watchers)"
    assert (grpc.StatusCode.RESOURCE_EXHAUSTED, expected) == refusal


async def test_watcher_that_went_makes_room(source: Source, connect: Connect) -> None:
    async with connect() as stub:
        for _ in range(3 * MAX_WATCHERS):
            watch = watching(stub, "")
            assert SERVING == await seen(watch)
            source.left.clear()
            watch.cancel()
            await source.left.wait()


class Gone:
    """A stream whose client disconnects while an answer is being sent."""

    async def send_message(self, message: object) -> None:
        raise asyncio.CancelledError


async def test_watcher_that_went_amid_an_answer_makes_room(service: HealthService) -> None:
    """Immediately, without waiting for the garbage collector."""
    stream: Any = Gone()
    kept: list[BaseException] = []
    for _ in range(MAX_WATCHERS + 1):
        with pytest.raises(asyncio.CancelledError) as caught:
            await service._call_rpc_handler_server_stream(
                service.watch, stream, v1.HealthCheckRequest()
            )
        kept.append(caught.value)


async def test_closing_ends_every_watch_with_its_last_status(
    source: Source, service: HealthService, connect: Connect
) -> None:
    """A server that shuts down does not wait for its watchers."""
    async with connect() as stub:
        watch = watching(stub, "")
        assert SERVING == await seen(watch)
        source.server = False
        service.close()
        assert NOT_SERVING == await seen(watch)
        assert EOF is await watch.read()

        late = watching(stub, "")
        assert NOT_SERVING == await seen(late)
        assert EOF is await late.read()
