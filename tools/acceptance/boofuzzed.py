"""F3 once more: requests over HTTP as boofuzz makes them, each on a connection of its own."""

import asyncio
import importlib.util
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from itertools import islice
from typing import Any

from support.http import Connection, connect
from support.tools import required

from acceptance.figures import Outcome
from acceptance.subjects import Subject

_LANES = 8
_PATIENCE_SECONDS = 0.2
"""How long to wait for an answer before the client closes its side: many damaged requests announce
more bytes than they have.
"""
_HANG_SECONDS = 2.0
_ALLOWED = frozenset({501, 503, 505, 507})
_BODY = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}'
_SHAPES = (
    ("POST", "/v2/models/echo/infer", "Inference-Header-Content-Length", str(len(_BODY))),
    ("POST", "/v2/models/plus/versions/1/infer", "Content-Encoding", "gzip"),
    ("POST", "/v2/models/texts/generate", "Accept", "text/event-stream"),
    ("POST", "/v2/repository/models/absent/load", "Expect", "100-continue"),
    ("POST", "/invocations", "X-Amzn-SageMaker-Target-Model", "echo"),
    ("GET", "/v2/models/echo/config?a=b", "Connection", "Upgrade, HTTP2-Settings"),
    ("OPTIONS", "/v2/health/ready", "Origin", "http://localhost"),
    ("GET", "/metrics", "Transfer-Encoding", "chunked"),
)
"""Method, path, and a header with its value; boofuzz puts something else in place of each."""


def is_there() -> bool:
    """Tell whether boofuzz is installed (the dependency group `fuzz`)."""
    return importlib.util.find_spec("boofuzz") is not None


def fuzz(subject: Subject, count: int, outcome: Outcome) -> None:
    """Send so many requests of boofuzz, evenly from all that it makes."""
    if is_there():
        asyncio.run(send(subject.http, islice(_requests(count), count), outcome))
    else:
        outcome.add("boofuzz", "none", "is installed", holds=not required(os.environ))


async def send(address: str, requests: Iterator[bytes], outcome: Outcome) -> None:
    """Send requests, each on a connection of its own, and judge how each of them ended."""
    statuses: Counter[int] = Counter()
    faults, hangs = list[str](), list[str]()

    async def lane() -> None:
        # One generator for all lanes: the event loop takes from it one at a time.
        for octets in requests:
            began = time.monotonic()
            try:
                status = await _ended(address, octets)
            except TimeoutError:
                hangs.append(repr(octets[:200]))
                continue
            except ValueError as error:
                faults.append(f"no answer of HTTP: {error} to {octets[:200]!r}")
                continue
            if time.monotonic() - began > _HANG_SECONDS:
                hangs.append(repr(octets[:200]))
            statuses[status] += 1
            if status >= 500 and status not in _ALLOWED:
                faults.append(f"{status} to {octets[:300]!r}")

    async with asyncio.TaskGroup() as group:
        for _ in range(_LANES):
            group.create_task(lane())
    shown = dict(sorted(statuses.items()))
    outcome.note("requests of boofuzz", f"{statuses.total()}: {shown}, 0 where it only closed")
    outcome.at_least("requests of boofuzz that were answered", statuses.total() - statuses[0], 1)
    outcome.none("5xx but 501, 503, 505, 507, to boofuzz", faults)
    outcome.none(f"longer than {_HANG_SECONDS:g} s, to boofuzz", hangs)


async def _ended(address: str, octets: bytes) -> int:
    """Return the status of the answer; 0 where the server closes without one."""
    async with connect(address) as client:
        await client.send(octets)
        is_head = octets.startswith(b"HEAD ")
        try:
            return await _status(client, _PATIENCE_SECONDS, is_head=is_head)
        except TimeoutError:
            with suppress(OSError):
                client.writer.write_eof()
        return await _status(client, _HANG_SECONDS, is_head=is_head)


async def _status(client: Connection, seconds: float, *, is_head: bool) -> int:
    try:
        async with asyncio.timeout(seconds):
            return (await client.answer(head=is_head)).status
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0


def _requests(count: int) -> Iterator[bytes]:
    """Yield requests of all shapes, of each as many as it takes, from all over its mutations."""
    each = -(-count // len(_SHAPES))
    for number, shape in enumerate(_SHAPES):
        request = _request(number, *shape)
        every = max(1, request.num_mutations() // each)
        yield from islice(_rendered(request, every), each)


def _rendered(request: Any, every: int) -> Iterator[bytes]:
    context: Any = import_module("boofuzz.mutation_context").MutationContext
    for mutations in islice(request.get_mutations(), 0, None, every):
        by_name = {mutation.qualified_name: mutation for mutation in mutations}
        yield request.render(context(mutations=by_name))


def _request(number: int, method: str, path: str, header: str, value: str) -> Any:
    boofuzz: Any = import_module("boofuzz")
    string, delim, static = boofuzz.String, boofuzz.Delim, boofuzz.Static
    return boofuzz.Request(
        f"request{number}",
        children=(
            string("method", method),
            delim("space", " "),
            string("path", path),
            delim("space2", " "),
            string("version", "HTTP/1.1"),
            static("end", "\r\nHost: localhost\r\n"),
            string("header", header),
            delim("colon", ": "),
            string("value", value),
            static("end2", "\r\nContent-Length: "),
            boofuzz.Size("size", block_name="body", output_format="ascii"),
            static("end3", "\r\n\r\n"),
            boofuzz.Block("body", children=(boofuzz.Bytes("octets", _BODY),)),
        ),
    )
