"""The part of HTTP/2 that a client of unary calls needs: frames, their types, flags and settings.

Section numbers are those of RFC 9113.
"""

from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEAD_BYTES = 9
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME_BYTES = 1 << 14
LARGEST_WINDOW = (1 << 31) - 1
LAST_STREAM = (1 << 31) - 1

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY = 0x20

SETTING = Struct(">HI")
NUMBER = Struct(">I")


class Frame(IntEnum):
    """The types of frames that are read or written (section 6)."""

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Setting(IntEnum):
    """What the ends of a connection tell each other (section 6.5.2)."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Write a frame (section 4.1)."""
    return frame_head(kind, flags, stream, len(payload)) + payload


def frame_head(kind: int, flags: int, stream: int, size: int) -> bytes:
    """Write what stands in front of a payload of so many bytes (section 4.1)."""
    return size.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")


def settings(values: dict[Setting, int]) -> bytes:
    """Write the payload of a SETTINGS frame (section 6.5.1)."""
    return b"".join(SETTING.pack(name, value) for name, value in values.items())


def unpadded(flags: int, payload: bytes) -> bytes:
    """Return the header block fragment of a HEADERS frame (section 6.2)."""
    start = 0
    end = len(payload)
    if flags & PADDED:
        start, end = 1, end - payload[0]
    if flags & PRIORITY:
        start += 5
    return payload[start:end]
