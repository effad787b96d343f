"""Count the Python calls of a warm request, which do not depend on the machine.

    python tools/benchmarks/calls.py                     a table of all kinds
    python tools/benchmarks/calls.py --list grpc-fast    the own calls of one request, in order
    python tools/benchmarks/calls.py --write             the table into docs/measurements/calls.md
    python tools/benchmarks/calls.py --system-calls      of 4 connections x 16 requests, by strace
    python tools/benchmarks/calls.py --json              for the check in tests/tools/test_calls.py

A server runs in a thread of this process, and a client on plain sockets sends one request after the
other. A profiler records each function that the server's threads enter: own calls are those of this
package, library calls all others, in Python or C. For each function the minimum over all requests
counts, which excludes timers and sweeps: on a busy machine the counts are the same.

Allocations are the calls of Python's allocators (all three domains), counted by a few lines of C
that `cc` compiles; without a compiler the column is empty.
"""

import argparse
import asyncio
import ctypes
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import uvloop
from hpack import Encoder

import xlaserve
from xlaserve import Exportable
from xlaserve.app.server import Application
from xlaserve.grpc.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER_BYTES,
    HEADERS,
    PREFACE,
    Setting,
    frame_header,
    settings,
    window_update,
)
from xlaserve.settings import Settings
from xlaserve_proto import inference as pb

OWN = str(Path(xlaserve.__file__).parent)
PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "measurements" / "calls.md"
WARM, COUNTED = 60, 40
"""Number of requests before counting starts, and of counted ones."""
CONNECTIONS, IN_FLIGHT, ROUNDS = 4, 16, 100
FRAME_BYTES = 1 << 14
SERVICE = "/inference.GRPCInferenceService/"
SHAPE = (1, 16)
TENSOR_BYTES = 64
REGION = f"/xlaserve_calls_{os.getpid()}"
_SECONDS = 60
"""Timeout for an answer."""

IDENTITY = {
    "backend": "identity",
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [16]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [16]}],
}
CODE = """\
from xlaserve import PythonModel

class Model(PythonModel):
    def infer(self, inputs):
        return {"y": inputs["x"]}
"""


def same(params: None, x: Any) -> Any:
    """Return the input."""
    return x


def write_models(root: Path) -> None:
    """Write an identity model, and the same as an XLA program and as Python code."""
    # A batch size of one, so that it is executed on the event loop, whatever the warm-up measured.
    compiled = Exportable(same, None, {"x": ("FP32", [-1, SHAPE[1]])}, ["y"], 1)
    compiled.write(root / "compiled" / "1")
    wide = json.loads(json.dumps(IDENTITY).replace("[16]", "[-1]"))
    configs = {"identity": IDENTITY, "wide": wide, "code": IDENTITY | {"backend": "python"}}
    for name, config in configs.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.json").write_text(json.dumps(config))
    (root / "code" / "1" / "model.py").write_text(CODE)


# --- Server in a thread ------------------------------------------------------------------------


@dataclass
class Server:
    """A server whose threads are profiled."""

    grpc: int
    http: int
    loop: asyncio.AbstractEventLoop

    def settle(self) -> None:
        """Return once the event loop has run all pending callbacks."""
        for _ in range(3):
            passed = threading.Event()
            self.loop.call_soon_threadsafe(passed.set)
            assert passed.wait(_SECONDS)


@contextmanager
def serving(root: Path, hook: Callable[..., None] | None = None) -> Iterator[Server]:
    """Run a server in a thread, with a profiler in each of its threads."""
    started: list[Server] = []
    ready = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        application = Application(
            Settings.read(
                {},
                repository=root,
                grpc_endpoint="port:0",
                http_endpoint="port:0",
                device="cpu",
                allow_python_models=True,
                compilation_cache_directory="none",
                compile_processes=0,
                inline_execution_seconds=60.0,
                busy_poll_seconds=0.0,
            )
        )
        async with application.running() as addresses:
            await application.load()
            assert addresses.http is not None
            grpc, http = (int(one.rpartition(":")[2]) for one in (addresses.grpc, addresses.http))
            started.append(Server(grpc, http, asyncio.get_running_loop()))
            ready.set()
            await stop.wait()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="server")
    threading.setprofile(hook)
    try:
        thread.start()
        ready.wait()
        if not started:
            raise SystemExit("the server has not started")
        yield started[0]
    finally:
        threading.setprofile(None)
        if started:
            started[0].loop.call_soon_threadsafe(stop.set)
        thread.join()


class Profiler:
    """Counts the functions that threads enter, while enabled."""

    def __init__(self) -> None:
        self.is_on = False
        self.own: Counter[CodeType] = Counter()
        self.library: Counter[object] = Counter()
        self.order: list[tuple[int, CodeType]] = []
        """Own calls in order, each with its depth in own calls."""

    def hook(self, frame: FrameType, event: str, argument: object) -> None:
        """Handle an event of `sys.setprofile`."""
        if not self.is_on:
            return
        if event == "c_call":
            # Key by name: every bound C method is a new object.
            self.library[getattr(argument, "__qualname__", "")] += 1
        elif event == "call":
            code = frame.f_code
            if not code.co_filename.startswith(OWN):
                self.library[code] += 1
                return
            self.own[code] += 1
            self.order.append((_depth(frame), code))

    def begin(self) -> None:
        """Reset the counts and enable the profiler."""
        self.own.clear()
        self.library.clear()
        self.order.clear()
        self.is_on = True


def _depth(frame: FrameType | None) -> int:
    depth = -1
    while frame is not None:
        depth += frame.f_code.co_filename.startswith(OWN)
        frame = frame.f_back
    return depth


def of_each(counts: Sequence[Counter[Any]]) -> int:
    """Return the calls of one request: for each function the minimum over all requests."""
    functions = set[Any]().union(*counts)
    return sum(min(one[function] for one in counts) for function in functions)


# --- Clients on plain sockets ------------------------------------------------------------------


class Http2:
    """One connection that sends requests with equal headers."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._encoder = Encoder()
        self._stream = -1
        self._buffer = b""
        self._socket.sendall(
            PREFACE + settings({Setting.INITIAL_WINDOW_SIZE: 1 << 24}) + window_update(0, 1 << 30)
        )

    def headers(self, method: str) -> tuple[int, bytes]:
        """Open a stream; return its id and the frame."""
        fields = [(":method", "POST"), (":scheme", "http"), (":path", SERVICE + method)]
        fields += [(":authority", "localhost"), ("te", "trailers")]
        fields += [("content-type", "application/grpc"), ("user-agent", "calls")]
        block = self._encoder.encode(fields, huffman=False)
        self._stream += 2
        return self._stream, frame_header(len(block), HEADERS, END_HEADERS, self._stream) + block

    def data(self, stream: int, data: bytes, *, end: bool = True) -> bytes:
        """Return a DATA frame."""
        return frame_header(len(data), DATA, END_STREAM if end else 0, stream) + data

    def send(self, data: bytes) -> None:
        """Send frames."""
        self._socket.sendall(data)

    def read(self, kind: int, flag: int, count: int = 1) -> list[bytes]:
        """Read until `count` frames of a kind with a flag have arrived; return all payloads."""
        payloads = []
        while count:
            header = self._take(HEADER_BYTES)
            length = int.from_bytes(header[:3], "big")
            payload = self._take(length)
            if header[3] == DATA:
                payloads.append(payload)
            if header[3] == HEADERS and header[4] & END_STREAM:
                assert b"grpc-status\x010" in payload, payload
            assert header[3] not in {3, 7}, payload
            count -= header[3] == kind and (header[4] & flag) == flag
        return payloads

    def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            came = self._socket.recv(1 << 18)
            assert came, "the server has closed the connection"
            self._buffer += came
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def unary(self, method: str, message: bytes, count: int = 1) -> list[bytes]:
        """Send requests in a single write, and return the payloads of their answers."""
        parts: list[bytes] = []
        for _ in range(count):
            stream, frame = self.headers(method)
            parts += (frame, self.data(stream, prefixed(message)))
        self.send(b"".join(parts))
        return self.read(HEADERS, END_STREAM, count)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def prefixed(message: bytes) -> bytes:
    """Add the gRPC prefix to a message."""
    return struct.pack(">BL", 0, len(message)) + message


def infer_message(model: str, elements: int = SHAPE[1]) -> bytes:
    """Return a ModelInferRequest with raw contents."""
    tensor = pb.ModelInferRequestInferInputTensor(name="x", datatype="FP32", shape=[1, elements])
    raw = [struct.pack(f"{elements}f", *[0.5] * elements)]
    return bytes(pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=raw))


class Client:
    """Sends one request and reads its answer."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def ask(self) -> None:
        """Send the request and read its answer."""

    def close(self) -> None:
        """Release its resources."""


class Unary(Client):
    """Calls a unary gRPC method."""

    method = "ModelInfer"

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.connection = Http2(server.grpc)
        self.message = self.make_message()

    def make_message(self) -> bytes:
        """Return the request message."""
        return infer_message("identity")

    def ask(self) -> None:
        self.connection.unary(self.method, self.message)

    def close(self) -> None:
        self.connection.close()


class Compiled(Unary):
    """Requests the model that XLA executes."""

    def make_message(self) -> bytes:
        return infer_message("compiled")


class Code(Unary):
    """Requests the model that is Python code."""

    def make_message(self) -> bytes:
        return infer_message("code")


class General(Unary):
    """Calls a method that has no fast path."""

    method = "ModelReady"

    def make_message(self) -> bytes:
        return bytes(pb.ModelReadyRequest(name="identity"))


class Shared(Unary):
    """Passes input and output in shared memory of the client."""

    def make_message(self) -> bytes:
        self._memory = SharedMemory(REGION.lstrip("/"), create=True, size=2 * TENSOR_BYTES)
        register = pb.SystemSharedMemoryRegisterRequest(
            name="region", key=REGION, byte_size=2 * TENSOR_BYTES
        )
        self.connection.unary("SystemSharedMemoryRegister", bytes(register))

        def placed(offset: int) -> dict[str, pb.InferParameter]:
            return {
                "shared_memory_region": pb.InferParameter(string_param="region"),
                "shared_memory_byte_size": pb.InferParameter(int64_param=TENSOR_BYTES),
                "shared_memory_offset": pb.InferParameter(int64_param=offset),
            }

        tensor = pb.ModelInferRequestInferInputTensor(
            name="x", datatype="FP32", shape=list(SHAPE), parameters=placed(0)
        )
        output = pb.ModelInferRequestInferRequestedOutputTensor(
            name="y", parameters=placed(TENSOR_BYTES)
        )
        request = pb.ModelInferRequest(model_name="identity", inputs=[tensor], outputs=[output])
        return bytes(request)

    def close(self) -> None:
        self.connection.unary("SystemSharedMemoryUnregister", b"")
        super().close()
        self._memory.close()
        self._memory.unlink()


class Stream(Client):
    """Sends messages on a single stream."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.connection = Http2(server.grpc)
        self._number, frame = self.connection.headers("ModelStreamInfer")
        self._message = prefixed(infer_message("identity"))
        self.connection.send(frame)

    def ask(self) -> None:
        self.connection.send(self.connection.data(self._number, self._message, end=False))
        self.connection.read(DATA, 0)

    def close(self) -> None:
        self.connection.close()


class Long(Client):
    """Sends two long messages, alternating between them in frames of 16 KB."""

    frames = 16

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.connection = Http2(server.grpc)
        self._message = prefixed(infer_message("wide", self.frames * FRAME_BYTES // 4))

    def ask(self) -> None:
        streams = [self.connection.headers("ModelInfer") for _ in range(2)]
        parts = [frame for _, frame in streams]
        for start in range(0, len(self._message), FRAME_BYTES):
            piece = self._message[start : start + FRAME_BYTES]
            is_last = start + FRAME_BYTES >= len(self._message)
            parts += [self.connection.data(one, piece, end=is_last) for one, _ in streams]
        self.connection.send(b"".join(parts))
        size = len(b"".join(self.connection.read(HEADERS, END_STREAM, 2)))
        self.connection.send(window_update(0, size))

    def close(self) -> None:
        self.connection.close()


class Longer(Long):
    """Sends messages of more frames than Long."""

    frames = 48


class Rest(Client):
    """Sends JSON with a Content-Length."""

    target = "/v2/models/identity/infer"
    end = b""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._socket = socket.create_connection(("127.0.0.1", server.http), timeout=_SECONDS)
        body, *fields = self.body()
        lines = [f"POST {self.target} HTTP/1.1", f"Host: 127.0.0.1:{server.http}", *fields]
        self._request = "\r\n".join([*lines, "", ""]).encode() + body

    def json(self, **more: Any) -> bytes:
        """Return the JSON of a request; `more` adds fields to the input."""
        tensor = {"name": "x", "datatype": "FP32", "shape": list(SHAPE)} | more
        return json.dumps({"inputs": [tensor]}).encode()

    def body(self) -> tuple[Any, ...]:
        """Return the body and its headers."""
        body = self.json(data=[0.5] * SHAPE[1])
        return body, "Content-Type: application/json", f"Content-Length: {len(body)}"

    def ask(self) -> None:
        self._socket.sendall(self._request)
        answer = b""
        while True:
            answer += self._socket.recv(1 << 16)
            head, found, body = answer.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            if found and length is not None and len(body) >= int(length[1]):
                break
        assert head.startswith(b"HTTP/1.1 200"), answer

    def close(self) -> None:
        self._socket.close()


class RestBinary(Rest):
    """Sends and requests binary tensors."""

    def body(self) -> tuple[Any, ...]:
        parameters = {"binary_data_size": TENSOR_BYTES}
        shape = list(SHAPE)
        tensor = {"name": "x", "datatype": "FP32", "shape": shape, "parameters": parameters}
        outputs = [{"name": "y", "parameters": {"binary_data": True}}]
        text = json.dumps({"inputs": [tensor], "outputs": outputs}).encode()
        body = text + bytes(TENSOR_BYTES)
        length = f"Inference-Header-Content-Length: {len(text)}"
        return body, length, f"Content-Length: {len(body)}"


class RestGeneral(Rest):
    """Sends JSON in a chunk, which the fast path does not accept."""

    def body(self) -> tuple[Any, ...]:
        body = self.json(data=[0.5] * SHAPE[1])
        chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        return chunk, "Content-Type: application/json", "Transfer-Encoding: chunked"


@dataclass(frozen=True)
class Kind:
    """A kind of request."""

    client: type[Client]
    text: str
    wanted: int | None
    """Limit of the server's own Python calls, on Python 3.12; None without a limit."""
    share: int = 1
    """Number of items per request."""
    without: type[Client] | None = None
    """A client that sends the same without those items; its calls are subtracted."""


KINDS: Mapping[str, Kind] = {
    "grpc-fast": Kind(Unary, "ModelInfer, fast path", 60),
    "grpc-compiled": Kind(Compiled, "the same, of a model that XLA executes at once", None),
    "grpc-stream": Kind(Stream, "ModelStreamInfer, a message and its answer", 70),
    "grpc-shared": Kind(Shared, "ModelInfer, input and output in shared memory", 80),
    "grpc-general": Kind(General, "ModelReady, general path", 150),
    "rest-json": Kind(Rest, "REST, JSON, fast path", 45),
    "rest-binary": Kind(RestBinary, "REST, binary form, fast path", None),
    "rest-general": Kind(RestGeneral, "REST, JSON in chunks, general path", 190),
    "python": Kind(Code, "ModelInfer, a Python model in its thread", 90),
    "frame": Kind(
        Longer,
        "a frame of 16 KB, of two long messages by turns",
        2,
        2 * (Longer.frames - Long.frames),
        Long,
    ),
}


# --- Counting ----------------------------------------------------------------------------------


@dataclass
class Counts:
    """Cost of one request."""

    own: float
    library: float
    allocations: float | None = None
    order: list[tuple[int, CodeType]] = field(default_factory=list)


def count(profiler: Profiler, server: Server, client_class: type[Client]) -> Counts:
    """Count the calls of one request."""
    client = client_class(server)
    try:
        for _ in range(WARM):
            client.ask()
        server.settle()
        own, library, orders = [], [], []
        for _ in range(COUNTED):
            profiler.begin()
            client.ask()
            # Wait until the server is idle, so that each request is counted by itself.
            server.settle()
            profiler.is_on = False
            own.append(profiler.own.copy())
            library.append(profiler.library.copy())
            orders.append([*profiler.order])
        return Counts(of_each(own), of_each(library), order=min(orders, key=len))
    finally:
        client.close()


def count_kinds(server: Server, profiler: Profiler, names: Sequence[str]) -> dict[str, Counts]:
    """Count the calls of each kind."""
    found = {}
    for name in names:
        kind = KINDS[name]
        counts = count(profiler, server, kind.client)
        if kind.without is not None:
            base = count(profiler, server, kind.without)
            counts.own = round((counts.own - base.own) / kind.share, 1)
            counts.library = round((counts.library - base.library) / kind.share, 1)
        found[name] = counts
    return found


_ALLOCATOR = """
#include <stddef.h>
#include <pthread.h>
typedef struct { void *ctx; void *(*m)(void *, size_t); void *(*c)(void *, size_t, size_t);
                 void *(*r)(void *, void *, size_t); void (*f)(void *, void *); } Allocator;
Allocator inner[3]; long calls; static int on; static pthread_t client;
static void note(void) {
    if (on && !pthread_equal(pthread_self(), client))
        __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
}
static void *m(void *p, size_t n) { Allocator *a = p; note(); return a->m(a->ctx, n); }
static void *c(void *p, size_t k, size_t n) { Allocator *a = p; note(); return a->c(a->ctx, k, n); }
static void *r(void *p, void *o, size_t n) { Allocator *a = p; note(); return a->r(a->ctx, o, n); }
static void f(void *p, void *o) { Allocator *a = p; a->f(a->ctx, o); }
void wrap(int i, Allocator *a) { a->ctx = &inner[i]; a->m = m; a->c = c; a->r = r; a->f = f; }
void count(int is_on) { client = pthread_self(); on = is_on; if (is_on) calls = 0; }
"""


class _Allocator(ctypes.Structure):
    _fields_ = [("pointers", ctypes.c_void_p * 5)]


def allocations(root: Path, names: Sequence[str]) -> dict[str, float]:
    """Return the allocations per request of each kind; empty without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return {}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source, made = scratch / "allocations.c", scratch / "allocations.so"
        source.write_text(_ALLOCATOR)
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(made), str(source)]
        subprocess.run(command, check=True)
        library = ctypes.PyDLL(str(made))
        server = stack.enter_context(serving(root))
        inner = (_Allocator * 3).in_dll(library, "inner")
        for domain in range(3):
            ctypes.pythonapi.PyMem_GetAllocator(domain, ctypes.byref(inner[domain]))
            wrapped = _Allocator()
            library.wrap(domain, ctypes.byref(wrapped))
            ctypes.pythonapi.PyMem_SetAllocator(domain, ctypes.byref(wrapped))
        calls = ctypes.c_long.in_dll(library, "calls")

        def measured(client_class: type[Client]) -> float:
            client = client_class(server)
            for _ in range(WARM):
                client.ask()
            found = []
            for _ in range(COUNTED):
                server.settle()
                library.count(1)
                client.ask()
                server.settle()
                library.count(0)
                found.append(calls.value)
            client.close()
            return sorted(found)[COUNTED // 2]

        result = {}
        nothing = measured(Client)
        for name in names:
            kind = KINDS[name]
            base = nothing if kind.without is None else measured(kind.without)
            result[name] = round((measured(kind.client) - base) / kind.share, 1)
        for domain in range(3):
            ctypes.pythonapi.PyMem_SetAllocator(domain, ctypes.byref(inner[domain]))
        return result


def system_calls() -> tuple[float, dict[str, float]]:
    """Return the system calls per request with 4 connections x 16 in flight, in total and by name.

    They are counted in one server process, between two connections that mark begin and end: the
    number of calls during a start varies by more than the requests cause.
    """
    with tempfile.TemporaryDirectory() as scratch:
        root, log = Path(scratch) / "models", Path(scratch) / "calls"
        write_models(root)
        process = subprocess.Popen(
            ["strace", "-f", "-o", str(log), sys.executable, __file__, "--serve", str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        port = next(int(line[5:]) for line in process.stdout if line.startswith("port "))
        connections = [Http2(port) for _ in range(CONNECTIONS)]
        message = infer_message("identity")

        def ask(rounds: int) -> None:
            for _ in range(rounds):
                for one in connections:
                    streams = [one.headers("ModelInfer") for _ in range(IN_FLIGHT)]
                    data = [frame + one.data(n, prefixed(message)) for n, frame in streams]
                    one.send(b"".join(data))
                for one in connections:
                    one.read(HEADERS, END_STREAM, IN_FLIGHT)

        def mark() -> None:
            marking = Http2(port)
            marking.unary("ModelInfer", message)
            connections.append(marking)

        ask(WARM)
        mark()
        marked = connections.pop()
        ask(ROUNDS)
        mark()
        for one in (*connections, marked):
            one.close()
        process.stdin.close()
        process.stdout.read()
        process.wait()
        calls = calls_between(log.read_text(), CONNECTIONS)
    requests = ROUNDS * CONNECTIONS * IN_FLIGHT
    each = {name: round(number / requests, 3) for name, number in calls.most_common()}
    return round(calls.total() / requests, 3), {k: v for k, v in each.items() if v > 0.002}


def calls_between(log: str, before: int) -> Counter[str]:
    """Count system calls in a strace log, from accept number `before` + 1 to the next."""
    counts: Counter[str] = Counter()
    accepted = 0
    for line in log.splitlines():
        accepted += re.search(r"\baccept4?(\(| resumed>).* = \d+$", line) is not None
        name = re.match(r"\d+ +(\w+)\(", line)
        if name is not None and accepted == before + 1:
            counts[name[1]] += 1
    return counts


def serve(root: Path) -> None:
    """Serve until stdin ends; print the gRPC port."""
    with serving(root) as server:
        print("port", server.grpc, flush=True)
        sys.stdin.read()


# --- Output ------------------------------------------------------------------------------------


def show_order(counts: Counts) -> None:
    """Print the own calls of one request, in order."""
    for number, (depth, code) in enumerate(counts.order, 1):
        file = Path(code.co_filename).relative_to(OWN)
        print(f"{number:4} {'  ' * depth}{code.co_qualname}  ({file}:{code.co_firstlineno})")


def table(found: Mapping[str, Counts]) -> str:
    """Return the table of the page."""
    lines = [
        "| a warm request | own calls | wanted | library calls | allocations |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, counts in found.items():
        kind = KINDS[name]
        wanted = "" if kind.wanted is None else str(kind.wanted)
        made = "" if counts.allocations is None else f"{counts.allocations:g}"
        lines.append(f"| {kind.text} | {counts.own:g} | {wanted} | {counts.library:g} | {made} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the arguments and count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", choices=tuple(KINDS), help="print the calls of this kind")
    parser.add_argument("--json", action="store_true", help="own calls alone, as JSON")
    parser.add_argument("--write", action="store_true", help="renew the table of the page")
    parser.add_argument("--system-calls", action="store_true", help="count these, by strace")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    if arguments.system_calls:
        print(*system_calls())
        return
    names = [arguments.list] if arguments.list else list(KINDS)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "models"
        write_models(root)
        profiler = Profiler()
        with serving(root, profiler.hook) as server:
            found = count_kinds(server, profiler, names)
        if arguments.list:
            show_order(found[arguments.list])
            return
        if arguments.json:
            print(json.dumps({name: counts.own for name, counts in found.items()}))
            return
        for name, number in allocations(root, names).items():
            found[name].allocations = number
    text = table(found)
    print(text)
    if arguments.write:
        page = PAGE.read_text()
        begin, end = "<!-- counts: written by tools/benchmarks/calls.py -->", "<!-- end -->"
        before, _, rest = page.partition(begin)
        PAGE.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    main()
