"""ModelStreamInfer: several answers per request, pipelined requests, and how streams end."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import h2.events
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import trustme
from support import generating, identity_models
from support.calls import NotingObserver
from support.engines import own_engine_only
from support.generating import Generation
from support.server import RunningServer, Serve
from support.tls import write_certificate
from support.wire import Wire, connect, framed, request_headers
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from xlaserve.app import server as app
from xlaserve.serving.gates import Gates

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
FINAL = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"
LIMIT = 1 << 16
"""Maximum bytes of answers queued for a stream's client."""
SIZE = 1 << 12
"""Elements of a long answer."""
_PATIENCE_SECONDS = 60


@pytest.fixture
def generation(monkeypatch: pytest.MonkeyPatch) -> Generation:
    return generating.install(monkeypatch)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> NotingObserver:
    """Observe the calls to a test's servers."""
    observer = NotingObserver()

    def gates(*, observers: Sequence[Any] = (), **others: Any) -> Gates:
        return Gates(observers=[*observers, observer], **others)

    monkeypatch.setattr(app, "Gates", gates)
    return observer


@pytest.fixture
def start(serve: Serve, tmp_path: Path, generation: Generation, seen: NotingObserver) -> Serve:
    """Run a server with a decoupled and an ordinary model."""
    for name in ("count", f"count{generating.IN_ORDER}", "fp32"):
        identity_models.write(tmp_path / "models", name, "FP32")
    defaults = {"load_model": ("*",), "max_infer_stream_bytes": LIMIT}
    return lambda **settings: serve(tmp_path / "models", **defaults | settings)


def asking(
    model: str, *values: float, name: str = "", empty_final: bool = False
) -> pb.ModelInferRequest:
    """Return a request; decoupled models give `count` answers of `size` elements."""
    request = pb.ModelInferRequest(
        model_name=model,
        id=name,
        inputs=[
            pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[len(values)])
        ],
        raw_input_contents=[np.array(values, np.float32).tobytes()],
    )
    if empty_final:
        request.parameters[EMPTY_FINAL].bool_param = True
    return request


class Told:
    """An answer in the form that tests compare."""

    def __init__(self, message: Any) -> None:
        self.error = message.error_message
        response = message.infer_response
        self.id = response.id
        self.model = response.model_name
        self.values = [
            np.frombuffer(raw, np.float32).tolist() for raw in response.raw_output_contents
        ]
        self.final = response.parameters[FINAL].bool_param if response.parameters else None


@asynccontextmanager
async def open_stream(url: str, **headers: str) -> AsyncIterator[Any]:
    metadata = list(headers.items())
    async with grpc.aio.insecure_channel(url) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        yield stub.ModelStreamInfer(metadata=metadata)


async def read(stream: Any) -> Told:
    async with asyncio.timeout(_PATIENCE_SECONDS):
        message = await stream.read()
    assert message is not grpc.aio.EOF
    return Told(message)


async def rest(stream: Any) -> list[Told]:
    """Send no more requests; return all remaining answers."""
    await stream.done_writing()
    told = []
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while (message := await stream.read()) is not grpc.aio.EOF:
            told.append(Told(message))
    return told


async def answers(url: str, *requests: Any, **headers: str) -> list[Told]:
    """Send requests, then half-close; return all answers."""
    async with open_stream(url, **headers) as stream:
        for request in requests:
            await stream.write(request)
        return await rest(stream)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


async def nothing_left(server: RunningServer) -> None:
    """Wait until no calls, streams or bytes are held."""
    application = server.application
    await until(lambda: application.registry.requests == 0)
    await until(lambda: application.grpc.open_streams == 0)
    await until(lambda: application.ledger.held == 0)


async def code(stream: Any) -> str:
    return str((await stream.code()).name)


# --- Requests and answers ------------------------------------------------------------------------


async def test_one_request_gets_as_many_answers_as_its_model_gives(start: Serve) -> None:
    """None is marked final, since another may follow (Triton, Decoupled Models)."""
    async with start() as server:
        told = await answers(server.url, asking("count", 5, 2, name="a"))
        await nothing_left(server)

    assert [[[float(i)] * 2] for i in range(5)] == [one.values for one in told]
    assert {("a", "count", False, "")} == {(t.id, t.model, t.final, t.error) for t in told}


async def test_an_empty_answer_ends_them_where_it_is_asked_for(start: Serve) -> None:
    async with start() as server:
        told = await answers(server.url, asking("count", 2, 1, name="a", empty_final=True))

    assert [(False, 1), (False, 1), (True, 0)] == [(one.final, len(one.values)) for one in told]
    assert ("a", "count") == (told[-1].id, told[-1].model)


async def test_one_answer_to_each_request_is_its_last(start: Serve) -> None:
    """Even without a request for an empty final response, because it has tensors."""
    requests = [asking("fp32", i, name=str(i), empty_final=bool(i % 2)) for i in range(200)]
    async with start() as server:
        told = await answers(server.url, *requests)
        await nothing_left(server)

    assert [(str(i), [[float(i)]], True) for i in range(200)] == [
        (one.id, one.values, one.final) for one in told
    ]


def by_id(told: list[Told]) -> list[Told]:
    """Sort answers by request id, keeping the order within each."""
    return sorted(told, key=lambda one: one.id)


async def test_answers_of_models_that_give_many_come_beside_others(
    start: Serve, generation: Generation
) -> None:
    """As in Triton, none waits for an answer that never comes."""
    generation.may_go_on.clear()
    async with start() as server, open_stream(server.url) as stream:
        for name in ("a", "b"):
            await stream.write(asking("count", 3, 1, name=name))
        await stream.write(asking("fp32", 7, name="c"))
        first = [await read(stream) for _ in range(3)]
        generation.may_go_on.set()
        told = [*first, *await rest(stream)]
        await nothing_left(server)

    assert ["a", "b", "c"] == sorted(one.id for one in first)
    assert [("a", i) for i in range(3)] + [("b", i) for i in range(3)] + [("c", 7)] == [
        (one.id, one.values[0][0]) for one in by_id(told)
    ]


async def test_answers_come_in_the_order_of_their_requests(
    start: Serve, generation: Generation, seen: NotingObserver
) -> None:
    """An answer computed early waits for its turn to be sent."""
    generation.may_go_on.clear()
    async with start() as server, open_stream(server.url) as stream:
        await stream.write(asking("count_in_order", 3, 1, name="first"))
        first = await read(stream)
        await stream.write(asking("fp32", 7, name="second"))
        await stream.write(asking("count_in_order", 2, 1, name="third"))
        await until(lambda: generation.computed == 2)
        await until(
            lambda: any(len(calls) and calls[0].model == "fp32" for calls, _ in seen.ended_with)
        )
        generation.may_go_on.set()
        told = [first, *await rest(stream)]

    assert ["first"] * 3 + ["second"] + ["third"] * 2 == [one.id for one in told]


async def test_requests_in_flight_are_bounded(start: Serve, generation: Generation) -> None:
    generation.may_go_on.clear()
    async with start(max_infer_stream_requests=2) as server, open_stream(server.url) as stream:
        for name in "abc":
            await stream.write(asking("count", 2, 1, name=name))
        await until(lambda: generation.computed == 2)
        # It arrives after everything sent before on the stream.
        await answers(server.url, asking("fp32", 1))
        in_flight = server.application.registry.requests
        generation.may_go_on.set()
        told = [one.id for one in await rest(stream)]

    assert 2 == in_flight
    assert list("aabbcc") == sorted(told)


async def test_open_streams_are_bounded(start: Serve) -> None:
    """Closing a stream frees its slot."""
    async with start(max_infer_streams=1) as server:
        async with open_stream(server.url) as stream, connect(server.url) as wire:
            await stream.write(asking("fp32", 1))
            await read(stream)
            refused = await wire.trailers(wire.open(request_headers(METHOD)))
            await rest(stream)
        told = await answers(server.url, asking("fp32", 1))

    assert "8" == refused["grpc-status"]
    assert "max_infer_streams" in refused["grpc-message"]
    assert 1 == len(told)


# --- Errors --------------------------------------------------------------------------------------


def misshapen(name: str) -> pb.ModelInferRequest:
    request = asking("fp32", 1, name=name)
    request.inputs[0].shape[:] = [3]
    return request


async def test_an_error_is_an_answer_and_the_stream_goes_on(start: Serve) -> None:
    requests = [
        asking("fp32", 1, name="a"),
        asking("nope", 1, name="b"),
        misshapen("c"),
        asking("count", -3, 1, name="d"),
        asking("fp32", 2, name="e"),
    ]
    async with start() as server:
        told = by_id(await answers(server.url, *requests))
        await nothing_left(server)

    assert ["a", "b", "c", "d", "d", "e"] == [one.id for one in told]
    errors = [one.error for one in told]
    assert ["", "", ""] == [errors[0], errors[3], errors[5]]
    assert errors[1].startswith("Request for unknown model: 'nope'")
    assert "input 'x': expected 12 bytes" in errors[2]
    assert "internal error" == errors[4]
    assert {True} == {one.final for one in told if one.error}


async def test_an_error_ends_the_stream_where_its_header_says_so(start: Serve) -> None:
    """After the answers to earlier requests (Triton, triton_grpc_error)."""
    async with start() as server, open_stream(server.url, triton_grpc_error="true") as stream:
        for model in ("fp32", "nope"):
            await stream.write(asking(model, 1, name=model))
        first = await read(stream)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.read()
        await nothing_left(server)

    assert ("fp32", "") == (first.id, first.error)
    assert grpc.StatusCode.NOT_FOUND is ended.value.code()
    assert "'nope'" in str(ended.value.details())


async def test_a_message_that_cannot_be_read_ends_the_stream(start: Serve) -> None:
    """After the answers to earlier requests, without quoting the message."""
    async with start() as server, connect(server.url) as wire:
        good = asking("fp32", 1).SerializeToString()
        stream = wire.open(request_headers(METHOD))
        wire.h2.send_data(stream, framed(good) + framed(b"\x0a\x7f") + framed(good))
        wire.flush()
        await wire.until(h2.events.DataReceived, stream)
        end = await wire.until(h2.events.TrailersReceived, stream)
        await nothing_left(server)
    trailers = dict(end.headers)

    assert "13" == trailers["grpc-status"]
    assert "the request is not a valid ModelInferRequest message" == trailers["grpc-message"]


async def test_one_answer_is_not_enough_for_a_model_that_gives_many(start: Serve) -> None:
    async with start() as server, grpc.aio.insecure_channel(server.url) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(asking("count", 2, 1))

    assert grpc.StatusCode.UNIMPLEMENTED is refused.value.code()


# --- Backpressure --------------------------------------------------------------------------------


async def test_a_model_pauses_while_its_client_does_not_read(
    start: Serve, generation: Generation, seen: NotingObserver
) -> None:
    """Others are served meanwhile, even on the same connection."""
    count, bytes_each = 100, SIZE * 4
    async with start() as server, connect(server.url) as wire:

        async def ask_others() -> list[Any]:
            """Use new connections, and the connection of the client that does not read."""
            live = request_headers("/inference.GRPCInferenceService/ServerLive")
            assert "0" == (await wire.trailers(wire.send(live)))["grpc-status"]
            return [(await answers(server.url, asking("fp32", i)))[0].values for i in range(5)]

        wire.acknowledges = False
        wire.h2.increment_flow_control_window(1 << 20)
        stream = wire.open(request_headers(METHOD))
        request = asking("count", count, SIZE).SerializeToString()
        wire.h2.send_data(stream, 2 * framed(request), end_stream=True)
        wire.flush()
        await until(lambda: any(call.on_writable for call in seen.began_with))
        others = await ask_others()
        paused_at, held = generation.computed, server.application.ledger.held
        others += await ask_others()
        still_at = generation.computed
        wire.acknowledges = True
        wire.h2.increment_flow_control_window(1 << 20, stream)
        wire.flush()
        received = await all_data(wire, stream)
        await nothing_left(server)

    # 64 KiB are in its window, the maximum is queued, and one answer was begun; of the next
    # request, one answer waits for its turn.
    assert paused_at == still_at <= (65_535 + LIMIT) // bytes_each + 4
    assert held <= LIMIT + 3 * bytes_each
    assert held >= 2 * bytes_each, "the ledger does not know of what waits"
    assert [[[float(i)]] for i in range(5)] * 2 == others
    assert 2 * count == generation.computed
    assert received > 2 * count * bytes_each


@pytest.mark.parametrize("empty_final", [False, True])
async def test_what_a_paused_model_answers_last_ends_its_request(
    start: Serve, generation: Generation, *, empty_final: bool
) -> None:
    """It is resumed while an earlier answer is sent, and then answers immediately."""
    count = 40
    async with start(max_infer_stream_bytes=SIZE * 4) as server, connect(server.url) as wire:
        wire.acknowledges = False
        wire.h2.increment_flow_control_window(1 << 20)
        stream = wire.open(request_headers(METHOD))
        request = asking("count", count, SIZE, empty_final=empty_final).SerializeToString()
        wire.h2.send_data(stream, 3 * framed(request), end_stream=True)
        wire.flush()
        await until(lambda: generation.computed > 3)
        wire.acknowledges = True
        wire.h2.increment_flow_control_window(1 << 20, stream)
        wire.flush()
        trailers = await wire.trailers(stream)
        await nothing_left(server)

    assert "0" == trailers["grpc-status"], trailers
    assert 3 * count == generation.computed


async def test_no_more_requests_are_read_while_answers_wait(
    start: Serve, seen: NotingObserver
) -> None:
    """However many requests may be in flight."""
    async with start() as server, connect(server.url) as wire:
        wire.acknowledges = False
        wire.h2.increment_flow_control_window(1 << 20)
        stream = wire.open(request_headers(METHOD))
        request = framed(asking("fp32", *range(4000)).SerializeToString())
        for _ in range(40):
            wire.h2.send_data(stream, request)
            wire.flush()
            await wire.ping()
        begun = len([call for call in seen.began_with if call.model])
        wire.acknowledges = True
        wire.h2.increment_flow_control_window(1 << 20, stream)
        wire.h2.end_stream(stream)
        wire.flush()
        await all_data(wire, stream)

    assert begun <= (65_535 + LIMIT) // 16_000 + 3
    assert 40 == len([call for call in seen.began_with if call.model])


@own_engine_only
async def test_nothing_is_held_for_requests_that_are_answered(start: Serve) -> None:
    """However long the stream lasts."""
    async with start() as server, open_stream(server.url) as stream:
        for _ in range(20):
            await stream.write(asking("fp32", *range(1000)))
            await read(stream)
        await until(lambda: server.application.ledger.held == 0)

        assert 1 == server.application.grpc.open_streams


async def test_an_answer_for_which_there_is_no_memory_is_an_error(
    start: Serve, generation: Generation
) -> None:
    """Its model stops, and the stream remains usable."""
    async with start(max_held_bytes=1 << 20) as server:
        long, short = asking("count", 5, 1 << 18, name="a"), asking("fp32", 1, name="b")
        told = by_id(await answers(server.url, long, short))

    assert [("a", True), ("b", False)] == [(one.id, bool(one.error)) for one in told]
    assert "max_held_bytes" in told[0].error
    assert generation.computed <= 2, "it went on"
    await until(lambda: 1 == generation.ended)


async def all_data(wire: Wire, stream: int) -> int:
    """Read a stream to its end; return the number of bytes."""
    await wire.until(h2.events.StreamEnded, stream)
    data = [e for e in wire.events if isinstance(e, h2.events.DataReceived)]
    return sum(len(event.data) for event in data if event.stream_id == stream)


# --- Typed answers -------------------------------------------------------------------------------


def typed(model: str, *values: float, name: str = "") -> pb.ModelInferRequest:
    request = asking(model, *values, name=name)
    del request.raw_input_contents[:]
    request.inputs[0].contents.fp32_contents.extend(values)
    return request


async def test_typed_requests_get_typed_answers(start: Serve) -> None:
    """If its answers would be too long, it gets an error and its model stops."""
    requests = [
        typed("count", 2, 3, name="a"),
        typed("count", 2, 100, name="b"),
        typed("fp32", 7, name="c"),
    ]
    settings = {"typed_answers": "typed", "max_typed_answer_bytes": 64}
    async with start(**settings) as server, open_stream(server.url) as stream:
        for request in requests:
            await stream.write(request)
        await stream.done_writing()
        messages = [message async for message in stream]
        messages.sort(key=lambda message: message.infer_response.id)
    contents = [
        list(output.contents.fp32_contents)
        for message in messages
        for output in message.infer_response.outputs
    ]

    assert [[0.0] * 3, [1.0] * 3, [7.0]] == contents
    assert ["", "", "max_typed_answer_bytes", ""] == [
        "max_typed_answer_bytes" if "max_typed_answer_bytes" in m.error_message else m.error_message
        for m in messages
    ]


# --- Streams that end early ----------------------------------------------------------------------


async def begun(stream: Any, generation: Generation) -> None:
    """Wait for the first answer; the second one is held back."""
    generation.may_go_on.clear()
    await stream.write(asking("count", 1_000_000, 1))
    await read(stream)


async def test_a_client_that_leaves_stops_its_model(start: Serve, generation: Generation) -> None:
    async with start() as server:
        async with open_stream(server.url) as stream:
            await begun(stream, generation)
            await stream.write(asking("count", 1_000_000, 1))
            await until(lambda: generation.computed == 2)
            stream.cancel()
            generation.may_go_on.set()
            await nothing_left(server)
        computed = generation.computed

    assert computed < 1000


async def test_a_deadline_ends_the_stream(start: Serve, generation: Generation) -> None:
    async with start() as server, connect(server.url) as wire:
        headers = request_headers(METHOD, ("grpc-timeout", "500m"))
        stream = wire.open(headers)
        wire.h2.send_data(stream, framed(asking("count", 1_000_000, 1).SerializeToString()))
        wire.flush()
        end = await wire.until(h2.events.TrailersReceived, stream)
        await nothing_left(server)

    assert "4" == dict(end.headers)["grpc-status"]
    assert 0 < generation.computed < 1_000_000


async def test_classes_of_a_stream_are_charged_as_those_of_its_longest_answer(
    start: Serve,
) -> None:
    """Those of an answer are free once the next one is made; all together exceed the limit."""
    request = asking("count", 40, SIZE)
    request.outputs.add(name="y").parameters["classification"].int64_param = SIZE
    async with start(max_held_bytes=4 << 20) as server:
        async with open_stream(server.url) as stream:
            await stream.write(request)
            await stream.done_writing()
            told = [message async for message in stream]
        await until(lambda: 0 == server.application.ledger.held)

    assert [""] * 40 == [message.error_message for message in told]
    assert {SIZE} == {message.infer_response.outputs[0].shape[0] for message in told}


async def test_a_drain_lets_what_is_in_flight_end(start: Serve, generation: Generation) -> None:
    """Then streams get UNAVAILABLE, idle ones immediately."""
    async with AsyncExitStack() as running:
        server = await running.enter_async_context(start())
        async with open_stream(server.url) as stream, open_stream(server.url) as idle:
            await idle.write(asking("fp32", 1))
            await read(idle)
            generation.may_go_on.clear()
            await stream.write(asking("count", 5, 1))
            told = [await read(stream)]
            stopping = asyncio.ensure_future(running.aclose())
            of_idle = await code(idle)
            is_waiting = not stopping.done()
            generation.may_go_on.set()
            told += [await read(stream) for _ in range(4)]
            end = await code(stream)
            await stopping

    assert "UNAVAILABLE" == of_idle == end
    assert is_waiting
    assert [float(i) for i in range(5)] == [one.values[0][0] for one in told]


async def test_a_drain_cuts_off_a_client_that_does_not_read(
    start: Serve, generation: Generation, seen: NotingObserver
) -> None:
    """It waits at most `grace_seconds` for the client's model."""
    async with AsyncExitStack() as running:
        server = await running.enter_async_context(start(grace_seconds=0.2))
        async with connect(server.url) as wire:
            stream = wire.open(request_headers(METHOD))
            wire.h2.send_data(stream, framed(asking("count", 1_000_000, SIZE).SerializeToString()))
            wire.flush()
            await until(lambda: any(call.on_writable for call in seen.began_with))
            await running.aclose()
            computed = generation.computed

    assert computed == generation.computed < 1000
    await until(lambda: 1 == generation.ended)


async def test_an_unload_lets_what_is_in_flight_end(start: Serve, generation: Generation) -> None:
    """Later requests get an error that the model is unloaded, and the stream remains usable."""
    async with start() as server, open_stream(server.url) as stream:
        generation.may_go_on.clear()
        await stream.write(asking("count", 3, 1, name="a"))
        told = [await read(stream)]
        control = server.application.control
        unloading = asyncio.ensure_future(control.unload("count"))
        await until(lambda: not server.application.registry.ready("count"))
        await stream.write(asking("count", 3, 1, name="b"))
        await stream.write(asking("fp32", 3, name="c"))
        is_waiting = not unloading.done()
        generation.may_go_on.set()
        told = by_id(told + [await read(stream) for _ in range(4)])
        await unloading
        assert [] == await rest(stream)

    assert is_waiting
    assert [("a", False)] * 3 + [("b", True), ("c", False)] == [
        (one.id, bool(one.error)) for one in told
    ]


async def test_an_unload_cuts_off_answers_that_go_on(
    start: Serve, generation: Generation, seen: NotingObserver
) -> None:
    """After `drain_seconds`, even if the client reads: the model's memory is freed."""
    async with (
        start(drain_seconds=0.3) as server,
        connect(server.url) as wire,
        open_stream(server.url) as reading,
    ):
        endless = asking("count", 1_000_000_000, SIZE).SerializeToString()
        stream = wire.open(request_headers(METHOD))
        wire.h2.send_data(stream, framed(endless))
        wire.flush()
        await reading.write(asking("count", 1_000_000_000, 1))
        await until(lambda: any(call.on_writable for call in seen.began_with))
        await read(reading)
        _, instance = server.application.registry.resolve("count")
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await server.application.control.unload("count")
            await until(lambda: not instance.users)
            while not (told := await read(reading)).error:
                pass
        await reading.write(asking("fp32", 5))
        after = await read(reading)

    assert "'count' version '1' is not ready" in told.error.replace("version 1", "version '1'")
    assert "drain_seconds" in told.error
    assert [[5.0]] == after.values
    await until(lambda: 2 == generation.ended)


# --- Many streams --------------------------------------------------------------------------------


def data_frame(stream: int, data: bytes) -> bytes:
    """Return a DATA frame that h2 would not send on a stream it has reset."""
    return len(data).to_bytes(3) + bytes(2) + stream.to_bytes(4) + data


def kept(seen: NotingObserver) -> dict[str, int]:
    """Count the objects of streams and requests, except those that a test's observer holds."""
    seen.began_with.clear()
    seen.ended_with.clear()
    gc.collect()
    kinds = ("InferStream", "StreamedInfer", "Generation", "RpcStream")
    found = Counter(type(thing).__name__ for thing in gc.get_objects())
    return {kind: found[kind] for kind in kinds}


_MANY = {"ended": 310, "reset": 310, "half-closed": 310, "lost": 70}
"""Number of streams per way to end; the lost ones are all open at the same time."""


@pytest.mark.parametrize("way", _MANY)
async def test_streams_that_were_open_leave_nothing(
    start: Serve, generation: Generation, seen: NotingObserver, way: str
) -> None:
    """A thousand streams, with answers in flight unless they ended by themselves."""
    endless = asking("count", 1_000_000_000, 16).SerializeToString()
    request = framed(asking("count", 3, 16).SerializeToString() if way == "ended" else endless)

    async def open_and_end(count: int) -> None:
        async with connect(server.url) as wire:
            for _ in range(count):
                stream = wire.open(request_headers(METHOD))
                wire.h2.send_data(stream, request, end_stream=way in ("ended", "half-closed"))
                wire.flush()
                if way == "ended":
                    assert "0" == (await wire.trailers(stream))["grpc-status"]
                elif way != "lost":
                    await wire.until(h2.events.DataReceived, stream)
                    wire.h2.reset_stream(stream)
                    if way == "reset":
                        wire.writer.write(data_frame(stream, request))
                    wire.flush()
            if way == "lost":
                await until(lambda: server.application.registry.requests == count)
        await nothing_left(server)
        _, instance = server.application.registry.resolve("count")
        await until(lambda: not instance.users)

    async with start() as server:
        await open_and_end(5)
        before, tasks = kept(seen), len(asyncio.all_tasks())
        await open_and_end(_MANY[way])
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        # A timer created within a stream may keep it alive until it fires.
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while any(count > before[kind] for kind, count in kept(seen).items()):
                await asyncio.sleep(0.1)

    await until(lambda: generation.begun == generation.ended)


async def test_streams_over_tls(start: Serve, tmp_path: Path) -> None:
    """With backpressure through the TLS buffers."""
    authority = trustme.CA()
    root = tmp_path / "root.pem"
    authority.cert_pem.write_to_path(str(root))
    async with start(**write_certificate(authority, tmp_path)) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        async with triton_aio.InferenceServerClient(
            url, ssl=True, root_certificates=str(root)
        ) as client:

            async def requests() -> AsyncIterator[dict[str, Any]]:
                for name in "ab":
                    inputs = triton_input(triton_aio, 200, SIZE)
                    yield {"model_name": "count", "inputs": inputs, "request_id": name}

            stream: Any = client.stream_infer(requests())
            told = [(one.get_response().id, one.as_numpy("y")[-1]) async for one, _ in stream]
        await nothing_left(server)

    assert [(name, number) for name in "ab" for number in range(200)] == sorted(told)


# --- Unmodified client ---------------------------------------------------------------------------


def triton_input(module: Any, *values: float) -> list[Any]:
    array = np.array(values, np.float32)
    tensor = module.InferInput("x", array.shape, "FP32")
    tensor.set_data_from_numpy(array)
    return [tensor]


async def test_tritonclient_with_callbacks(start: Serve) -> None:
    """`start_stream` and `async_stream_infer`, as in its examples for decoupled models."""

    def ask(url: str) -> list[Any]:
        told: list[Any] = []
        with triton.InferenceServerClient(url) as client:
            client.start_stream(callback=lambda result, error: told.append(error or result))
            client.async_stream_infer(
                "count", triton_input(triton, 3, 1), enable_empty_final_response=True
            )
            client.async_stream_infer("nope", triton_input(triton, 3, 1))
            client.async_stream_infer("fp32", triton_input(triton, 8), request_id="z")
            client.stop_stream()
        return told

    async with start() as server:
        told = await asyncio.to_thread(ask, server.url)
    (error,) = [one for one in told if isinstance(one, InferenceServerException)]
    results = [one for one in told if one is not error]
    *counted, final, last = sorted(results, key=lambda result: result.get_response().id)

    assert [0.0, 1.0, 2.0] == [result.as_numpy("y")[0] for result in counted]
    assert final.get_response().parameters[FINAL].bool_param
    assert "unknown model" in error.message()
    assert [8.0] == last.as_numpy("y").tolist()


async def test_tritonclient_with_async_iterators(start: Serve) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for count in (2, 3):
            yield {
                "model_name": "count",
                "inputs": triton_input(triton_aio, count, 1),
                "request_id": str(count),
            }

    async with start() as server, triton_aio.InferenceServerClient(server.url) as client:
        stream: Any = client.stream_infer(requests())
        told = [(result.get_response().id, error) async for result, error in stream]

    assert [("2", None)] * 2 + [("3", None)] * 3 == sorted(told)
