"""HTTP/2 frames: type numbers, and the encoding of those a server sends (RFC 9113, 6)."""

from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The connection preface of a client (RFC 9113 3.4)."""

HEADER = Struct(">HBBBL")
"""A frame header: the length as 16 high and 8 low bits, type, flags, stream id."""
HEADER_BYTES = 9

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

ACK = 0x1
END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

DEFAULT_WINDOW = 65_535
MAX_WINDOW = 2**31 - 1
MAX_STREAM_ID = 2**31 - 1
SMALLEST_MAX_FRAME = 16_384
LARGEST_MAX_FRAME = 2**24 - 1


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY (RFC 9113 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class Setting(IntEnum):
    """Identifiers in a SETTINGS frame (RFC 9113 6.5.2)."""

    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


SETTING = Struct(">HL")
NUMBER = Struct(">L")
_TWO_NUMBERS = Struct(">LL")


def frame_header(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Return the nine-byte header of a frame."""
    return HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def settings(values: dict[Setting, int]) -> bytes:
    """Return a SETTINGS frame."""
    payload = b"".join(SETTING.pack(*item) for item in values.items())
    return frame_header(len(payload), SETTINGS, 0, 0) + payload


SETTINGS_ACK = frame_header(0, SETTINGS, ACK, 0)


def ping(payload: bytes) -> bytes:
    """Return a PING frame. Its acknowledgement proves that the client read all earlier frames."""
    return frame_header(8, PING, 0, 0) + payload


def ping_ack(payload: bytes) -> bytes:
    """Return the acknowledgement of a PING frame."""
    return frame_header(8, PING, ACK, 0) + payload


def window_update(stream_id: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0 means the connection window."""
    return frame_header(4, WINDOW_UPDATE, 0, stream_id) + NUMBER.pack(increment)


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """Return a RST_STREAM frame."""
    return frame_header(4, RST_STREAM, 0, stream_id) + NUMBER.pack(code)


def goaway(last_stream_id: int, code: ErrorCode, reason: str = "") -> bytes:
    """Return a GOAWAY frame; `reason` is debug data for people."""
    debug = reason.encode()
    payload = _TWO_NUMBERS.pack(last_stream_id, code) + debug
    return frame_header(len(payload), GOAWAY, 0, 0) + payload
