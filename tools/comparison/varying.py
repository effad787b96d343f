"""A client that varies its headers as real clients do, to measure what that costs a server.

h2load sends the same headers in every request. Here every request has its own deadline, trace id,
request id and token, or, for comparison, always the same ones. All requests are encoded before the
first is sent. The measure is the server's CPU time, not the client's.
"""

import json
import re
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

from hpack import Encoder, HeaderTuple, NeverIndexedHeaderTuple

from comparison import processes
from comparison.kit import Repetition
from comparison.rows import CPU

_SILENCE_SECONDS = 60.0
"""Timeout for an answer."""
_TOLERANCE = 0.01
"""Tolerance for the size of answers during a measurement, as a fraction."""
_RECEIVE_BYTES = 1 << 18

Fields: TypeAlias = list[tuple[str, str]]


def varying_fields(number: int, protocol: str) -> Fields:
    """Return the headers that differ per request."""
    spread = number * 0x9E3779B97F4A7C15F39CC0605CEDC835 + 1
    trace, span = spread % 2**128, spread % 2**64
    fields = [
        ("traceparent", f"00-{trace:032x}-{span:016x}-01"),
        (
            "x-request-id",
            f"{span >> 32:08x}-{span >> 16 & 0xFFFF:04x}-4abc-89ab-{trace >> 80:012x}",
        ),
        ("authorization", f"Bearer {trace ^ span:032x}{trace:032x}"),
    ]
    return [("grpc-timeout", f"{9999999 - number}u"), *fields] if protocol == "grpc" else fields


# --- Requests ----------------------------------------------------------------------------------


def grpc_constants(port: int) -> Fields:
    """Return the headers that all requests have in common."""
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/inference.GRPCInferenceService/ModelInfer"),
        (":authority", f"127.0.0.1:{port}"),
        ("content-type", "application/grpc"),
        ("user-agent", "grpc-go/1.70.0"),
        ("te", "trailers"),
    ]


def _literal(encoder: Encoder, text: str, *, coded: bool) -> bytes:
    octets = encoder.huffman_coder.encode(text.encode()) if coded else text.encode()
    assert len(octets) < 0x7F
    return bytes((len(octets) | coded << 7,)) + octets


def _indexed(encoder: Encoder, constant: Fields, own: Fields, *, coded: bool) -> bytes:
    block: bytes = encoder.encode([HeaderTuple(*one) for one in constant + own], huffman=coded)
    return block


def _never(encoder: Encoder, constant: Fields, own: Fields, *, coded: bool) -> bytes:
    fields = [HeaderTuple(*one) for one in constant]
    fields += [NeverIndexedHeaderTuple(*one) for one in own]
    block: bytes = encoder.encode(fields, huffman=coded)
    return block


def _without(encoder: Encoder, constant: Fields, own: Fields, *, coded: bool) -> bytes:
    block: bytes = encoder.encode(constant, huffman=coded)
    for name, value in own:
        block += (
            b"\0" + _literal(encoder, name, coded=coded) + _literal(encoder, value, coded=coded)
        )
    return block


@dataclass(frozen=True, slots=True)
class Form:
    """How a client encodes varying headers (RFC 7541, 6.2)."""

    write: Callable[..., bytes]
    coded: bool
    """Whether strings are Huffman-coded."""


FORMS = {
    "indexed-huffman": Form(_indexed, coded=True),
    "indexed": Form(_indexed, coded=False),
    "literal-huffman": Form(_without, coded=True),
    "literal": Form(_without, coded=False),
    "never-huffman": Form(_never, coded=True),
    "never": Form(_never, coded=False),
}
"""grpc-go, nghttp2 and Envoy use the first, grpc-java the second, grpc-core the fourth."""


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_FRAME_BYTES = 9
GREETING = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + _frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31 - 1))
    + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1 - 65535))
)
"""The beginning of an HTTP/2 connection, with windows so large that answers never wait for them."""


def grpc_requests(own: Iterable[Fields], form: Form, message: bytes, port: int) -> list[bytes]:
    """Encode the requests of a connection; `message` includes the gRPC prefix."""
    encoder, constant, requests = Encoder(), grpc_constants(port), []
    for number, fields in enumerate(own):
        block = form.write(encoder, constant, fields, coded=form.coded)
        stream = 2 * number + 1
        requests.append(
            _frame(_HEADERS, _END_HEADERS, stream, block)
            + _frame(_DATA, _END_STREAM, stream, message)
        )
    return requests


def rest_requests(
    own: Iterable[Fields], path: str, headers: Fields, body: bytes, port: int
) -> list[bytes]:
    """Encode the requests of a connection."""
    constant = [("Host", f"127.0.0.1:{port}"), ("User-Agent", "python-httpx/0.28"), *headers]
    constant += [("Content-Length", str(len(body)))]
    requests = []
    for fields in own:
        lines = [f"{name}: {value}" for name, value in constant + fields]
        head = "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""])
        requests.append(head.encode() + body)
    return requests


# --- Connections -------------------------------------------------------------------------------


class Speaker(Protocol):
    """Reads the answers of one connection."""

    data_bytes: int
    """Figures of the answers so far."""

    def answered(self, data: bytes) -> int:
        """Return the number of answers that ended in `data`. Raises ValueError for a failed one."""
        ...

    def reply(self) -> bytes:
        """Return the bytes to send in addition to requests."""
        ...


class Http2Speaker:
    """Counts ended streams."""

    def __init__(self) -> None:
        self.data_bytes = 0
        self.ended: list[int] = []
        """Streams that ended since the caller last cleared the list."""
        self._rest = b""
        self._said = b""

    def answered(self, data: bytes) -> int:
        """Return how many streams ended in `data`."""
        data = self._rest + data
        position, ended = 0, 0
        while len(data) - position >= _FRAME_BYTES:
            length = int.from_bytes(data[position : position + 3], "big")
            kind, flags = data[position + 3], data[position + 4]
            start = position + _FRAME_BYTES
            if len(data) - start < length:
                break
            if kind == _DATA:
                self.data_bytes += length
            if kind <= _HEADERS:
                if flags & _END_STREAM:
                    ended += 1
                    self.ended.append(int.from_bytes(data[position + 5 : start], "big"))
            else:
                self._control(kind, flags, data[start : start + length])
            position = start + length
        self._rest = data[position:]
        return ended

    def _control(self, kind: int, flags: int, payload: bytes) -> None:
        if kind in {_SETTINGS, _PING} and not flags & _ACK:
            self._said += _frame(kind, _ACK, 0, payload if kind == _PING else b"")
        elif kind not in {_SETTINGS, _PING, _WINDOW_UPDATE}:
            raise ValueError(f"a frame of type {kind}: {payload!r}")

    def reply(self) -> bytes:
        """Return pending acknowledgements."""
        said, self._said = self._said, b""
        return said


class Http1Speaker:
    """Counts answers; only one is pending at a time."""

    _LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)

    def __init__(self) -> None:
        self.data_bytes = 0
        self._came = b""

    def answered(self, data: bytes) -> int:
        """Return 1 if the answer is complete, else 0."""
        self._came += data
        head, end, body = self._came.partition(b"\r\n\r\n")
        if not end:
            return 0
        length = self._LENGTH.search(head)
        if not head.startswith(b"HTTP/1.1 200 ") or length is None:
            raise ValueError(f"answered {self._came[:300]!r}")
        if len(body) < int(length[1]):
            return 0
        self.data_bytes += len(body)
        self._came = b""
        return 1

    def reply(self) -> bytes:
        """Return nothing."""
        return b""


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of all connections, and how they are sent."""

    port: int
    requests: Sequence[bytes]
    speaker: Callable[[], Speaker]
    greeting: bytes
    connections: int
    in_flight: int
    """Unanswered requests per connection."""
    staggered: bool = False
    """Whether connections start at different requests, as a server may share what it learned."""


class _Connection:
    def __init__(self, load: Load, number: int) -> None:
        self._load = load
        first = number * len(load.requests) // load.connections if load.staggered else 0
        self._requests = [*load.requests[first:], *load.requests[:first]]
        self.number = number
        self.speaker = load.speaker()
        self.sent = 0
        self.socket = socket.create_connection(("127.0.0.1", load.port), timeout=_SILENCE_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send(load.greeting, load.in_flight)

    def _send(self, before: bytes, count: int) -> None:
        first, self.sent = self.sent, self.sent + count
        data = before + b"".join(self._requests[first : self.sent])
        if data:
            self.socket.sendall(data)

    def receive(self) -> int:
        """Read from the socket, and send a new request for each answer."""
        data = self.socket.recv(_RECEIVE_BYTES)
        if not data:
            raise ValueError("the connection was closed")
        answered = self.speaker.answered(data)
        self._send(self.speaker.reply(), answered)
        return answered

    @property
    def is_used_up(self) -> bool:
        """Tell whether all requests were sent and answered."""
        return self.sent >= len(self._load.requests) + self._load.in_flight


def drive(load: Load, pid: int, seconds: float, warm_seconds: float = 0.5) -> Repetition:
    """Send requests for some seconds; return the rate, and the CPU time per request."""
    try:
        with _Run(load) as run:
            run.send_for(warm_seconds)
            usual = run.bytes_of_an_answer
            busy, server = processes.busy_seconds(), processes.cpu_seconds(pid)
            client, started = time.process_time(), time.monotonic()
            count = run.send_for(seconds)
            wall, client = time.monotonic() - started, time.process_time() - client
            server = processes.cpu_seconds(pid) - server
            busy = processes.busy_seconds() - busy
    except (OSError, ValueError) as error:
        return {"error": str(error)[:300]}
    # A gRPC error is a status without data: it must not count as an answer.
    if not usual or abs(run.bytes_of_an_answer / usual - 1) > _TOLERANCE:
        return {"error": f"answers of {run.bytes_of_an_answer:g} bytes, at first of {usual:g}"}
    return {
        "rps": round(count / wall, 1),
        CPU: round(server / max(count, 1) * 1e6, 2),
        "server_cpu": round(server / wall, 2),
        "client_cpu": round(client / wall, 2),
        "other_cpu": round((busy - server - client) / wall, 2),
    }


class _Run:
    """The connections of a measurement; a context manager that closes them."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._selector = selectors.DefaultSelector()
        self._answers = 0
        self._bytes = 0

    def __enter__(self) -> Self:
        for number in range(self._load.connections):
            self._connect(number)
        return self

    def __exit__(self, *_: object) -> None:
        for key in tuple(self._selector.get_map().values()):
            key.data.socket.close()
        self._selector.close()

    @property
    def bytes_of_an_answer(self) -> float:
        """Return the mean amount of data per answer so far."""
        return self._bytes / self._answers if self._answers else 0

    def _connect(self, number: int) -> None:
        connection = _Connection(self._load, number)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def send_for(self, seconds: float) -> int:
        """Send requests for some seconds, and return the number of answers."""
        end, count = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            ready = self._selector.select(_SILENCE_SECONDS)
            if not ready:
                raise ValueError("no answer in time")
            for key, _ in ready:
                connection: _Connection = key.data
                before = connection.speaker.data_bytes
                count += connection.receive()
                self._bytes += connection.speaker.data_bytes - before
                if connection.is_used_up:
                    self._selector.unregister(connection.socket)
                    connection.socket.close()
                    self._connect(connection.number)
        self._answers += count
        return count


# --- The model `identity` ------------------------------------------------------------------------


def identity_load(
    protocol: str,
    port: int,
    load: str,
    form: str = "indexed-huffman",
    *,
    vary: bool,
    count: int = 6000,
) -> Load:
    """Return requests to the model `identity`, FP32[-1,16], with varying or equal headers.

    `count` requests are encoded; after the last one, a new connection starts again with the first.
    """
    connections, in_flight = map(int, load.split("x"))

    def fields(number: int) -> Fields:
        return varying_fields(number if vary else 0, protocol)

    if protocol == "grpc":
        message = _identity_message()
        own = map(fields, range(count))
        requests = grpc_requests(own, FORMS[form], message, port)
        return Load(port, requests, Http2Speaker, GREETING, connections, in_flight)
    tensor = {"name": "x", "shape": [1, 16], "datatype": "FP32", "data": _VALUES}
    body = json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()
    headers = [("Content-Type", "application/json"), ("Accept", "*/*")]
    requests = rest_requests(
        map(fields, range(count)), "/v2/models/identity/infer", headers, body, port
    )
    return Load(port, requests, Http1Speaker, b"", connections * in_flight, 1, staggered=True)


_VALUES = [round(0.0625 * number + 0.001, 6) for number in range(16)]


def _identity_message() -> bytes:
    """Encode a ModelInferRequest with raw contents, including the gRPC prefix."""
    tensor = b"".join((_of(1, b"x"), _of(2, b"FP32"), _of(3, b"\x01\x10")))
    message = _of(1, b"identity") + _of(5, tensor) + _of(7, struct.pack("<16f", *_VALUES))
    return struct.pack(">BI", 0, len(message)) + message


def _of(number: int, octets: bytes) -> bytes:
    assert len(octets) < 0x80
    return bytes((number << 3 | 2, len(octets))) + octets
