"""Measure how long one connection occupies the event loop while others wait.

    python tools/turns.py [--scenario NAME] [--seconds 2] [--connections 4]

A turn is one callback of the event loop: the work for one connection, or for the task of one
request, before others can continue. A server is started in this process, on asyncio's own loop,
whose callbacks can be timed; clients in other processes send expensive requests. Each line has the
number of turns, the longest one, and the 99.9th percentile, in CPU time, so that other processes of
the machine do not count. CONNECTION_TURN_MS is the limit for a connection; each line is followed by
the callbacks that took longer, with their counts.
"""

import argparse
import asyncio
import gzip
import json
import multiprocessing
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from hpack import Encoder, NeverIndexedHeaderTuple

from xlaserve.app.server import Application
from xlaserve.grpc.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    ErrorCode,
    frame_header,
    rst_stream,
    settings,
    window_update,
)
from xlaserve.settings import Settings
from xlaserve_proto import inference as pb

CONNECTION_TURN_MS = 5.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings({}) + window_update(0, 1 << 30)
_FRAME_BYTES = 1 << 14
_ROUND = 64
"""Requests sent before their answers are read."""


# --- Client requests ---------------------------------------------------------------------------


def _fields(*more: tuple[str, str]) -> list[tuple[str, str]]:
    path = "/inference.GRPCInferenceService/ModelInfer"
    pseudo = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "a")]
    return [*pseudo, ("content-type", "application/grpc"), ("te", "trailers"), *more]


def _infer(tensor: Any, *raw: bytes) -> bytes:
    message = pb.ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=list(raw))
    data = bytes(message)
    return b"\0" + len(data).to_bytes(4, "big") + data


def _small() -> bytes:
    shape = [1, 16]
    tensor = pb.ModelInferRequestInferInputTensor(name="x", datatype="FP32", shape=shape)
    return _infer(tensor, bytes(64))


def _typed(elements: int) -> bytes:
    contents = pb.InferTensorContents(fp32_contents=[0.5] * elements)
    tensor = pb.ModelInferRequestInferInputTensor(
        name="x", datatype="FP32", shape=[elements // 16, 16], contents=contents
    )
    return _infer(tensor)


def _large(rows: int) -> bytes:
    shape = [rows, 16]
    tensor = pb.ModelInferRequestInferInputTensor(name="x", datatype="FP32", shape=shape)
    return _infer(tensor, bytes(64 * rows))


def _http2(block: Callable[[Encoder, int], bytes], body: bytes, count: int) -> Iterator[bytes]:
    """Yield rounds of requests with increasing stream ids."""
    encoder, stream = Encoder(), 1
    yield _PREFACE
    while True:
        parts = []
        for _ in range(count):
            head = block(encoder, stream)
            parts += [frame_header(len(head), HEADERS, END_HEADERS, stream), head]
            for start in range(0, len(body), _FRAME_BYTES):
                part = body[start : start + _FRAME_BYTES]
                flags = END_STREAM if start + len(part) == len(body) else 0
                parts += [frame_header(len(part), DATA, flags, stream), part]
            stream += 2
        yield b"".join(parts)


def _gzipped(body: bytes) -> bytes:
    """Compress a message and set its compressed flag."""
    data = gzip.compress(body[5:], 1)
    return b"\1" + len(data).to_bytes(4, "big") + data


def _compressed(encoder: Encoder, stream: int) -> bytes:
    return encoder.encode([*_fields(), ("grpc-encoding", "gzip")], huffman=False)


def _flood(frames: Callable[[Encoder, int], bytes], count: int) -> Iterator[bytes]:
    """Yield rounds of frames on new streams, as long as the server accepts them."""
    encoder, stream = Encoder(), 1
    yield _PREFACE
    while True:
        yield b"".join(frames(encoder, stream + 2 * number) for number in range(count))
        stream += 2 * count


def _cancelled(encoder: Encoder, stream: int) -> bytes:
    head = _equal(encoder, stream)
    opened = frame_header(len(head), HEADERS, END_HEADERS, stream) + head
    return opened + rst_stream(stream, ErrorCode.CANCEL)


@cache
def _long_block() -> bytes:
    """Return a header block of some 48 KB that adds nothing to the dynamic table."""
    never = NeverIndexedHeaderTuple("x-request-id", "01234567" * 7000)
    return Encoder().encode([*_fields(), never], huffman=True)


def _pieces(encoder: Encoder, stream: int) -> bytes:
    """Return a long header block in frames of 1 KB."""
    head = _long_block()
    starts = range(0, len(head), 1024)
    return b"".join(
        frame_header(len(piece), CONTINUATION if start else HEADERS, flags, stream) + piece
        for start in starts
        for piece in (head[start : start + 1024],)
        for flags in (END_HEADERS if start == starts[-1] else 0,)
    )


def _equal(encoder: Encoder, stream: int) -> bytes:
    return encoder.encode(_fields(), huffman=False)


def _huffman(encoder: Encoder, stream: int) -> bytes:
    """Return varying headers, Huffman-coded and close to the size limit."""
    value = f"{stream:08d}" * 1600
    return encoder.encode([*_fields(), ("x-request-id", value)], huffman=True)


def _rest(body: bytes, count: int, *headers: str) -> Iterator[bytes]:
    lines = [
        "POST /v2/models/m/infer HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    one = "\r\n".join([*lines, "", ""]).encode() + body
    yield one  # first alone, so that the server then knows its header block
    while True:
        yield one * count


def _json(rows: int) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 16], "data": [0.125] * 16 * rows}
    return json.dumps({"inputs": [tensor]}).encode()


_RAW = "Inference-Header-Content-Length: 0"
SCENARIOS: Mapping[str, Callable[[], Iterator[bytes]]] = MappingProxyType(
    {
        "gRPC, small requests": lambda: _http2(_equal, _small(), _ROUND),
        "gRPC, 12 KB of Huffman headers": lambda: _http2(_huffman, _small(), 8),
        "gRPC, typed contents of 256 KiB": lambda: _http2(_equal, _typed(1 << 16), 4),
        "gRPC, messages of 4 MiB": lambda: _http2(_equal, _large(1 << 16), 1),
        "gRPC, messages of 60 MiB": lambda: _http2(_equal, _large(60 << 14), 1),
        "gRPC, gzip of 4 MiB": lambda: _http2(_compressed, _gzipped(_large(1 << 16)), 1),
        "gRPC, a flood of RST_STREAM": lambda: _flood(_cancelled, 2_000),
        "gRPC, a flood of CONTINUATION": lambda: _flood(_pieces, 64),
        "REST, small requests": lambda: _rest(_json(1), _ROUND),
        "REST, JSON of 60 KB": lambda: _rest(_json(530), 8),
        "REST, JSON of 600 KB": lambda: _rest(_json(5300), 2),
        "REST, JSON of 10 MB": lambda: _rest(_json(90_000), 1),
        "REST, binary of 4 MiB": lambda: _rest(bytes(4 << 20), 1, _RAW),
    }
)
"""Name -> function that yields a client's endless data."""


def ask(name: str, address: tuple[str, int], seconds: float) -> None:
    """Send a scenario for some seconds, and discard the answers."""
    until = time.monotonic() + seconds
    with suppress(ConnectionError), socket.create_connection(address) as client:
        client.setblocking(False)
        for data in SCENARIOS[name]():
            view = memoryview(data)
            while view or not _is_quiet(client):
                if time.monotonic() > until:
                    return
                with suppress(BlockingIOError):
                    view = view[client.send(view) :]
                with suppress(BlockingIOError):
                    client.recv(1 << 20)


def _is_quiet(client: socket.socket) -> bool:
    """Discard pending data; tell whether nothing arrived for a moment."""
    client.settimeout(0.002)
    try:
        while True:
            if not client.recv(1 << 20):
                raise ConnectionError
    except TimeoutError:
        return True
    finally:
        client.setblocking(False)


# --- Server ------------------------------------------------------------------------------------


@contextmanager
def timed(
    turns: list[float], long: Counter[str] | None = None, long_ms: float = CONNECTION_TURN_MS
) -> Iterator[None]:
    """Record the CPU time of each callback of the event loop, in milliseconds.

    `long` counts the callbacks that take more than `long_ms`, by name.
    """
    run = asyncio.Handle._run

    def timed_run(handle: asyncio.Handle) -> None:
        callback = handle._callback  # type: ignore[attr-defined]
        begun = time.thread_time_ns()
        run(handle)
        turns.append((time.thread_time_ns() - begun) / 1e6)
        if long is not None and turns[-1] > long_ms:
            long[_name_of(callback)] += 1

    asyncio.Handle._run = timed_run  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


def _name_of(callback: Callable[..., object]) -> str:
    """Return the name of a callback; for a step of a task, that of its coroutine."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return str(owner.get_coro().__qualname__)  # type: ignore[union-attr]
    return str(getattr(callback, "__qualname__", callback))


def write_model(root: Path) -> None:
    """Write an identity model, which computes nothing."""
    tensor = {"data_type": "TYPE_FP32", "dims": [16]}
    config = {
        "backend": "identity",
        "max_batch_size": 65536,
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
    }
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "config.json").write_text(json.dumps(config))


async def measure(names: list[str], seconds: float, connections: int) -> bool:
    """Print a line for each scenario; tell whether all turns were within the limit."""
    turns: list[float] = []
    long: Counter[str] = Counter()
    fine = True
    with tempfile.TemporaryDirectory() as folder, timed(turns, long):
        write_model(Path(folder) / "models")
        chosen: dict[str, Any] = {
            "grpc_endpoint": "port:0",
            "http_endpoint": "port:0",
            "device": "cpu",
            "load_model": ("m",),
            "model_control_mode": "explicit",
        }
        settings = Settings.read({}, repository=Path(folder) / "models", **chosen)
        application = Application(settings)
        async with application.running() as addresses:
            await application.load()
            for name in names:
                place = addresses.grpc if name.startswith("gRPC") else addresses.http
                assert place is not None
                host, _, port = place.rpartition(":")
                turns.clear()
                long.clear()
                clients = [
                    multiprocessing.get_context("spawn").Process(
                        target=ask, args=(name, (host, int(port)), seconds)
                    )
                    for _ in range(connections)
                ]
                for client in clients:
                    client.start()
                for client in clients:
                    await asyncio.to_thread(client.join)
                longest, rare = max(turns), float(np.quantile(turns, 0.999))
                over = sum(turn > CONNECTION_TURN_MS for turn in turns)
                fine = fine and not over
                print(
                    f"{name:34} {len(turns):7} turns, longest {longest:6.2f} ms, 99.9 % below "
                    f"{rare:5.2f} ms, {over} above {CONNECTION_TURN_MS:g} ms",
                    flush=True,
                )
                for callback, count in long.most_common():
                    print(f"    {count:5} {callback}", flush=True)
    return fine


def main() -> int:
    """Parse the arguments, and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--scenario", action="append", choices=tuple(SCENARIOS))
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--connections", type=int, default=4)
    arguments = parser.parse_args()
    measured = measure(
        arguments.scenario or list(SCENARIOS), arguments.seconds, arguments.connections
    )
    return 0 if asyncio.run(measured) else 1


if __name__ == "__main__":
    sys.exit(main())
