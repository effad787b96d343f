"""HTTP/2 frames, valid or not, and a client that sends them unmodified (RFC 9113, 4, 6)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from enum import IntEnum, IntFlag
from typing import NamedTuple, TypeAlias

from hpack import Decoder

Lines: TypeAlias = Iterable[tuple[str, str]]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
LARGEST_FRAME = 16_384
"""Maximum payload size unless SETTINGS_MAX_FRAME_SIZE is larger."""

_ANSWER_SECONDS = 20


class Kind(IntEnum):
    """Frame types (RFC 9113, 6)."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flag(IntFlag):
    """Flags; ACK and END_STREAM are the same bit."""

    NONE = 0
    ACK = 0x1
    END_STREAM = 0x1
    END_HEADERS = 0x4
    PADDED = 0x8
    PRIORITY = 0x20


class Error(IntEnum):
    """Error codes (RFC 9113, 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11


class Setting(IntEnum):
    """Settings (RFC 9113, 6.5.2)."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Frame(NamedTuple):
    """One frame."""

    kind: int
    flags: int
    stream: int
    payload: bytes = b""

    def __bytes__(self) -> bytes:
        return head(len(self.payload), self.kind, self.flags, self.stream) + self.payload

    @property
    def ends_stream(self) -> bool:
        """Whether this frame is the sender's last on its stream."""
        return self.kind in (Kind.DATA, Kind.HEADERS) and bool(self.flags & Flag.END_STREAM)


def head(size: int, kind: int, flags: int, stream: int) -> bytes:
    """Encode a frame header (nine bytes)."""
    return size.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")


def parse(data: bytes) -> tuple[list[Frame], bytes]:
    """Parse complete frames; return them and the remaining bytes."""
    frames = []
    at = 0
    while len(data) - at >= HEAD_BYTES:
        end = at + HEAD_BYTES + int.from_bytes(data[at : at + 3], "big")
        if end > len(data):
            break
        stream = int.from_bytes(data[at + 5 : at + 9], "big") & 0x7FFF_FFFF
        frames.append(Frame(data[at + 3], data[at + 4], stream, data[at + HEAD_BYTES : end]))
        at = end
    return frames, data[at:]


# --- frames ------------------------------------------------------------------------------------


def settings(*values: tuple[int, int]) -> Frame:
    """Make a SETTINGS frame."""
    payload = b"".join(
        number.to_bytes(2, "big") + value.to_bytes(4, "big") for number, value in values
    )
    return Frame(Kind.SETTINGS, 0, 0, payload)


SETTINGS_ACK = Frame(Kind.SETTINGS, Flag.ACK, 0)


def headers(
    stream: int, block: bytes, *, end_stream: bool = False, end_headers: bool = True
) -> Frame:
    """Make a HEADERS frame, which opens a stream or carries trailers."""
    flags = Flag.END_STREAM * end_stream | Flag.END_HEADERS * end_headers
    return Frame(Kind.HEADERS, flags, stream, block)


def continuation(stream: int, block: bytes, *, end_headers: bool = True) -> Frame:
    """Make a CONTINUATION frame."""
    return Frame(Kind.CONTINUATION, Flag.END_HEADERS * end_headers, stream, block)


def data(stream: int, body: bytes = b"", *, end_stream: bool = False) -> Frame:
    """Make a DATA frame."""
    return Frame(Kind.DATA, Flag.END_STREAM * end_stream, stream, body)


def padded(frame: Frame, size: int) -> Frame:
    """Add padding to a DATA or HEADERS frame."""
    payload = bytes((size,)) + frame.payload + bytes(size)
    return frame._replace(flags=frame.flags | Flag.PADDED, payload=payload)


def priority(stream: int, depends_on: int = 0, weight: int = 15) -> Frame:
    """Make a PRIORITY frame (deprecated, RFC 9113, 5.3.2)."""
    return Frame(Kind.PRIORITY, 0, stream, depends_on.to_bytes(4, "big") + bytes((weight,)))


def rst_stream(stream: int, code: int = Error.CANCEL) -> Frame:
    """Make an RST_STREAM frame."""
    return Frame(Kind.RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def ping(opaque: bytes = b"xlaserve", *, ack: bool = False) -> Frame:
    """Make a PING frame."""
    return Frame(Kind.PING, Flag.ACK * ack, 0, opaque)


def goaway(last_stream: int = 0, code: int = Error.NO_ERROR) -> Frame:
    """Make a GOAWAY frame."""
    return Frame(Kind.GOAWAY, 0, 0, last_stream.to_bytes(4, "big") + code.to_bytes(4, "big"))


def window_update(stream: int, increment: int) -> Frame:
    """Make a WINDOW_UPDATE frame; stream 0 is the connection."""
    return Frame(Kind.WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


# --- header blocks -----------------------------------------------------------------------------


def literals(lines: Lines) -> bytes:
    """Encode a header block without the dynamic table, valid on any connection."""
    return b"".join(
        b"\0" + _string(name.encode("latin-1")) + _string(value.encode("latin-1"))
        for name, value in lines
    )


def _string(octets: bytes) -> bytes:
    return integer(len(octets), 7) + octets


def integer(value: int, bits: int, first: int = 0) -> bytes:
    """Encode an integer after the upper bits of its first byte (RFC 7541, 5.1)."""
    most = (1 << bits) - 1
    if value < most:
        return bytes((first | value,))
    octets = bytearray((first | most,))
    value -= most
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)


# --- Client --------------------------------------------------------------------------------------


class Peer:
    """A client connection that acknowledges SETTINGS and does nothing else by itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.frames: list[Frame] = []
        """Frames received but not yet taken."""
        self._decoder = Decoder()
        self._rest = b""

    def send(self, *parts: Frame | bytes) -> None:
        """Send frames, or bytes that only look like frames."""
        self.writer.write(b"".join(map(bytes, parts)))

    async def take(self, wanted: Callable[[Frame], bool]) -> Frame | None:
        """Return the next matching frame, or None if the connection ends without one."""
        async with asyncio.timeout(_ANSWER_SECONDS):
            while True:
                for index, frame in enumerate(self.frames):
                    if wanted(frame):
                        return self.frames.pop(index)
                if not await self._receive():
                    return None

    async def _receive(self) -> bool:
        try:
            received = await self.reader.read(1 << 18)
        except ConnectionError:
            return False
        frames, self._rest = parse(self._rest + received)
        if any(frame.kind == Kind.SETTINGS and not frame.flags for frame in frames):
            self.send(SETTINGS_ACK)
        self.frames += frames
        return bool(received)

    def lines(self, frame: Frame) -> dict[str, str]:
        """Decode the header block of a frame."""
        lines = self._decoder.decode(frame.payload, raw=True)
        return {bytes(name).decode(): bytes(value).decode() for name, value in lines}

    async def outcome(self, stream: int) -> str:
        """Return how a request ends.

        `grpc-status 5`, `HTTP 415`, `RST_STREAM REFUSED_STREAM`, `GOAWAY PROTOCOL_ERROR`,
        or `closed` if the connection closes without any of these.
        """

        def tells(frame: Frame) -> bool:
            if frame.kind == Kind.GOAWAY:
                return True
            return frame.stream == stream and frame.kind in (Kind.HEADERS, Kind.RST_STREAM)

        while frame := await self.take(tells):
            if frame.kind == Kind.GOAWAY:
                return f"GOAWAY {Error(int.from_bytes(frame.payload[4:8], 'big')).name}"
            if frame.kind == Kind.RST_STREAM:
                return f"RST_STREAM {Error(int.from_bytes(frame.payload, 'big')).name}"
            lines = self.lines(frame)
            if lines.get(":status", "200") != "200":
                return f"HTTP {lines[':status']}"
            if "grpc-status" in lines:
                return f"grpc-status {lines['grpc-status']}"
        return "closed"

    async def code_of_goaway(self) -> str:
        """Return the error code of the server's GOAWAY, or `closed` if it sends none."""
        frame = await self.take(lambda frame: frame.kind == Kind.GOAWAY)
        return Error(int.from_bytes(frame.payload[4:8], "big")).name if frame else "closed"

    async def ping(self) -> bool:
        """Send a PING; return whether it is acknowledged before the connection ends."""
        self.send(ping())
        acknowledged = ping(ack=True)
        return await self.take(lambda frame: frame == acknowledged) is not None


@asynccontextmanager
async def peer(url: str, *values: tuple[int, int], limit: int = 1 << 22) -> AsyncIterator[Peer]:
    """Connect to `host:port` or `unix:path`; send the preface with these settings."""
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        reader, writer = await asyncio.open_unix_connection(path, limit=limit)
    else:
        host, _, port = url.rpartition(":")
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=limit)
    connected = Peer(reader, writer)
    # Without a dynamic table, the server's header blocks can be decoded in any order.
    connected.send(PREFACE, settings((Setting.HEADER_TABLE_SIZE, 0), *values))
    try:
        yield connected
    finally:
        writer.close()
