"""gRPC through Debian's reverse proxies, each with its configuration in deploy/proxies."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from proxies.conftest import Placed
from support.conditions import until
from support.proxy_place import Place
from support.proxy_programs import PROXIES, Proxy
from support.proxy_results import results
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

# protobuf makes the classes of service_pb2 when it is imported, where no checker sees them.
# pyright: reportAttributeAccessIssue=false

pytestmark = pytest.mark.large

LARGE = 6 << 20
"""Number of elements; 24 MB."""
FORGED = "203.0.113.5"
SECONDS = 60


def request(*values: float, model: str = "m") -> Any:
    return of_array(np.array(values, np.float32), model)


def of_array(array: "np.ndarray[Any, Any]", model: str = "m") -> Any:
    asked = pb.ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()])
    asked.inputs.add(name="x", datatype="FP32", shape=array.shape)
    return asked


def values_of(answer: Any) -> list[float]:
    return [float(value) for value in np.frombuffer(answer.raw_output_contents[0], "<f4")]


def stub(channel: grpc.aio.Channel) -> Any:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


async def fails(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


async def unary(place: Place) -> None:
    async with place.channel() as channel:
        assert (await stub(channel).ServerReady(pb.ServerReadyRequest(), timeout=SECONDS)).ready


async def inference(place: Place) -> None:
    async with place.channel() as channel:
        for number in range(5):
            answer = await stub(channel).ModelInfer(request(number, 2), timeout=SECONDS)

            assert [number, 2] == values_of(answer)


async def large_messages(place: Place) -> None:
    values = np.arange(LARGE, dtype=np.float32)
    async with place.channel() as channel:
        answer = await stub(channel).ModelInfer(of_array(values), timeout=SECONDS)

    np.testing.assert_array_equal(values, np.frombuffer(answer.raw_output_contents[0], "<f4"))


async def compressed_messages(place: Place) -> None:
    async with place.channel() as channel:
        asked = request(*range(1000))
        how = grpc.Compression.Gzip
        answer = await stub(channel).ModelInfer(asked, timeout=SECONDS, compression=how)

    assert [*range(1000)] == values_of(answer)


async def errors_with_text(place: Place) -> None:
    async with place.channel() as channel:
        absent = await fails(stub(channel).ModelInfer(request(1, model="nobody"), timeout=SECONDS))
        wrong = pb.ModelInferRequest(model_name="m")
        invalid = await fails(stub(channel).ModelInfer(wrong, timeout=SECONDS))

    assert (grpc.StatusCode.NOT_FOUND, True) == (absent.code(), "nobody" in str(absent.details()))
    assert (grpc.StatusCode.INVALID_ARGUMENT, True) == (
        invalid.code(),
        "x" in str(invalid.details()),
    )


async def long_errors(place: Place) -> None:
    """A non-ASCII error of 1 KB, and an error after messages: both are in trailers."""
    name = "ñ" * 100
    async with place.channel() as channel:
        absent = await fails(stub(channel).ModelInfer(request(1, model=name), timeout=SECONDS))
        stream = stub(channel).ModelStreamInfer(timeout=SECONDS)
        await stream.write(request(-3, 2, model="count"))
        first = await stream.read()
        second = await stream.read()
        given = (("triton_grpc_error", "true"),)
        strict = stub(channel).ModelStreamInfer(timeout=SECONDS, metadata=given)
        await strict.write(request(-3, 2, model="count"))
        await strict.read()
        ended = await fails(strict.read())

    assert (grpc.StatusCode.NOT_FOUND, True) == (absent.code(), name in str(absent.details()))
    assert [0, 0] == values_of(first.infer_response)
    # Exception texts of a model's code appear only in the log.
    assert "internal error" == second.error_message
    assert (grpc.StatusCode.INTERNAL, "internal error") == (ended.code(), ended.details())


async def no_method(place: Place) -> None:
    async with place.channel() as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/Nothing")
        error = await fails(call(b"", timeout=SECONDS))

    assert grpc.StatusCode.UNIMPLEMENTED == error.code()


async def early_refusals(place: Place) -> None:
    """A request refused while its client is still sending gets its status."""
    long = of_array(np.zeros(LARGE, np.float32))
    # More than the server accepts: 72 MB.
    too_long = of_array(np.zeros(3 * LARGE, np.float32))
    async with place.channel() as channel:
        as_bytes = pb.ModelInferRequest.SerializeToString
        path = "/inference.GRPCInferenceService/Nothing"
        unknown = await fails(channel.unary_unary(path, as_bytes)(long, timeout=SECONDS))
        large = await fails(stub(channel).ModelInfer(too_long, timeout=SECONDS))
        stream = stub(channel).ModelStreamInfer(timeout=SECONDS)
        await stream.write(too_long)
        streamed = await fails(stream.read())

    assert [grpc.StatusCode.UNIMPLEMENTED, *[grpc.StatusCode.RESOURCE_EXHAUSTED] * 2] == [
        error.code() for error in (unknown, large, streamed)
    ]
    assert "max_message_bytes" in str(large.details())
    assert large.details() == streamed.details()


async def metadata(place: Place) -> None:
    """Names with underscores are read, and binary values stay intact."""

    async def requests() -> AsyncIterator[Any]:
        yield request(1, model="nobody")

    async with place.channel() as channel:
        given = (("triton_grpc_error", "true"), ("trace-bin", bytes(range(256))))
        stream = stub(channel).ModelStreamInfer(requests(), metadata=given, timeout=SECONDS)
        error = await fails(stream.read())

    assert grpc.StatusCode.NOT_FOUND == error.code()


async def health(place: Place) -> None:
    async with place.channel() as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = await check(health_pb2.HealthCheckRequest(), timeout=SECONDS)

    assert health_pb2.HealthCheckResponse.SERVING == answer.status


async def server_streams(place: Place) -> None:
    """Each answer arrives while the call continues."""
    async with place.channel() as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        stream = watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        answer = await stream.read()
        stream.cancel()

    assert health_pb2.HealthCheckResponse.SERVING == answer.status


async def streams_both_ways(place: Place) -> None:
    """Each request is sent after the answer to the previous one was read."""
    async with place.channel() as channel:
        stream = stub(channel).ModelStreamInfer(timeout=SECONDS)
        for number in range(5):
            await stream.write(request(number, 2))
            answer = await stream.read()

            assert [number, 2] == values_of(answer.infer_response)
        await stream.done_writing()
        end = await stream.read()

        assert (grpc.aio.EOF, grpc.StatusCode.OK) == (end, await stream.code())


async def answers_as_they_come(place: Place) -> None:
    """The second answer is not computed before the first was read."""
    place.generation.may_go_on.clear()
    async with place.channel() as channel:
        stream = stub(channel).ModelStreamInfer(timeout=SECONDS)
        await stream.write(request(3, 2, model="count"))
        found = [values_of((await stream.read()).infer_response)]
        place.generation.may_go_on.set()
        found += [values_of((await stream.read()).infer_response) for _ in range(2)]

    assert [[n, n] for n in range(3)] == found


async def long_streams(place: Place) -> None:
    async def requests() -> AsyncIterator[Any]:
        for number in range(500):
            yield request(number, 2)

    async with place.channel() as channel:
        stream = stub(channel).ModelStreamInfer(requests(), timeout=SECONDS)
        found = [values_of(answer.infer_response)[0] async for answer in stream]

    assert [*range(500)] == sorted(found)


async def deadlines(place: Place) -> None:
    """The server also stops computing."""
    place.generation.may_go_on.clear()
    before = place.generation.begun, place.generation.ended
    async with place.channel() as channel:
        stream = stub(channel).ModelStreamInfer(timeout=3)
        await stream.write(request(1 << 20, 2, model="count"))
        error = await fails(_read_to_the_end(stream))
        await until(lambda: place.generation.begun > before[0])
        place.generation.may_go_on.set()
        await until(lambda: place.generation.ended > before[1])

    assert grpc.StatusCode.DEADLINE_EXCEEDED == error.code()


async def _read_to_the_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def cancelled_calls(place: Place) -> None:
    place.generation.may_go_on.clear()
    before = place.generation.computed, place.generation.ended
    async with place.channel() as channel:
        stream = stub(channel).ModelStreamInfer(timeout=SECONDS)
        await stream.write(request(1 << 20, 2, model="count"))
        await stream.read()
        stream.cancel()
        place.generation.may_go_on.set()
        await until(lambda: place.generation.ended > before[1])

        assert place.generation.computed < before[0] + (1 << 20)


async def clients_that_leave(place: Place) -> None:
    place.generation.may_go_on.clear()
    before = place.generation.computed, place.generation.ended
    async with place.channel() as channel:
        stream = stub(channel).ModelStreamInfer(timeout=SECONDS)
        await stream.write(request(1 << 20, 2, model="count"))
        await stream.read()
    place.generation.may_go_on.set()
    await until(lambda: place.generation.ended > before[1])

    assert place.generation.computed < before[0] + (1 << 20)


async def slow_readers(place: Place) -> None:
    """The number of answers computed ahead for a slow client is bounded."""
    before = place.generation.ended
    async with place.channel() as channel:
        stream = stub(channel).ModelStreamInfer(timeout=SECONDS)
        await stream.write(request(50, 1 << 18, model="count"))
        found = [values_of((await stream.read()).infer_response)[0] for _ in range(50)]
        await until(lambda: place.generation.ended > before)

    assert [*range(50)] == found


async def many_at_once(place: Place) -> None:
    async with place.channel() as channel:
        asked = [stub(channel).ModelInfer(request(n, 2), timeout=SECONDS) for n in range(64)]
        found = [values_of(answer) for answer in await asyncio.gather(*asked)]

    assert [[n, 2] for n in range(64)] == found


async def many_channels(place: Place) -> None:
    for number in range(8):
        async with place.channel() as channel:
            answer = await stub(channel).ModelInfer(request(number), timeout=SECONDS)

            assert [number] == values_of(answer)


async def kept_connections(place: Place) -> None:
    """A connection that the server closes between two calls causes no failure."""
    async with place.channel() as channel:
        for number in range(3):
            answer = await stub(channel).ModelInfer(request(number), timeout=SECONDS)

            assert [number] == values_of(answer)


async def reflection(place: Place) -> None:
    async def requests() -> AsyncIterator[Any]:
        yield reflection_pb2.ServerReflectionRequest(list_services="*")

    async with place.channel() as channel:
        # The stubs of grpcio-reflection do not accept channels of grpc.aio.
        stub_of: Any = reflection_pb2_grpc.ServerReflectionStub
        ask = stub_of(channel).ServerReflectionInfo
        answer = await ask(requests(), timeout=SECONDS).read()

    names = [service.name for service in answer.list_services_response.service]
    assert "inference.GRPCInferenceService" in names


async def the_client(place: Place) -> None:
    """Whatever address the client claims."""
    async with place.channel() as channel:
        for given in (("x-forwarded-for", FORGED), ("forwarded", f"for={FORGED}")):
            asked = request(1, model="nobody")
            await fails(stub(channel).ModelInfer(asked, timeout=SECONDS, metadata=(given,)))
    lines: list[Any] = []

    def are_written() -> bool:
        lines[:] = map(json.loads, place.log.read_text().splitlines())
        refused = [line for line in lines if line["listener"] == "grpc_endpoint"]
        return len([line for line in refused if line["status"] == "NOT_FOUND"]) >= 2

    await until(are_written)
    # A REST health check comes from the proxy itself.
    assert {"127.0.0.1"} == {line["peer"] for line in lines if line["listener"] == "grpc_endpoint"}


CHECKS = {
    "a call": unary,
    "an inference": inference,
    "messages of 24 MB each way": large_messages,
    "compressed messages": compressed_messages,
    "statuses and their texts": errors_with_text,
    "long error texts, and errors after messages": long_errors,
    "an unknown method": no_method,
    "refusals before a request is complete": early_refusals,
    "metadata, with underscores and binary": metadata,
    "health": health,
    "a server stream": server_streams,
    "a bidirectional stream": streams_both_ways,
    "answers are streamed": answers_as_they_come,
    "a stream of 500 requests": long_streams,
    "deadlines": deadlines,
    "cancelled calls": cancelled_calls,
    "a client that abandons its stream": clients_that_leave,
    "50 MB in answers to one client": slow_readers,
    "64 concurrent calls": many_at_once,
    "one connection after another": many_channels,
    "kept-alive connections": kept_connections,
    "reflection": reflection,
    "the caller's address, despite forged headers": the_client,
}


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize(
    "proxy", [one for one in PROXIES if one.speaks_grpc], ids=lambda proxy: proxy.name
)
async def test_every_check_finds_what_the_page_says(
    placed: Placed, proxy: Proxy, *, tls: bool
) -> None:
    async with placed(proxy, tls=tls) as (place,):
        await place.try_all(CHECKS)

    assert results(proxy.name, CHECKS) == place.found
