"""Faults between a mesh and its runtime: acceptance cases 20 to 24."""

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import h2.events
import numpy as np
import psutil
import pytest
from support import mesh
from support.mesh import id_headers, message
from support.runtime import Runtime, StartRuntime
from support.shelf import (
    ECHO_ANSWER_BYTES,
    ECHO_BYTES,
    MIB,
    Shelf,
    addition,
    octets,
    spinning,
    sums,
)
from support.wire import base64_unpadded, connect, request_headers, size_of_headers

from xlaserve.runtime.exported.jax_export import JaxExportModel

INFER = "/inference.GRPCInferenceService/ModelInfer"
METHODS = ("ModelInfer", "ModelMetadata", "ModelReady")
SLOWLY = {"inline_execution_seconds": 0, "execute_threads": 1}
MAX_HEADER_BYTES = 8192


# --- 20: Statuses --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
async def test_a_model_that_is_not_there_is_not_found(
    runtime: Runtime, models: Shelf, method: str
) -> None:
    """Case 20: never loaded, failed, or unloaded; NOT_FOUND tells the mesh that it is lost."""
    await mesh.code(runtime.mesh.load("failed", models.path("corrupt")))
    await runtime.mesh.load("gone", models.path("plus-1"))
    await runtime.mesh.unload("gone")
    answers = [
        await mesh.code(runtime.mesh.call(method, model, b"")) for model in ("never", "gone")
    ]
    failed = await mesh.outcome(runtime.mesh.call(method, "failed", b""))

    assert ["NOT_FOUND"] * 2 == answers
    assert mesh.lost(failed) or method == "ModelReady"


VERSIONS = ("7", "x", "-1", "999999999999999999999999", "01", " ")
"""Versions that `m` lacks; it has version 10, and had version 1."""


@pytest.mark.parametrize("method", METHODS)
async def test_a_version_that_is_not_there_does_not_lose_the_model(
    runtime: Runtime, models: Shelf, method: str
) -> None:
    """Case 20: INVALID_ARGUMENT, with a message that the mesh does not take for a lost model."""
    await runtime.mesh.load("m", models.path("plus-1"))
    await runtime.mesh.load("m", models.path("versioned"))
    field = "model_version" if method == "ModelInfer" else "version"
    answers = {}
    for version in (*VERSIONS, "1", "10", ""):
        request = message(f"inference.{method}Request", **{field: version})
        if method == "ModelInfer":
            request.MergeFrom(addition())
        answers[version] = await mesh.outcome(runtime.mesh.call(method, "m", request))

    assert {"INVALID_ARGUMENT"} == {answers[version][0] for version in VERSIONS}
    assert not any(map(mesh.lost, answers.values()))
    assert [("OK", "")] * 2 == [answers["10"], answers[""]]
    # Asking whether a removed version is ready is no error.
    assert ("OK" if method == "ModelReady" else "INVALID_ARGUMENT") == answers["1"][0]


def _wrong(**changes: Any) -> Any:
    request = addition()
    for name, value in changes.items():
        setattr(request.inputs[0], name, value)
    return request


def _with_shape(*shape: int) -> Any:
    request = addition()
    request.inputs[0].shape[:] = shape
    return request


def _with_raw(*raw: bytes) -> Any:
    request = addition()
    request.raw_input_contents[:] = raw
    return request


def _with_inputs(count: int) -> Any:
    request = addition()
    tensor = request.inputs.pop()
    request.inputs.extend([tensor] * count)
    request.raw_input_contents[:] = [bytes(8)] * count
    return request


def _with_output(name: str) -> Any:
    request = addition()
    request.outputs.add(name=name)
    return request


BAD_REQUESTS: Mapping[str, Any] = {
    "nothing": lambda: message("inference.ModelInferRequest"),
    "shape": lambda: _with_shape(1, 2),
    "sizes": lambda: _with_shape(3),
    "negative": lambda: _with_shape(-1, -2),
    "enormous": lambda: _with_shape(2**40, 2**40),
    "datatype": lambda: _wrong(datatype="INT32"),
    "unknown datatype": lambda: _wrong(datatype="Model x not found"),
    "tensor": lambda: _wrong(name="Model x not found"),
    "few bytes": lambda: _with_raw(b"1234"),
    "many bytes": lambda: _with_raw(bytes(100)),
    "no bytes": _with_raw,
    "two buffers": lambda: _with_raw(bytes(8), bytes(8)),
    "no input": lambda: _with_inputs(0),
    "twice": lambda: _with_inputs(2),
    "output": lambda: _with_output("Model x not found"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_a_bad_request_is_the_clients_fault(
    runtime: Runtime, models: Shelf, name: str
) -> None:
    """Case 20: INVALID_ARGUMENT, and the model stays loaded."""
    await runtime.mesh.load("m", models.path("plus-1"))
    answer = await mesh.outcome(runtime.mesh.infer("m", BAD_REQUESTS[name]()))

    assert "INVALID_ARGUMENT" == answer[0]
    assert not mesh.lost(answer)
    assert [1, 1] == sums(await runtime.mesh.infer("m", addition()))


@pytest.mark.usefixtures("compilations")
async def test_a_model_on_its_way_is_not_lost(runtime: Runtime, models: Shelf) -> None:
    """Case 20: UNAVAILABLE, so that the mesh asks another instance and does not load it again."""
    call = runtime.mesh.load("m", models.path("slow"))
    waiting = asyncio.ensure_future(mesh.code(call))
    await runtime.until_compiling("m")
    answer = await mesh.outcome(runtime.mesh.infer("m", addition()))
    call.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    assert "UNAVAILABLE" == answer[0]
    assert not mesh.lost(answer)


async def test_overload_is_told_apart(start: StartRuntime, models: Shelf) -> None:
    """Case 20: RESOURCE_EXHAUSTED, which the mesh retries once on another instance."""
    async with start(**SLOWLY, max_requests_per_model=2) as runtime:
        await runtime.mesh.load("m", models.path("spin"))
        waiting = [
            asyncio.ensure_future(mesh.code(runtime.mesh.infer("m", spinning(0.3))))
            for _ in range(2)
        ]
        await runtime.until_in_use(2)
        answer = await mesh.outcome(runtime.mesh.infer("m", spinning(0)))

        assert "RESOURCE_EXHAUSTED" == answer[0]
        assert ["OK", "OK"] == await asyncio.gather(*waiting)
        assert "OK" == await mesh.code(runtime.mesh.infer("m", spinning(0)))


@pytest.mark.usefixtures("compilations")
async def test_a_server_that_is_about_to_exit_is_unavailable(
    start: StartRuntime, models: Shelf
) -> None:
    """Case 20: for requests and loads that arrive while others are being drained."""
    async with start(**SLOWLY) as runtime:
        await runtime.mesh.load("m", models.path("spin"))
        slow = runtime.mesh.load("slow", models.path("slow"))
        loading = asyncio.ensure_future(mesh.outcome(slow))
        await runtime.until_compiling("slow")
        using = asyncio.ensure_future(mesh.code(runtime.mesh.infer("m", spinning(0.3))))
        await runtime.until_in_use()
        runtime.application.control.begin_shutdown()
        runtime.application.gates.drain()
        answers = [
            await mesh.outcome(runtime.mesh.infer("m", spinning(0))),
            await mesh.outcome(runtime.mesh.load("other", models.path("plus-1"))),
            await loading,
        ]

        assert ["UNAVAILABLE"] * 3 == [status for status, _ in answers]
        assert not any(map(mesh.lost, answers))
        assert "OK" == await using


# --- Concurrency limits --------------------------------------------------------------------------

CONFIGURED = {"plus-1": 3, "configured": 7}
"""Path -> concurrency, from the setting or the model's configuration."""


@pytest.mark.parametrize("path", CONFIGURED)
async def test_a_mesh_that_limits_concurrency_is_told_by_how_much(
    start: StartRuntime, models: Shelf, path: str
) -> None:
    """At least 1 with `limit_model_concurrency`; else 0, since the mesh would log a warning."""
    async with start(limit_model_concurrency=True, max_concurrency=3) as runtime:
        limited = await runtime.mesh.load("m", models.path(path))
    async with start() as runtime:
        free = await runtime.mesh.load("m", models.path(path))

    assert CONFIGURED[path] == limited.maxConcurrency
    assert 0 == free.maxConcurrency


async def test_as_many_requests_as_a_mesh_lets_through_are_in_progress_at_once(
    start: StartRuntime, models: Shelf
) -> None:
    """None is refused; the limit is up to the mesh."""
    async with start(**SLOWLY, limit_model_concurrency=True, max_concurrency=8) as runtime:
        allowed = (await runtime.mesh.load("m", models.path("spin"))).maxConcurrency
        waiting = [
            asyncio.ensure_future(mesh.code(runtime.mesh.infer("m", spinning(0.05))))
            for _ in range(allowed)
        ]
        await runtime.until_in_use(allowed)

        assert ["OK"] * allowed == await asyncio.gather(*waiting)


# --- 21: Message sizes ---------------------------------------------------------------------------


async def test_messages_as_large_as_a_mesh_lets_through(runtime: Runtime, models: Shelf) -> None:
    """Case 21: 16 MiB plus 1 KiB in, nearly 16 MiB out, with default limits."""
    await runtime.mesh.load("m", models.path("echo"))
    request = octets(ECHO_BYTES)
    padding = 16 * MIB + 1024 - request.ByteSize() - len("paddingm") - 12
    request.parameters["padding"].string_param = "x" * padding
    answer = await runtime.mesh.infer("m", request)
    echoed = np.frombuffer(answer.raw_output_contents[0], np.uint8)

    assert 0 <= 16 * MIB + 1024 - request.ByteSize() < 100
    assert ECHO_ANSWER_BYTES == echoed.size
    assert 15.9 * MIB < answer.ByteSize() < 16 * MIB


async def test_a_message_over_the_limit_is_refused(runtime: Runtime, models: Shelf) -> None:
    """Case 21: RESOURCE_EXHAUSTED with default limits, and the connection remains usable."""
    await runtime.mesh.load("m", models.path("plus-1"))
    data = bytes(runtime.application.settings.max_message_bytes + 1)
    for _ in range(2):
        answer = await mesh.outcome(runtime.mesh.raw("ModelInfer", data, headers=id_headers("m")))

        assert "RESOURCE_EXHAUSTED" == answer[0]
        assert "max_message_bytes" in answer[1]
        assert [1, 1] == sums(await runtime.mesh.infer("m", addition()))


async def test_messages_over_the_limit_use_nothing_up(start: StartRuntime, models: Shelf) -> None:
    """Case 21: the connection's flow-control window is restored, however often."""
    async with start(max_message_bytes=MIB) as runtime:
        await runtime.mesh.load("m", models.path("plus-1"))
        headers = id_headers("m")
        answers = {
            await mesh.code(runtime.mesh.raw("ModelInfer", bytes(2 * MIB), headers=headers))
            for _ in range(20)
        }

        assert {"RESOURCE_EXHAUSTED"} == answers
        assert [1, 1] == sums(await runtime.mesh.infer("m", addition()))


# --- 22: Streams without a message ---------------------------------------------------------------

ORPHANS = 1000
ORPHAN_BYTES = 32 << 10
"""Maximum cost per waiting stream in this process, which includes its client."""


async def test_streams_without_a_message_hold_nothing_up(
    start: StartRuntime, models: Shelf
) -> None:
    """Case 22: after a broken request, a mesh leaves its stream open on the shared connection.

    Such streams take no slot of the model and do not delay others on the connection; the
    message timeout ends them.
    """
    settings = {"max_requests_per_model": 1, "message_timeout_seconds": 2}
    async with start(**settings) as runtime, connect(runtime.url) as wire:
        await runtime.mesh.load("m", models.path("plus-1"))
        headers = request_headers(INFER, ("mm-model-id", "m"))
        request = addition().SerializeToString()
        assert "0" == (await wire.trailers(wire.send(headers, request)))["grpc-status"]
        before = psutil.Process().memory_info().rss
        orphans = [wire.open(headers) for _ in range(ORPHANS)]
        await wire.ping()
        in_use = runtime.application.registry.requests
        served = [await wire.trailers(wire.send(headers, request)) for _ in range(10)]
        grown = psutil.Process().memory_info().rss - before
        ends = [await wire.trailers(stream) for stream in orphans]
        await wire.ping()
        later = await wire.trailers(wire.send(headers, request))
        left = [len(engine.requests._tasks) for engine in runtime.application.grpc._connections]
    print(f"{ORPHANS} streams without a message: {grown / ORPHANS:.0f} bytes each")

    assert 0 == in_use
    assert ["0"] * 10 == [answer["grpc-status"] for answer in served]
    assert {"1"} == {end["grpc-status"] for end in ends}
    assert grown < ORPHANS * ORPHAN_BYTES
    assert "0" == later["grpc-status"]
    assert not any(left)


# --- 23: Deadlines and cancellation --------------------------------------------------------------


async def test_a_request_given_up_in_the_queue_never_reaches_the_device(
    start: StartRuntime, models: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 23: by deadline, which gets a status, or by reset, after which nothing is sent."""
    seen = note_executions(monkeypatch)
    async with start(**SLOWLY) as runtime, connect(runtime.url) as wire:
        await runtime.mesh.load("m", models.path("spin"))
        busy = asyncio.ensure_future(mesh.code(runtime.mesh.infer("m", spinning(0.7))))
        await runtime.until_in_use()
        name = ("mm-model-id", "m")
        body = spinning(0).SerializeToString()
        late = wire.send(request_headers(INFER, name, ("grpc-timeout", "100m")), body)
        reset = wire.send(request_headers(INFER, name), body)
        await runtime.until_in_use(3)
        wire.h2.reset_stream(reset, error_code=8)
        wire.flush()
        answer = await wire.trailers(late)
        waited_for_nothing = not busy.done()
        in_use = runtime.application.registry.requests
        await busy
        await runtime.mesh.unload("m")
        await wire.ping()

        assert "4" == answer["grpc-status"]
        assert waited_for_nothing
        assert 1 == in_use
        assert 1 == len(seen)
        assert [] == streams_of(wire.events)


async def test_a_request_given_up_while_it_computes_frees_its_place(
    start: StartRuntime, models: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 23: immediately; the result is discarded."""
    seen = note_executions(monkeypatch)
    async with start(**SLOWLY, max_requests_per_model=1) as runtime:
        async with connect(runtime.url) as wire:
            await runtime.mesh.load("m", models.path("spin"))
            headers = request_headers(INFER, ("mm-model-id", "m"), ("grpc-timeout", "200m"))
            stream = wire.send(headers, spinning(0.7).SerializeToString())
            await runtime.until_in_use()
            answer = await wire.trailers(stream)
            in_use = runtime.application.registry.requests
            following = await mesh.code(runtime.mesh.infer("m", spinning(0)))
            await runtime.mesh.unload("m")
            await wire.ping()

            assert "4" == answer["grpc-status"]
            assert 0 == in_use
            assert "OK" == following
            assert 2 == len(seen)
            assert [] == streams_of(wire.events)


async def test_requests_that_are_reset_at_once_leave_nothing(
    runtime: Runtime, models: Shelf
) -> None:
    """Case 23: neither a stream nor flow-control window is lost."""
    await runtime.mesh.load("m", models.path("plus-1"))
    headers = request_headers(INFER, ("mm-model-id", "m"))
    async with connect(runtime.url) as wire:
        await wire.ping()
        # More than the connection's window.
        size = min(wire.h2.max_outbound_frame_size, 1 << 20)
        for _ in range(2 * wire.h2.outbound_flow_control_window // size):
            stream = wire.h2.get_next_available_stream_id()
            wire.h2.send_headers(stream, headers)
            wire.h2.send_data(stream, bytes(size))
            wire.h2.reset_stream(stream, error_code=8)
            wire.flush()
            await wire.ping()
        answer = await wire.trailers(wire.send(headers, addition().SerializeToString()))
        left = runtime.application.grpc.open_streams

    assert "0" == answer["grpc-status"]
    assert 0 == left


def note_executions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the inputs of `spin` executions."""
    seen: list[int] = []
    execute = JaxExportModel.execute

    def note(self: JaxExportModel, inputs: Mapping[str, Any], **more: Any) -> Any:
        seen.append(int(inputs["n"][0]))
        return execute(self, inputs, **more)

    monkeypatch.setattr(JaxExportModel, "execute", note)
    return seen


def streams_of(events: list[Any]) -> list[Any]:
    """Return the events that belong to streams, not to the connection."""
    kinds = (h2.events.ResponseReceived, h2.events.DataReceived, h2.events.TrailersReceived)
    return [event for event in events if isinstance(event, kinds)]


async def test_a_deadline_that_has_passed_is_answered(runtime: Runtime, models: Shelf) -> None:
    """Case 23: however short the deadline."""
    await runtime.mesh.load("m", models.path("plus-1"))
    async with connect(runtime.url) as wire:
        headers = request_headers(INFER, ("mm-model-id", "m"), ("grpc-timeout", "0n"))
        answer = await wire.trailers(wire.send(headers, addition().SerializeToString()))

    assert "4" == answer["grpc-status"]


# --- 24: Headers and connections -----------------------------------------------------------------

MALFORMED = ("abcde", "!!!!", "a", "YQ==YQ==", "é", "YWJj,!")


@pytest.mark.parametrize("value", MALFORMED)
@pytest.mark.parametrize("name", ["mm-model-id-bin", "x-clients-own-bin"])
@pytest.mark.parametrize("method", [INFER, "/mmesh.ModelRuntime/loadModel"])
async def test_a_header_that_is_not_base64_is_answered(
    runtime: Runtime, name: str, value: str, method: str
) -> None:
    """Case 24: whichever header is invalid, the request gets a status."""
    async with connect(runtime.url) as wire:
        answer = await wire.trailers(wire.send(request_headers(method, (name, value))))

    assert "13" == answer["grpc-status"]
    assert "-bin" in answer["grpc-message"]


async def test_what_clients_send_along_is_let_through(runtime: Runtime, models: Shelf) -> None:
    """Case 24: 8 KiB of headers, a socket path as authority, and interspersed PINGs."""
    await runtime.mesh.load("m", models.path("plus-1"))
    more = [(f"x-custom-{number}", "v" * 80) for number in range(100)]
    headers = request_headers(
        INFER,
        ("mm-model-id-bin", base64_unpadded("m")),
        ("mm-model-id", "m"),
        *more,
        authority="/tmp/mmesh/grpc.sock",
    )
    async with connect(runtime.url) as wire:
        stream = wire.open(headers)
        await wire.ping()
        message = addition().SerializeToString()
        wire.h2.send_data(stream, b"\0" + len(message).to_bytes(4, "big") + message[:5])
        wire.flush()
        await wire.ping()
        wire.h2.send_data(stream, message[5:], end_stream=True)
        wire.flush()
        answer = await wire.trailers(stream)

    assert size_of_headers(more) > 8192
    assert "0" == answer["grpc-status"]


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "0.0.0.0"])
@pytest.mark.parametrize("endpoint", ["port:0"])
async def test_localhost_is_found_by_either_address(
    start: StartRuntime, models: Shelf, host: str, endpoint: str
) -> None:
    """Case 24: a mesh dials `localhost:<port>` and uses either address family."""
    if ":" in host and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    async with start(host=host) as runtime:
        port = runtime.url.rpartition(":")[2]
        async with mesh.dial(f"localhost:{port}") as sidecar:
            ready = await sidecar.status()
            await sidecar.load("m", models.path("plus-1"))
            answer = await sidecar.infer("m", addition())

    assert ready.READY == ready.status
    assert [1, 1] == sums(answer)


LONG = {
    "ascii": "x" * 4000,
    "wide": "é" * 2000,
    "percent": "%" * 4000,
    "faces": "\U0001f600" * 1000,
}


@pytest.mark.parametrize("name", LONG)
async def test_an_error_fits_into_the_headers_that_a_mesh_takes(
    runtime: Runtime, models: Shelf, name: str
) -> None:
    """Case 24: 8192 bytes as HTTP/2 counts them, even if the error quotes the request."""
    await runtime.mesh.load("m", models.path("plus-1"))
    long = LONG[name]
    tensor = _wrong(name=long).SerializeToString()
    load = message("mmesh.LoadModelRequest", modelId=long, modelPath=long)
    requests = [
        (INFER, long, addition()),
        (INFER, "m", message("inference.ModelInferRequest", model_version=long)),
        (INFER, "m", tensor),
        (INFER, "m", _wrong(datatype=long)),
        (INFER, "m", _with_output(long)),
        ("/mmesh.ModelRuntime/loadModel", "", load),
        ("/mmesh.ModelRuntime/modelSize", "", message("mmesh.ModelSizeRequest", modelId=long)),
        ("/inference.GRPCInferenceService/" + "Nope" * 500, "", b""),
    ]
    async with connect(runtime.url) as wire:
        for method, model, request in requests:
            more = [("mm-model-id-bin", base64_unpadded(model))] if model else []
            data = request if isinstance(request, bytes) else request.SerializeToString()
            stream = wire.send(request_headers(method, *more), data)
            answer = await wire.trailers(stream)

            assert "0" != answer["grpc-status"]
            assert answer["grpc-message"]
            assert size_of_headers(list(answer.items())) <= MAX_HEADER_BYTES
