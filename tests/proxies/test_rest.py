"""REST through Debian's reverse proxies, each with its configuration in deploy/proxies."""

import asyncio
import gzip
import json
import re
from collections import Counter
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from proxies.conftest import ORIGIN, Placed
from support.conditions import until
from support.proxy_place import SOURCE, Client, Place
from support.proxy_programs import PROXIES, Proxy
from support.proxy_results import results
from tritonclient.grpc import service_pb2 as pb

# protobuf makes the classes of service_pb2 when it is imported, where no checker sees them.
# pyright: reportAttributeAccessIssue=false

pytestmark = pytest.mark.large

LARGE = 6 << 20
"""Number of elements; 24 MB."""
FORGED = "203.0.113.5"
BINARY = "Inference-Header-Content-Length"
MOST_KEPT = 20
"""An upper bound on the pages and assets that caches may keep."""


def body_of(*values: float) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(values)], "data": values}
    return json.dumps({"inputs": [tensor]}).encode()


def octets(values: "np.ndarray[Any, Any]") -> tuple[tuple[str, str], bytes]:
    """Return the headers and body of a binary inference that asks for a binary answer."""
    data = values.astype("<f4").tobytes()
    size = {"binary_data_size": len(data)}
    tensor = {"name": "x", "datatype": "FP32", "shape": [values.size], "parameters": size}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return (BINARY, str(len(head))), head + data


def values_of(answer: Any) -> "np.ndarray[Any, Any]":
    assert answer.status == 200, answer.body[:300]
    return np.frombuffer(answer.body[int(answer.headers[BINARY.lower()]) :], "<f4")


async def metadata(place: Place) -> None:
    async with place.client() as client:
        answer = await client.ask("GET", "/v2")

    assert (200, "xlaserve") == (answer.status, answer.json["name"])


async def head(place: Place) -> None:
    async with place.client() as client:
        for _ in range(3):
            answer = await client.ask("HEAD", "/v2/health/ready")
            whole = await client.ask("GET", "/v2/health/ready")

            assert (200, b"") == (answer.status, answer.body)
            assert whole.json["ready"] is True


async def inference(place: Place) -> None:
    async with place.client() as client:
        for number in range(5):
            answer = await client.ask("POST", "/v2/models/m/infer", body=body_of(number, 2))

            assert [number, 2] == answer.json["outputs"][0]["data"]


async def binary_tensors(place: Place) -> None:
    values = np.arange(1000, dtype=np.float32)
    header, body = octets(values)
    async with place.client() as client:
        answer = await client.ask("POST", "/v2/models/m/infer", header, body=body)

    np.testing.assert_array_equal(values, values_of(answer))


async def large_bodies(place: Place) -> None:
    values = np.arange(LARGE, dtype=np.float32)
    header, body = octets(values)
    async with place.client() as client:
        answer = await client.ask("POST", "/v2/models/m/infer", header, body=body)

    np.testing.assert_array_equal(values, values_of(answer))


async def chunked_bodies(place: Place) -> None:
    body = body_of(1, 2)
    parts = (body[:10], body[10:], b"")
    async with place.client() as client:
        await client.send("POST", "/v2/models/m/infer", ("Transfer-Encoding", "chunked"))
        for part in parts:
            client.writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        answer = await client.answer()

    assert [1, 2] == answer.json["outputs"][0]["data"]


async def expect(place: Place) -> None:
    body = body_of(1, 2)
    length = ("Content-Length", str(len(body)))
    async with place.client() as client:
        await client.send("POST", "/v2/models/m/infer", length, ("Expect", "100-continue"))
        line = await client.reader.readuntil(b"\r\n\r\n")
        client.writer.write(body)
        answer = await client.answer()

    assert line.startswith(b"HTTP/1.1 100")
    assert [1, 2] == answer.json["outputs"][0]["data"]


async def compressed_requests(place: Place) -> None:
    body = gzip.compress(body_of(*range(1000)))
    async with place.client() as client:
        coded = ("Content-Encoding", "gzip")
        answer = await client.ask("POST", "/v2/models/m/infer", coded, body=body)

    assert [*range(1000)] == answer.json["outputs"][0]["data"]


async def compressed_answers(place: Place) -> None:
    async with place.client() as client:
        answer = await client.ask("GET", "/metrics", ("Accept-Encoding", "gzip"))
        plain = await client.ask("GET", "/metrics")

    assert "gzip" == answer.headers["content-encoding"]
    assert b"xlaserve_" in gzip.decompress(answer.body)
    assert b"xlaserve_" in plain.body
    assert "Accept-Encoding" in answer.headers["vary"]


async def encoded_slashes(place: Place) -> None:
    """If a proxy decoded the name, its path would be another one, which is not found."""
    async with place.client() as client:
        for below in ("", "/ml"):
            answer = await client.ask("GET", f"{below}/v2/models/a%2Fb%20c")

            assert (404, True) == (answer.status, "'a/b c'" in answer.error), answer.body


async def events_as_they_come(place: Place) -> None:
    """The second event is not computed before the first was read."""
    place.generation.may_go_on.clear()
    async with place.client() as client:
        accept = ("Accept", "text/event-stream")
        await client.send("POST", "/v2/models/count/infer", accept, body=body_of(3, 2))
        status, headers = await client.head()
        chunks = client.chunks()
        first = await anext(chunks)
        place.generation.may_go_on.set()
        rest = b"".join([chunk async for chunk in chunks])

    assert (200, "text/event-stream") == (status, headers["content-type"].partition(";")[0])
    # The last event marks the end.
    assert [1, 3] == [part.count(b"\n\n") for part in (first, rest)]


async def clients_that_leave(place: Place) -> None:
    """The model stops computing answers for a client that has left."""
    place.generation.may_go_on.clear()
    before = place.generation.computed, place.generation.ended
    async with place.client() as client:
        accept = ("Accept", "text/event-stream")
        await client.send("POST", "/v2/models/count/infer", accept, body=body_of(1 << 20, 2))
        await client.head()
        await anext(client.chunks())
    # The model checks for cancellation before each answer; let it notice.
    place.generation.may_go_on.set()
    await until(lambda: place.generation.ended > before[1])

    assert place.generation.computed < before[0] + (1 << 20)


async def errors_with_text(place: Place) -> None:
    async with place.client() as client:
        absent = await client.ask("GET", "/v2/models/nobody")
    async with place.client() as client:
        wrong = await client.ask("POST", "/v2/models/m/infer", body=b"{")
    async with place.client() as client:  # Apache closes the connection after a 400
        method = await client.ask("PUT", "/v2/models/m", body=b"")

    assert (404, True) == (absent.status, "'nobody'" in absent.error)
    assert (400, True) == (wrong.status, "JSON" in wrong.error)
    assert (405, True) == (method.status, "GET" in method.headers["allow"])


async def grpc_web(place: Place) -> None:
    """As from a page: a call, a stream of answers, and an error in the trailers within the body."""
    async with place.client() as client:
        answers, trailers = await web(client, "ModelInfer", asked("m", 1, 2))
        counted, ended = await web(client, "ModelStreamInfer", asked("count", 3, 2))
        none, failed = await web(client, "ModelInfer", asked("nöbody", 1))

    found = [pb.ModelInferResponse.FromString(one).raw_output_contents[0] for one in answers]
    streamed = [pb.ModelStreamInferResponse.FromString(one).infer_response for one in counted]
    assert ([np.array([1, 2], "<f4").tobytes()], "0") == (found, trailers["grpc-status"])
    assert [0, 1, 2] == [
        int(np.frombuffer(one.raw_output_contents[0], "<f4")[0])
        for one in streamed
        if one.raw_output_contents
    ]
    assert "0" == ended["grpc-status"]
    assert ([], "5") == (none, failed["grpc-status"])
    assert "'nöbody'" in unquote(failed["grpc-message"])


def asked(model: str, *values: float) -> bytes:
    request = pb.ModelInferRequest(model_name=model)
    request.raw_input_contents.append(np.array(values, "<f4").tobytes())
    request.inputs.add(name="x", datatype="FP32", shape=[len(values)])
    written: bytes = request.SerializeToString()
    return written


async def web(client: Client, method: str, message: bytes) -> tuple[list[bytes], dict[str, str]]:
    """Send a message as a page does; return the messages and trailers of the answer."""
    headers = (
        ("Content-Type", "application/grpc-web+proto"),
        ("X-Grpc-Web", "1"),
        ("Origin", ORIGIN),
    )
    body = b"\0" + len(message).to_bytes(4, "big") + message
    path = f"/inference.GRPCInferenceService/{method}"
    answer = await client.ask("POST", path, *headers, body=body)
    assert (200, ORIGIN) == (answer.status, answer.headers.get("access-control-allow-origin"))
    rest, messages = answer.body, []
    while rest[0] != 0x80:
        size = int.from_bytes(rest[1:5], "big")
        messages.append(rest[5 : 5 + size])
        rest = rest[5 + size :]
    lines = (line.partition(":") for line in rest[5:].decode().split("\r\n") if line)
    return messages, {name: value.strip() for name, _, value in lines}


async def every_route_twice(place: Place) -> None:
    """Uncacheable GETs reach the server every time."""
    routes = place.server.application.http_routes().routes
    paths = {re.sub(r"\{[a-z]+\}", "m", route.path) for route in routes if route.method == "GET"}
    before, told = requests_of_clients(place), Counter[str]()
    for path in sorted(paths):
        for _ in range(2):
            async with place.client() as client:
                answer = await client.ask("GET", path)
            assert answer.status < 500 or answer.status == 501, (path, answer.body)
            told[path] += answer.headers["cache-control"] == "no-store"
    wanted = sum(told.values())

    assert wanted > 2 * MOST_KEPT
    await until(lambda: requests_of_clients(place) - before >= wanted)


def requests_of_clients(place: Place) -> int:
    """Return the number of REST client requests in the access log."""
    lines = map(json.loads, place.log.read_text().splitlines())
    return sum(str(line.get("peer")).startswith(SOURCE) for line in lines)


async def what_is_of_the_moment(place: Place) -> None:
    """No cache answers in place of the server."""
    async with place.client() as client:
        counts, kept = [], ""
        for _ in range(3):
            await client.ask("POST", "/v2/models/m/infer", body=body_of(1, 2))
            found = await client.ask("GET", "/v2/models/m/stats")
            counts.append(int(found.json["model_stats"][0]["inference_count"]))
            kept = found.headers["cache-control"]
        await client.ask("GET", "/v2/models/nobody")

    assert [counts[0], counts[0] + 1, counts[0] + 2] == counts
    assert "no-store" == kept


async def conditional_and_ranges(place: Place) -> None:
    """The server ignores both and sends whole answers, from which a proxy may cut a range."""
    headers = (("If-None-Match", '"a"'), ("Range", "bytes=0-9"))
    async with place.client() as client:
        for _ in range(2):
            answer = await client.ask("GET", "/page/base.css", *headers)

            whole = await client.ask("GET", "/page/base.css")
            wanted = whole.body if answer.status == 200 else whole.body[:10]

            assert (True, wanted) == (answer.status in (200, 206), answer.body)


async def the_host(place: Place) -> None:
    async with place.client() as client:
        known = await client.ask("GET", "/v2")
    async with place.client() as client:
        other = await client.ask("GET", "/v2", host="evil.example")

    assert 200 == known.status
    assert b"xlaserve" not in other.body or other.status == 421


async def the_client(place: Place) -> None:
    """Whatever address the client claims."""
    said = (("X-Forwarded-For", FORGED), ("Forwarded", f"for={FORGED}"))
    async with place.client() as client:
        for headers in (said, said[:1], said[1:], ()):
            await client.ask("GET", "/v2/models/m/config", *headers)
    lines: list[Any] = []

    def are_written() -> bool:
        lines[:] = map(json.loads, place.log.read_text().splitlines())
        return len([line for line in lines if line["peer"].startswith(SOURCE)]) >= 4

    await until(are_written)
    assert not [line for line in lines if FORGED in line["peer"]]


async def a_path_before(place: Place) -> None:
    async with place.client() as client:
        answer = await client.ask("POST", "/ml/v2/models/m/infer", body=body_of(1, 2))
        page = await client.ask("GET", "/ml/v2/docs/")
        described = await client.ask("GET", "/ml/v2/docs/openapi.json")
        forged = ("X-Forwarded-Prefix", "/evil")
        plain = await client.ask("GET", "/v2/docs/openapi.json", forged)

    assert [1, 2] == answer.json["outputs"][0]["data"]
    assert (308, "../docs") == (page.status, page.headers["location"])
    assert [{"url": "/ml"}] == described.json["servers"]
    assert [{"url": "../.."}] == plain.json["servers"]


async def kept_connections(place: Place) -> None:
    """A connection that the server closes as idle causes no failed request."""
    http: Any = place.server.application.http
    for _ in range(3):
        async with place.client() as client:
            answer = await client.ask("GET", "/v2/models/m")
        assert 200 == answer.status
        for connection in tuple(http._server.connections):
            connection.close_idle()
        await until(lambda: not http.connections)


async def many_at_once(place: Place) -> None:
    async def one(number: int) -> list[float]:
        async with place.client() as client:
            answer = await client.ask("POST", "/v2/models/m/infer", body=body_of(number, 2))
            data: list[float] = answer.json["outputs"][0]["data"]
            return data

    assert [[n, 2] for n in range(32)] == await asyncio.gather(*map(one, range(32)))


async def options(place: Place) -> None:
    async with place.client() as client:
        answer = await client.ask("OPTIONS", "/v2/models/m/infer")

    assert (204, True) == (answer.status, "POST" in answer.headers["allow"])


CHECKS = {
    "metadata": metadata,
    "HEAD, and the next request": head,
    "inference in JSON": inference,
    "binary tensors": binary_tensors,
    "24 MB each way": large_bodies,
    "a chunked body": chunked_bodies,
    "`Expect: 100-continue`": expect,
    "a compressed request": compressed_requests,
    "a compressed answer": compressed_answers,
    "an encoded slash in a name": encoded_slashes,
    "events are streamed": events_as_they_come,
    "a client that disconnects": clients_that_leave,
    "error texts": errors_with_text,
    "live data is never cached": what_is_of_the_moment,
    "no other route is cached": every_route_twice,
    "gRPC-Web": grpc_web,
    "conditional and range requests": conditional_and_ranges,
    "only the allowed host": the_host,
    "the client's address, despite forged headers": the_client,
    "a path prefix": a_path_before,
    "connections closed by the server": kept_connections,
    "32 concurrent requests": many_at_once,
    "OPTIONS": options,
}


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: proxy.name)
async def test_every_check_finds_what_the_page_says(
    placed: Placed, proxy: Proxy, *, tls: bool
) -> None:
    if tls and not proxy.has_tls:
        return
    async with placed(proxy, tls=tls) as (place,):
        await place.try_all(CHECKS)

    assert results(proxy.name, CHECKS) == place.found
