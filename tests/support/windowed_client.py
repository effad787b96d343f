"""An in-memory client that obeys flow control, and checks that the server does."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from support.frames import (
    PREFACE,
    Frame,
    Kind,
    Setting,
    data,
    headers,
    padded,
    settings,
    window_update,
)
from support.memory_client import REQUEST, MemoryClient, Streaming, Unary
from xlaserve.grpc.http2.frames import DEFAULT_WINDOW

Sizes = Callable[[Random], int]
"""Returns the size of the next frame."""


class Upload:
    """The data to send on a stream."""

    def __init__(self, octets: bytes) -> None:
        self.octets = octets
        self.sent = 0
        self.ended = False


class WindowedClient(MemoryClient):
    """Sends within the windows in frames of random size, and grants windows in small steps.

    Fails if the server grants too little to ever continue, or sends more than it was granted
    (RFC 9113 6.9.1).
    """

    def __init__(
        self,
        random: Random,
        route: Streaming | Unary,
        *,
        window: int = DEFAULT_WINDOW,
        connection: int = 0,
        **limits: Any,
    ) -> None:
        """`window` is each stream's initial window, `connection` adds to the shared one."""
        super().__init__(route, greets=False, **limits)
        self._random = random
        self.window = DEFAULT_WINDOW
        """What the client may send on the connection."""
        self.windows: dict[int, int] = {}
        """What the client may send on each stream."""
        self.granted = DEFAULT_WINDOW
        """What the server may send on the connection."""
        self.grants: dict[int, int] = {}
        """What the server may send on each stream."""
        self.bodies: dict[int, bytearray] = {}
        self.ends: set[int] = set()
        self.uploads: dict[int, Upload] = {}
        self.charged = 0
        """Bytes of DATA sent, including padding."""
        self._step = window
        more = [window_update(0, connection)] if connection else []
        self.granted += connection
        self.exchange(PREFACE, settings((Setting.INITIAL_WINDOW_SIZE, window)), *more)

    def exchange(self, *parts: bytes | Frame) -> None:
        """Send bytes in reads of random size and process the server's frames."""
        octets = b"".join(map(bytes, parts))
        frames = self.send_at_random(octets, self._random) if octets else self.taken()
        for frame in frames:
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        size = len(frame.payload)
        if frame.kind == Kind.WINDOW_UPDATE:
            increment = int.from_bytes(frame.payload, "big")
            assert increment > 0
            if frame.stream:
                self.windows[frame.stream] += increment
                assert self.windows[frame.stream] < 2**31
            else:
                self.window += increment
                assert self.window <= self.limits.connection_window_bytes
        elif frame.kind == Kind.DATA:
            self.granted -= size
            self.grants[frame.stream] -= size
            assert self.granted >= 0
            assert self.grants[frame.stream] >= 0 or not size
            assert size <= DEFAULT_WINDOW
            self.bodies[frame.stream] += frame.payload
        if frame.ends_stream:
            self.ends.add(frame.stream)

    def open(self, stream: int, octets: bytes) -> None:
        """Open a stream with this much data to send."""
        self.windows[stream] = self.limits.stream_window_bytes
        self.grants[stream] = self._step
        self.bodies[stream] = bytearray()
        self.uploads[stream] = Upload(octets)
        self.exchange(headers(stream, REQUEST))

    def upload(self, sizes: Sizes, padding: int = 0) -> None:
        """Send all uploads, interleaved; fail if the server never reopens the windows."""
        while waiting := {s: u for s, u in self.uploads.items() if not u.ended}:
            parts: list[Frame] = []
            for stream, upload in waiting.items():
                parts += self._frames(stream, upload, sizes, padding)
            before = self.window, dict(self.windows)
            self.exchange(*parts)
            assert parts or before != (self.window, self.windows), "it is stalled"

    def _frames(self, stream: int, upload: Upload, sizes: Sizes, padding: int) -> Iterator[Frame]:
        for _ in range(self._random.randint(1, 4)):
            rest = len(upload.octets) - upload.sent
            most = min(self.window, self.windows[stream]) - (padding + 1 if padding else 0)
            if most <= 0:
                return
            size = min(rest, most, sizes(self._random))
            part = upload.octets[upload.sent : upload.sent + size]
            upload.sent += size
            upload.ended = upload.sent == len(upload.octets) and (
                self._random.random() < 0.5 or not size
            )
            frame = data(stream, part, end_stream=upload.ended)
            frame = padded(frame, padding) if padding else frame
            count = len(frame.payload)
            self.window -= count
            self.windows[stream] -= count
            self.charged += count
            yield frame
            if upload.ended:
                return

    def download(self, step: int) -> None:
        """Receive all answers, granting `step` bytes at a time; fail if nothing arrives."""
        self.exchange()
        while self.core.streams:
            open_ = sorted(self.core.streams)
            before = sum(map(len, self.bodies.values())), len(self.ends)
            parts = []
            for stream in open_:
                missing = step - self.grants[stream]
                if missing > 0:
                    parts.append(window_update(stream, missing))
                    self.grants[stream] += missing
            missing = step * len(open_) - self.granted
            if missing > 0:
                parts.append(window_update(0, missing))
                self.granted += missing
            self._random.shuffle(parts)
            self.exchange(*parts)
            assert before != (sum(map(len, self.bodies.values())), len(self.ends)), "it is stalled"
