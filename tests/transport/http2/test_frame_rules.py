"""Every rule on frames, by section of RFC 9113, for any division of the frames into reads."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import pytest
from support.frames import (
    PREFACE,
    SETTINGS_ACK,
    Error,
    Flag,
    Frame,
    Kind,
    Setting,
    continuation,
    data,
    goaway,
    head,
    headers,
    literals,
    padded,
    ping,
    priority,
    rst_stream,
    settings,
    window_update,
)
from support.memory_client import (
    LINES,
    MESSAGE,
    REQUEST,
    MemoryClient,
    Streaming,
    Unary,
    answer,
    request,
    told,
)

LARGEST = 20_000
"""The largest frame size in these tests, in bytes."""
STREAMS = 2

WRONG = "GOAWAY PROTOCOL_ERROR"
SIZE = "GOAWAY FRAME_SIZE_ERROR"
FLOW = "GOAWAY FLOW_CONTROL_ERROR"
CALM = "GOAWAY ENHANCE_YOUR_CALM"
COMPRESSION = "GOAWAY COMPRESSION_ERROR"
FINE = ""

Parts: TypeAlias = "tuple[Frame | bytes, ...]"


class Rule(NamedTuple):
    """The frames sent, and what the server ends because of them."""

    section: str
    name: str
    parts: Parts
    outcome: str
    """RST_STREAM or GOAWAY with its code; FINE if nothing ends."""


OPEN = headers(1, REQUEST)
ENDED = headers(1, REQUEST, end_stream=True)
HALF = headers(1, REQUEST[:10], end_headers=False)
TRAILERS = literals([("x-end", "1")])
MAX = 2**31 - 1


def sized(frame: Frame, size: int) -> Frame:
    """Set the payload length of a frame, filling up with zeros."""
    return frame._replace(payload=frame.payload[:size].ljust(size, b"\0"))


def on(stream: int, frame: Frame) -> Frame:
    return frame._replace(stream=stream)


def flagged(frame: Frame, flags: int) -> Frame:
    return frame._replace(flags=frame.flags | flags)


def _index(rest: bytes) -> bytes:
    """Write a request, then the name index 15 (`accept-charset`) encoded with these octets."""
    return REQUEST + b"\x0f" + rest + b"\1a"


def _coded(value: bytes) -> bytes:
    """Write a request, then a header with a Huffman-coded value."""
    return REQUEST + b"\0\1a" + bytes((0x80 | len(value),)) + value


NEVER = b"\x10\1a\1b"


def with_priority(depends_on: int) -> Frame:
    return headers(1, priority(1, depends_on).payload + REQUEST)._replace(
        flags=Flag.PRIORITY | Flag.END_HEADERS
    )


def asking(*lines: tuple[str, str]) -> Frame:
    """Open a stream with these fields and no others."""
    return headers(1, literals(lines))


def adding(*lines: tuple[str, str]) -> Frame:
    """Open a stream with these fields appended to those of a request."""
    return headers(1, request(*lines))


METHOD, SCHEME, PATH = LINES
LONG = literals([("x", "y" * 1000)])
PUSH = Frame(Kind.PUSH_PROMISE, Flag.END_HEADERS, 1, b"\0\0\0\2")
UNKNOWN = Frame(0x2A, 0xFF, 1, b"grease")
MALFORMED = "RST_STREAM 1 PROTOCOL_ERROR"
CLOSED = "RST_STREAM 1 STREAM_CLOSED"

RULES = [
    # --- 3.4 Connection Preface ---
    Rule("3.4", "settings come first", (PREFACE, ping()), WRONG),
    Rule("3.4", "an acknowledgement is not what comes first", (PREFACE, SETTINGS_ACK), WRONG),
    Rule("3.4", "not even a type that is not known comes first", (PREFACE, UNKNOWN), WRONG),
    Rule("3.4", "settings may be empty", (PREFACE, settings(), ping()), FINE),
    Rule("3.4", "HTTP/1.1 is none", (b"GET / HTTP/1.1\r\n",), WRONG),
    # --- 4.1 Frame Format ---
    Rule("4.1", "a reserved bit is ignored", (on(2**31, ping()), on(2**31 + 1, OPEN)), FINE),
    Rule("4.1", "flags that are not defined are ignored", (flagged(ping(), 0xF0),), FINE),
    Rule("4.1", "and on HEADERS", (flagged(OPEN, 0xD0 & ~Flag.END_STREAM),), FINE),
    # --- 4.2 Frame Size ---
    Rule("4.2", "DATA of the longest size", (OPEN, data(1, bytes(LARGEST))), FINE),
    Rule("4.2", "DATA of a byte more", (OPEN, head(LARGEST + 1, Kind.DATA, 0, 1)), SIZE),
    Rule("4.2", "HEADERS of a byte more", (head(LARGEST + 1, Kind.HEADERS, 4, 1),), SIZE),
    Rule("4.2", "SETTINGS of a byte more", (head(LARGEST + 1, Kind.SETTINGS, 0, 0),), SIZE),
    Rule("4.2", "what is not known, of a byte more", (head(LARGEST + 1, 0x2A, 0, 0),), SIZE),
    # --- 4.3 Field Section Compression and Decompression ---
    Rule("4.3", "a block that is not HPACK", (headers(1, b"\xff\xff\xff\xff\xff"),), COMPRESSION),
    Rule("4.3", "an index that there is not", (headers(1, b"\xbe"),), COMPRESSION),
    Rule("4.3", "of trailers too", (OPEN, headers(1, b"\x80", end_stream=True)), COMPRESSION),
    Rule("4.3", "of a closed stream too", (OPEN, rst_stream(1), headers(1, b"\x80")), COMPRESSION),
    Rule("4.3", "no other frame within a block", (HALF, ping()), WRONG),
    Rule("4.3", "none that is not known within a block", (HALF, UNKNOWN), WRONG),
    Rule("4.3", "no HEADERS within a block", (HALF, headers(3, REQUEST)), WRONG),
    Rule("4.3", "no DATA within a block", (HALF, data(1, MESSAGE)), WRONG),
    # --- RFC 7541, as 4.3 has it end a connection ---
    Rule("RFC 7541 2.3.3", "index 0", (headers(1, REQUEST + b"\x80"),), COMPRESSION),
    Rule(
        "RFC 7541 2.3.3", "an index past the table", (headers(1, REQUEST + b"\xbe"),), COMPRESSION
    ),
    Rule("RFC 7541 2.3.3", "the name of none", (headers(1, REQUEST + b"\x7f\0\1a"),), COMPRESSION),
    Rule("RFC 7541 4.2", "a table of 4096 bytes", (headers(1, b"\x3f\xe1\x1f" + REQUEST),), FINE),
    Rule("RFC 7541 4.2", "two sizes", (headers(1, b"\x20\x3f\xe1\x1f" + REQUEST),), FINE),
    Rule("RFC 7541 4.2", "a size behind a field", (headers(1, REQUEST + b"\x20"),), COMPRESSION),
    Rule("RFC 7541 4.2", "a size behind a reference", (headers(1, b"\x83\x20"),), COMPRESSION),
    Rule(
        "RFC 7541 4.2",
        "of trailers too",
        (OPEN, headers(1, TRAILERS + b"\x20", end_stream=True)),
        COMPRESSION,
    ),
    Rule("RFC 7541 6.3", "a table of 4097", (headers(1, b"\x3f\xe2\x1f" + REQUEST),), COMPRESSION),
    Rule(
        "RFC 7541 4.4",
        "an entry larger than the table empties it",
        (headers(1, b"\x20" + REQUEST + b"\x40\1a\1b"), headers(3, REQUEST + b"\xbe")),
        COMPRESSION,
    ),
    Rule("RFC 7541 5.1", "zeros that say nothing", (headers(1, _index(b"\x80\x80\0")),), FINE),
    Rule(
        "RFC 7541 5.1",
        "a number of too many octets",
        (headers(1, _index(b"\x80\x80\x80\x80\x80\0")),),
        COMPRESSION,
    ),
    Rule("RFC 7541 5.1", "a number that is cut off", (headers(1, REQUEST + b"\xff"),), COMPRESSION),
    Rule("RFC 7541 5.2", "a name that is cut off", (headers(1, REQUEST + b"\0\3ab"),), COMPRESSION),
    Rule(
        "RFC 7541 5.2", "a value that is cut off", (headers(1, REQUEST + b"\0\1a\2b"),), COMPRESSION
    ),
    Rule("RFC 7541 5.2", "a value that is none", (headers(1, REQUEST + b"\0\1a"),), COMPRESSION),
    Rule("RFC 7541 5.2", "seven bits of padding", (headers(1, _coded(b"\x18\xc6\x31\xff")),), FINE),
    Rule("RFC 7541 5.2", "an octet of padding", (headers(1, _coded(b"\x1f\xff")),), COMPRESSION),
    Rule("RFC 7541 5.2", "padding of zeros", (headers(1, _coded(b"\x18")),), COMPRESSION),
    Rule("RFC 7541 5.2", "just padding", (headers(1, _coded(b"\x1f")),), FINE),
    Rule("RFC 7541 5.2", "EOS", (headers(1, _coded(b"\xff\xff\xff\xff")),), COMPRESSION),
    Rule("RFC 7541 6.2.3", "a field never to be indexed", (headers(1, REQUEST + NEVER),), FINE),
    # --- 5.1 Stream States ---
    Rule("5.1", "idle: DATA", (data(1, b"a"),), WRONG),
    Rule("5.1", "idle: DATA that ends it", (data(1, b"a", end_stream=True),), WRONG),
    Rule("5.1", "idle: RST_STREAM", (rst_stream(1),), WRONG),
    Rule("5.1", "idle: WINDOW_UPDATE", (window_update(1, 1),), WRONG),
    Rule("5.1", "idle: PRIORITY", (priority(1), OPEN), FINE),
    Rule("5.1", "half-closed (remote): DATA", (ENDED, data(1, b"a")), CLOSED),
    Rule("5.1", "half-closed (remote): an empty DATA", (ENDED, data(1, end_stream=True)), CLOSED),
    Rule("5.1", "half-closed (remote): HEADERS", (ENDED, headers(1, TRAILERS)), CLOSED),
    Rule("5.1", "half-closed (remote): WINDOW_UPDATE", (ENDED, window_update(1, 1)), FINE),
    Rule("5.1", "half-closed (remote): PRIORITY", (ENDED, priority(1)), FINE),
    Rule("5.1", "closed: DATA", (OPEN, rst_stream(1), data(1, b"a")), CLOSED),
    Rule(
        "5.1", "closed: HEADERS", (OPEN, rst_stream(1), headers(1, REQUEST)), "GOAWAY STREAM_CLOSED"
    ),
    Rule(
        "5.1",
        "closed: HEADERS, below ids that were skipped",
        (OPEN, rst_stream(1), headers(7, REQUEST), headers(1, REQUEST)),
        "GOAWAY STREAM_CLOSED",
    ),
    Rule("5.1", "closed: WINDOW_UPDATE", (OPEN, rst_stream(1), window_update(1, 1)), FINE),
    Rule("5.1", "closed: RST_STREAM", (OPEN, rst_stream(1), rst_stream(1)), FINE),
    Rule("5.1", "closed: PRIORITY", (OPEN, rst_stream(1), priority(1)), FINE),
    # --- 5.1.1 Stream Identifiers ---
    Rule("5.1.1", "an even id", (headers(2, REQUEST),), WRONG),
    Rule(
        "5.1.1", "an id below one that was used", (headers(5, REQUEST), headers(3, REQUEST)), WRONG
    ),
    Rule(
        "5.1.1",
        "an id that was skipped is closed (6.1)",
        (headers(5, REQUEST), data(3, b"a")),
        "RST_STREAM 3 STREAM_CLOSED",
    ),
    Rule("5.1.1", "RST_STREAM on one is late", (headers(5, REQUEST), rst_stream(3)), FINE),
    Rule("5.1.1", "ids may be skipped", (headers(5, REQUEST), headers(99, REQUEST)), FINE),
    Rule("5.1.1", "the largest id", (headers(MAX, REQUEST),), FINE),
    Rule("5.1.1", "none is above the largest", (headers(MAX, REQUEST), OPEN), WRONG),
    # --- 5.1.2 Stream Concurrency ---
    Rule(
        "5.1.2",
        "a stream too many",
        (OPEN, headers(3, REQUEST), headers(5, REQUEST)),
        "RST_STREAM 5 REFUSED_STREAM",
    ),
    Rule(
        "5.1.2",
        "one that ended is not counted",
        (OPEN, headers(3, REQUEST), rst_stream(1), headers(5, REQUEST)),
        FINE,
    ),
    # --- 5.3.2, RFC 7540 5.3.1 ---
    Rule("5.3.2", "PRIORITY is ignored", (OPEN, priority(1, 3), priority(7, 1)), FINE),
    Rule("5.3.2", "priority in HEADERS is ignored", (with_priority(7),), FINE),
    Rule("5.3.2", "a stream that depends on itself", (OPEN, priority(1, 1)), MALFORMED),
    Rule("5.3.2", "from its HEADERS on", (with_priority(1),), MALFORMED),
    Rule("5.3.2", "an idle stream that depends on itself (6.4)", (priority(1, 1),), WRONG),
    # --- 5.5 Extending HTTP/2 ---
    Rule("5.5", "a type that is not known", (OPEN, UNKNOWN, on(0, UNKNOWN)), FINE),
    Rule("5.5", "a long one", (OPEN, sized(UNKNOWN, LARGEST), ping()), FINE),
    # --- 6.1 DATA ---
    Rule("6.1", "DATA on stream 0", (data(0, b"a"),), WRONG),
    Rule("6.1", "as much padding as frame", (OPEN, Frame(0, Flag.PADDED, 1, b"\3abc")), FINE),
    Rule("6.1", "more padding than frame", (OPEN, Frame(0, Flag.PADDED, 1, b"\4abc")), WRONG),
    Rule("6.1", "padding without its length", (OPEN, Frame(0, Flag.PADDED, 1)), SIZE),
    Rule("6.1", "padding of 0", (OPEN, padded(data(1, MESSAGE), 0)), FINE),
    Rule("6.1", "a message in padding", (OPEN, padded(data(1, MESSAGE, end_stream=True), 9)), FINE),
    # --- 6.2 HEADERS ---
    Rule("6.2", "HEADERS on stream 0", (headers(0, REQUEST),), WRONG),
    Rule("6.2", "padding", (padded(OPEN, 200),), FINE),
    Rule("6.2", "as much padding as frame", (padded(headers(1, b""), 9),), MALFORMED),
    Rule(
        "6.2",
        "more padding than frame",
        (Frame(Kind.HEADERS, Flag.PADDED | 4, 1, b"\4abc"),),
        WRONG,
    ),
    Rule("6.2", "padding without its length", (Frame(Kind.HEADERS, Flag.PADDED | 4, 1),), SIZE),
    Rule(
        "6.2",
        "priority that ends early",
        (Frame(Kind.HEADERS, Flag.PRIORITY | 4, 1, b"\0\0\0\0"),),
        SIZE,
    ),
    Rule("6.2", "padding and priority", (padded(with_priority(0), 100),), FINE),
    # --- 6.3 PRIORITY ---
    Rule("6.3", "PRIORITY on stream 0", (priority(0),), WRONG),
    Rule("6.3", "of 4 bytes", (OPEN, sized(priority(1), 4)), "RST_STREAM 1 FRAME_SIZE_ERROR"),
    Rule("6.3", "of 6 bytes", (OPEN, sized(priority(1), 6)), "RST_STREAM 1 FRAME_SIZE_ERROR"),
    Rule("6.3", "of 4 bytes on an idle stream (6.4)", (sized(priority(1), 4),), SIZE),
    Rule("6.3", "of 4 bytes on a stream of ours (6.4)", (OPEN, sized(priority(2), 4)), SIZE),
    Rule(
        "6.3",
        "of 4 bytes on one that ended",
        (OPEN, rst_stream(1), sized(priority(1), 4)),
        "RST_STREAM 1 FRAME_SIZE_ERROR",
    ),
    # --- 6.4 RST_STREAM ---
    Rule("6.4", "RST_STREAM on stream 0", (rst_stream(0),), WRONG),
    Rule("6.4", "of 3 bytes", (OPEN, sized(rst_stream(1), 3)), SIZE),
    Rule("6.4", "of 5 bytes", (OPEN, sized(rst_stream(1), 5)), SIZE),
    Rule("6.4", "with a code that is not known (7)", (OPEN, rst_stream(1, 0xFFFF_FFFF)), FINE),
    # --- 6.5 SETTINGS ---
    Rule("6.5", "SETTINGS on a stream", (on(1, settings()),), WRONG),
    Rule("6.5", "an acknowledgement on a stream", (on(1, SETTINGS_ACK),), WRONG),
    Rule("6.5", "an acknowledgement with values", (flagged(settings((1, 1)), Flag.ACK),), SIZE),
    Rule("6.5", "half a value", (sized(settings(), 3),), SIZE),
    Rule("6.5", "one and a half", (sized(settings((1, 1)), 9),), SIZE),
    Rule("6.5.2", "ENABLE_PUSH of 2", (settings((Setting.ENABLE_PUSH, 2)),), WRONG),
    Rule("6.5.2", "ENABLE_PUSH of 1", (settings((Setting.ENABLE_PUSH, 1)),), FINE),
    Rule("6.5.2", "the widest window", (settings((Setting.INITIAL_WINDOW_SIZE, MAX)),), FINE),
    Rule("6.5.2", "a wider one", (settings((Setting.INITIAL_WINDOW_SIZE, MAX + 1)),), FLOW),
    Rule("6.5.2", "the smallest frame", (settings((Setting.MAX_FRAME_SIZE, 16_384)),), FINE),
    Rule("6.5.2", "a smaller one", (settings((Setting.MAX_FRAME_SIZE, 16_383)),), WRONG),
    Rule("6.5.2", "the largest frame", (settings((Setting.MAX_FRAME_SIZE, 2**24 - 1)),), FINE),
    Rule("6.5.2", "a larger one", (settings((Setting.MAX_FRAME_SIZE, 2**24)),), WRONG),
    Rule("6.5.2", "a value that is not known", (settings((0x4A4A, 2**32 - 1)),), FINE),
    # --- 6.6 PUSH_PROMISE, 8.4 Server Push ---
    Rule("8.4", "PUSH_PROMISE of a client", (OPEN, PUSH), WRONG),
    Rule("8.4", "on stream 0", (on(0, PUSH),), WRONG),
    Rule("8.4", "empty", (OPEN, sized(PUSH, 0)), WRONG),
    # --- 6.7 PING ---
    Rule("6.7", "PING on a stream", (OPEN, on(1, ping())), WRONG),
    Rule("6.7", "of 7 bytes", (sized(ping(), 7),), SIZE),
    Rule("6.7", "of 9 bytes", (sized(ping(), 9),), SIZE),
    Rule("6.7", "an acknowledgement of 7 bytes", (sized(ping(ack=True), 7),), SIZE),
    # --- 6.8 GOAWAY ---
    Rule("6.8", "GOAWAY on a stream", (OPEN, on(1, goaway())), WRONG),
    Rule("6.8", "of 7 bytes", (sized(goaway(), 7),), SIZE),
    Rule("6.8", "with words", (sized(goaway(), 100), ping()), FINE),
    Rule("6.8", "with a code that is not known (7)", (goaway(0, 0xBAD),), FINE),
    # --- 6.9 WINDOW_UPDATE ---
    Rule("6.9", "an increment of 0 on a stream", (OPEN, window_update(1, 0)), MALFORMED),
    Rule("6.9", "an increment of 0 on the connection", (window_update(0, 0),), WRONG),
    Rule("6.9", "a reserved bit is ignored", (OPEN, window_update(1, 2**31 + 1)), FINE),
    Rule("6.9", "and is no increment", (OPEN, window_update(1, 2**31)), MALFORMED),
    Rule("6.9", "of 3 bytes", (sized(window_update(0, 1), 3),), SIZE),
    Rule("6.9", "of 5 bytes", (OPEN, sized(window_update(1, 1), 5)), SIZE),
    Rule("6.9.1", "the widest window", (window_update(0, MAX - 65_535),), FINE),
    Rule("6.9.1", "wider by 1", (window_update(0, MAX - 65_534),), FLOW),
    Rule("6.9.1", "the widest of a stream", (OPEN, window_update(1, MAX - 65_535)), FINE),
    Rule(
        "6.9.1",
        "wider by 1 of a stream",
        (OPEN, window_update(1, MAX - 65_534)),
        "RST_STREAM 1 FLOW_CONTROL_ERROR",
    ),
    Rule(
        "6.9.2",
        "wider by 1 through SETTINGS",
        (OPEN, window_update(1, MAX - 65_535), settings((Setting.INITIAL_WINDOW_SIZE, 65_536))),
        FLOW,
    ),
    Rule(
        "6.9.2",
        "wider on the way to what is not",
        (
            OPEN,
            window_update(1, MAX - 65_535),
            settings((Setting.INITIAL_WINDOW_SIZE, 65_536), (Setting.INITIAL_WINDOW_SIZE, 1)),
        ),
        FLOW,
    ),
    Rule(
        "6.9.2",
        "narrower through SETTINGS",
        (OPEN, window_update(1, MAX - 65_535), settings((Setting.INITIAL_WINDOW_SIZE, 0))),
        FINE,
    ),
    # --- 6.10 CONTINUATION ---
    Rule("6.10", "CONTINUATION of nothing", (OPEN, continuation(1, b"")), WRONG),
    Rule("6.10", "on stream 0", (HALF, continuation(0, REQUEST[10:])), WRONG),
    Rule("6.10", "of another stream", (HALF, continuation(3, REQUEST[10:])), WRONG),
    Rule(
        "6.10",
        "behind the end of a block",
        (HALF, continuation(1, REQUEST[10:]), continuation(1, b"")),
        WRONG,
    ),
    Rule("6.10", "a block in two", (HALF, continuation(1, REQUEST[10:])), FINE),
    Rule(
        "6.10",
        "a block in three, one of them empty",
        (HALF, continuation(1, b"", end_headers=False), continuation(1, REQUEST[10:])),
        FINE,
    ),
    # --- 8.1 HTTP Message Framing ---
    Rule("8.1", "trailers", (OPEN, data(1, MESSAGE), headers(1, TRAILERS, end_stream=True)), FINE),
    Rule("8.1", "trailers that do not end", (OPEN, headers(1, TRAILERS)), MALFORMED),
    Rule(
        "8.1",
        "a pseudo-header in trailers",
        (OPEN, headers(1, REQUEST, end_stream=True)),
        MALFORMED,
    ),
    Rule(
        "8.1.1",
        "less than the content-length",
        (headers(1, request(("content-length", "9"))), data(1, MESSAGE, end_stream=True)),
        MALFORMED,
    ),
    Rule(
        "8.1.1",
        "more than the content-length",
        (headers(1, request(("content-length", "7"))), data(1, MESSAGE)),
        MALFORMED,
    ),
    Rule(
        "8.1.1",
        "more, in many frames",
        (headers(1, request(("content-length", "7"))), *(data(1, bytes(2)) for _ in range(4))),
        MALFORMED,
    ),
    Rule(
        "8.1.1",
        "just the content-length",
        (headers(1, request(("content-length", "8"))), data(1, MESSAGE, end_stream=True)),
        FINE,
    ),
    Rule(
        "8.1.1",
        "a content-length without a body",
        (headers(1, request(("content-length", "1")), end_stream=True),),
        MALFORMED,
    ),
    Rule(
        "8.1.1",
        "a content-length of 0 without a body",
        (headers(1, request(("content-length", "0")), end_stream=True),),
        FINE,
    ),
    Rule(
        "8.1.1",
        "less than the content-length, and trailers",
        (
            headers(1, request(("content-length", "9"))),
            data(1, MESSAGE),
            headers(1, TRAILERS, end_stream=True),
        ),
        MALFORMED,
    ),
    Rule("8.1.1", "a content-length of letters", (adding(("content-length", "a")),), MALFORMED),
    Rule("8.1.1", "one of 19 digits", (adding(("content-length", "9" * 19)),), FINE),
    Rule("8.1.1", "one of 20 digits", (adding(("content-length", "9" * 20)),), MALFORMED),
    Rule("8.1.1", "a negative one", (adding(("content-length", "-1")),), MALFORMED),
    Rule("8.1.1", "one with a sign", (adding(("content-length", "+8")),), MALFORMED),
    Rule("8.1.1", "an empty one", (adding(("content-length", "")),), MALFORMED),
    Rule(
        "8.1.1",
        "two of them",
        (adding(("content-length", "8"), ("content-length", "9")),),
        MALFORMED,
    ),
    Rule(
        "8.1.1",
        "the same twice",
        (
            adding(("content-length", "8"), ("content-length", "8")),
            data(1, MESSAGE, end_stream=True),
        ),
        FINE,
    ),
    # --- 8.2 HTTP Fields ---
    Rule("8.2", "a name in upper case", (adding(("A", "1")),), MALFORMED),
    Rule("8.2", "in part", (adding(("aBc", "1")),), MALFORMED),
    Rule(
        "8.2", "in trailers", (OPEN, headers(1, literals([("A", "")]), end_stream=True)), MALFORMED
    ),
    Rule("8.2.1", "no name", (adding(("", "1")),), MALFORMED),
    Rule("8.2.1", "a space in a name", (adding(("a b", "1")),), MALFORMED),
    Rule("8.2.1", "a colon in a name", (adding(("a:b", "1")),), MALFORMED),
    Rule("8.2.1", "DEL in a name", (adding(("a\x7f", "1")),), MALFORMED),
    Rule("8.2.1", "an octet above in a name", (adding(("a\x80", "1")),), MALFORMED),
    Rule("8.2.1", "a control character in a name", (adding(("a\x01", "1")),), MALFORMED),
    Rule("8.2.1", "NUL in a value", (adding(("a", "1\0")),), MALFORMED),
    Rule("8.2.1", "CR in a value", (adding(("a", "\r1")),), MALFORMED),
    Rule("8.2.1", "LF in a value", (adding(("a", "1\n1")),), MALFORMED),
    Rule(
        "8.2.1",
        "LF in trailers",
        (OPEN, headers(1, literals([("a", "\n")]), end_stream=True)),
        MALFORMED,
    ),
    Rule("8.2.1", "LF in a path", (asking(METHOD, SCHEME, (":path", "/\n")),), MALFORMED),
    Rule("8.2.1", "an octet above in a value", (adding(("a", "\x80\xff")),), FINE),
    Rule("8.2.1", "an empty value", (adding(("a", "")),), FINE),
    Rule("8.2.2", "connection", (adding(("connection", "close")),), MALFORMED),
    Rule("8.2.2", "proxy-connection", (adding(("proxy-connection", "close")),), MALFORMED),
    Rule("8.2.2", "keep-alive", (adding(("keep-alive", "1")),), MALFORMED),
    Rule("8.2.2", "transfer-encoding", (adding(("transfer-encoding", "chunked")),), MALFORMED),
    Rule("8.2.2", "upgrade", (adding(("upgrade", "websocket")),), MALFORMED),
    Rule(
        "8.2.2",
        "in trailers",
        (OPEN, headers(1, literals([("connection", "close")]), end_stream=True)),
        MALFORMED,
    ),
    Rule("8.2.2", "te of trailers", (adding(("te", "trailers")),), FINE),
    Rule("8.2.2", "another te", (adding(("te", "gzip")),), MALFORMED),
    Rule("8.2.2", "te of trailers and more", (adding(("te", "trailers, gzip")),), MALFORMED),
    # --- 8.3 HTTP Control Data ---
    Rule("8.3", "a pseudo-header of an answer", (adding((":status", "200")),), MALFORMED),
    Rule("8.3", "one that is not known", (asking((":a", "1"), *LINES),), MALFORMED),
    Rule("8.3", "one behind a header", (asking(METHOD, SCHEME, ("a", "1"), PATH),), MALFORMED),
    Rule("8.3.1", "two paths", (asking(*LINES, PATH),), MALFORMED),
    Rule("8.3.1", "two methods", (asking(METHOD, *LINES),), MALFORMED),
    Rule("8.3.1", "two schemes", (asking(SCHEME, *LINES),), MALFORMED),
    Rule(
        "8.3.1",
        "two authorities",
        (asking((":authority", "a"), *LINES, (":authority", "a")),),
        MALFORMED,
    ),
    Rule("8.3.1", "no :path", (asking(METHOD, SCHEME),), MALFORMED),
    Rule("8.3.1", "no :method", (asking(SCHEME, PATH),), MALFORMED),
    Rule("8.3.1", "no :scheme", (asking(METHOD, PATH),), MALFORMED),
    Rule("8.3.1", "an empty :path", (asking(METHOD, SCHEME, (":path", "")),), MALFORMED),
    Rule(
        "8.3.1",
        "in another order, with an authority",
        (asking(PATH, (":authority", "a"), SCHEME, METHOD),),
        FINE,
    ),
    Rule(
        "8.5",
        "CONNECT with :scheme and :path",
        (asking((":method", "CONNECT"), SCHEME, PATH),),
        MALFORMED,
    ),
    Rule(
        "8.5",
        "CONNECT without, which we do not do",
        (asking((":method", "CONNECT"), (":authority", "a")),),
        MALFORMED,
    ),
    # --- 10.5 Denial-of-Service Considerations ---
    Rule("10.5", "a long control frame", (sized(settings(), 16_386),), CALM),
    Rule("10.5", "of any kind", (sized(goaway(), 16_385),), CALM),
    Rule("10.5", "one that is just not too long", (sized(settings(), 16_380),), FINE),
    Rule("10.5.1", "a long HEADERS frame", (headers(1, bytes(4097)),), CALM),
    Rule("10.5.1", "a long CONTINUATION", (HALF, continuation(1, bytes(4097))), CALM),
    Rule(
        "10.5.1",
        "a long block in many frames",
        (HALF, *(continuation(1, bytes(1024), end_headers=False) for _ in range(5))),
        CALM,
    ),
    Rule(
        "10.5.1", "a list that is large when it is decoded", (headers(1, REQUEST + 4 * LONG),), CALM
    ),
]
"""In the order of the sections."""

ROUTES: dict[str, Callable[[], Streaming | Unary]] = {"streaming": Streaming, "unary": Unary}
READS: dict[str, int] = {"one read": 1 << 20, "reads of 7 bytes": 7, "reads of 1 byte": 1}


def made(route: str, *, greets: bool) -> MemoryClient:
    return MemoryClient(
        ROUTES[route](),
        greets=greets,
        max_frame_bytes=LARGEST,
        max_streams=STREAMS,
        max_header_bytes=1024,
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.section} {rule.name}")
def test_rule(rule: Rule) -> None:
    """The same stream or connection ends, with the same code, on every route and for any reads."""
    octets = b"".join(map(bytes, rule.parts))
    greets = rule.section != "3.4"
    for route in ROUTES:
        for reads, size in READS.items():
            if size < len(octets) // 5000:
                continue
            client = made(route, greets=greets)
            client.send_in_pieces(octets, size)
            ended = [text for text in client.ended if not _is_answer_of_the_end(text)]

            assert ([rule.outcome] if rule.outcome else []) == ended[:1], (route, reads)
            assert client.alive is not rule.outcome.startswith("GOAWAY")
            if client.alive:
                assert [ping(ack=True)] == client.send(ping())


def _is_answer_of_the_end(text: str) -> bool:
    return text.endswith(" NO_ERROR")


BESIDE_OTHERS = [
    rule
    for rule in RULES
    if rule.section != "3.4" and HALF not in rule.parts and rule.parts[0] != headers(MAX, REQUEST)
]
"""Rules that leave room for another open stream."""


@pytest.mark.parametrize("rule", BESIDE_OTHERS, ids=lambda rule: f"{rule.section} {rule.name}")
def test_an_error_costs_what_it_may_and_no_more(rule: Rule) -> None:
    """5.4.1, 5.4.2: a stream error affects that stream, a connection error all open streams."""
    client = MemoryClient(Streaming(), max_frame_bytes=LARGEST, max_header_bytes=1024)
    client.send(*(part for part in rule.parts))
    highest = max((s for s in client.route.streams), default=0)
    other = max(highest, 99) + 2
    frames = client.send(headers(other, REQUEST), ping())
    if client.alive:
        assert other in client.core.streams
        assert frames[-1] == ping(ack=True)
    else:
        assert {} == client.core.streams
        assert [] == frames
        last = next(f for f in client.all if f.kind == Kind.GOAWAY)
        assert highest <= int.from_bytes(last.payload[:4], "big")


# # --- beyond the table -------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(len(PREFACE)))
def test_a_preface_with_one_wrong_byte_is_none(at: int) -> None:
    """3.4."""
    wrong = bytearray(PREFACE)
    wrong[at] ^= 0x20
    client = MemoryClient(greets=False)
    client.send_in_pieces(bytes(wrong) + bytes(settings()))

    assert [WRONG] == client.ended
    assert not client.core.greeted


@pytest.mark.parametrize("size", range(1, len(PREFACE)))
def test_a_preface_may_come_in_pieces(size: int) -> None:
    """3.4; the server sends its own settings without waiting for it."""
    client = MemoryClient(greets=False)
    first = client.taken()
    assert [Kind.SETTINGS, Kind.WINDOW_UPDATE] == [frame.kind for frame in first]
    assert [] == client.send(PREFACE[:size])
    assert not client.core.greeted
    rest = client.send(PREFACE[size:], settings())

    assert [SETTINGS_ACK] == rest
    assert client.core.greeted


def test_our_settings_are_our_limits() -> None:
    """6.5.2."""
    client = MemoryClient(
        greets=False, max_streams=7, max_header_bytes=2000, stream_window_bytes=70_000
    )
    values = client.taken()[0].payload
    told_ = {
        int.from_bytes(values[at : at + 2], "big"): int.from_bytes(values[at + 2 : at + 6], "big")
        for at in range(0, len(values), 6)
    }

    assert {
        Setting.MAX_CONCURRENT_STREAMS: 7,
        Setting.INITIAL_WINDOW_SIZE: 70_000,
        Setting.MAX_FRAME_SIZE: 1 << 20,
        Setting.MAX_HEADER_LIST_SIZE: 2000,
    } == told_


def test_the_least_window_is_announced_without_an_increment_of_0() -> None:
    """6.9: the client would have to end the connection for it."""
    client = MemoryClient(greets=False, connection_window_bytes=65_535)

    assert [Kind.SETTINGS] == [frame.kind for frame in client.taken()]


def test_settings_are_acknowledged_each_time_and_in_order() -> None:
    """6.5.3."""
    client = MemoryClient()
    frames = client.send(settings((1, 0)), ping(b"between."), settings(), SETTINGS_ACK)

    assert [SETTINGS_ACK, ping(b"between.", ack=True), SETTINGS_ACK] == frames


def test_the_last_of_two_values_counts() -> None:
    """6.5.3: settings are applied in order."""
    client = MemoryClient()
    client.send(
        settings(
            (Setting.INITIAL_WINDOW_SIZE, 4),
            (Setting.MAX_FRAME_SIZE, 20_000),
            (Setting.INITIAL_WINDOW_SIZE, 9),
        )
    )
    client.send(OPEN, data(1, MESSAGE, end_stream=True))
    answer(client.route.streams[1], b"0123456789")

    assert [9] == [len(frame.payload) for frame in client.taken() if frame.kind == Kind.DATA]


def test_a_ping_is_answered_with_its_bytes_and_its_acknowledgement_is_not() -> None:
    """6.7."""
    client = MemoryClient()

    assert [ping(b"8 bytes.", ack=True)] == client.send(ping(b"8 bytes."))
    assert [] == client.send(ping(b"8 bytes.", ack=True))


def test_a_connection_error_names_the_last_stream() -> None:
    """6.8: the client may retry streams above it."""
    client = MemoryClient()
    client.send(OPEN, headers(7, REQUEST), sized(ping(), 7))
    last = client.all[-1]

    assert (Kind.GOAWAY, 7) == (last.kind, int.from_bytes(last.payload[:4], "big"))
    assert b"PING" in last.payload[8:]


def test_behind_a_connection_error_nothing_is_looked_at() -> None:
    """5.4.1."""
    client = MemoryClient()
    client.send(sized(ping(), 7), ping(), headers(1, REQUEST))

    assert [] == client.send(ping(), headers(3, REQUEST))
    assert {} == client.route.streams
    assert [SIZE] == client.ended


def test_a_client_that_says_goaway_still_gets_its_answers() -> None:
    """6.8."""
    client = MemoryClient()
    client.send(OPEN, data(1, MESSAGE, end_stream=True), goaway())
    assert client.core.control.client_leaves
    answer(client.route.streams[1], b"abc")

    assert [Kind.HEADERS, Kind.DATA, Kind.HEADERS] == [frame.kind for frame in client.taken()]
    assert client.alive


def test_our_goaway_leaves_streams_on_their_way_alone() -> None:
    """6.8: the first names no stream."""
    client = MemoryClient()
    client.core.go_away()
    said, asked = client.taken()
    client.send(OPEN, data(1, MESSAGE, end_stream=True))

    assert (Kind.GOAWAY, MAX) == (said.kind, int.from_bytes(said.payload[:4], "big"))
    assert Kind.PING == asked.kind
    assert not client.core.leaves
    assert {1: b"abc"} == client.route.messages  # type: ignore[union-attr]


def test_a_round_trip_later_our_goaway_names_the_last_stream() -> None:
    """6.8: earlier streams are served; streams opened later are refused unread (8.7)."""
    client = MemoryClient()
    client.core.go_away()
    _, asked = client.taken()
    client.send(OPEN, data(1, MESSAGE, end_stream=True))
    client.send(ping(b"another!", ack=True))
    assert not client.core.leaves
    (said,) = client.send(ping(asked.payload, ack=True))
    refused = client.send(headers(3, REQUEST), data(3, MESSAGE, end_stream=True))[0]
    client.core.leave()
    answer(client.route.streams[1], b"abc")

    assert client.core.leaves
    assert (Kind.GOAWAY, 1) == (said.kind, int.from_bytes(said.payload[:4], "big"))
    assert (Kind.RST_STREAM, 3) == (refused.kind, refused.stream)
    assert Error.REFUSED_STREAM == int.from_bytes(refused.payload, "big")
    assert [Kind.HEADERS, Kind.DATA, Kind.HEADERS] == [frame.kind for frame in client.taken()]
    assert client.alive


def test_a_later_goaway_names_no_higher_stream() -> None:
    """6.8: streams above the first one were refused, and the client may retry them."""
    client = MemoryClient()
    client.send(OPEN)
    client.core.leave()
    client.send(headers(3, REQUEST), headers(5, REQUEST), sized(ping(), 7))
    named = [int.from_bytes(f.payload[:4], "big") for f in client.all if f.kind == Kind.GOAWAY]

    assert [1, 1] == named
    assert [*["RST_STREAM"] * 2, "GOAWAY"] == [text.split()[0] for text in client.ended][1:]


@pytest.mark.parametrize("end", ["end", "lost"])
def test_behind_the_last_goaway_there_is_no_other(end: str) -> None:
    """6.8: the first GOAWAY of a graceful shutdown covers all streams."""
    client = MemoryClient()
    getattr(client.core, end)()
    client.taken()
    client.core.go_away()
    client.core.leave()
    client.core.end()

    assert [] == client.taken()


def test_what_is_refused_behind_our_goaway_counts_for_the_connection() -> None:
    """6.8: its header blocks update the HPACK table, and its DATA uses the window."""
    client = MemoryClient(connection_window_bytes=65_535)
    client.core.leave()
    client.taken()
    frames = client.send(headers(1, REQUEST + INSERT + b"1"), data(1, bytes(16_000)))
    frames += client.send(data(1, bytes(16_768)))

    assert ["RST_STREAM 1 REFUSED_STREAM"] == told(frames)
    assert [] == frames[1:]  # half of the window is left
    assert [window_update(0, 32_769)] == client.send(data(1, b"a"))
    client.send(headers(3, b"\x40\x01b\x011" + NEWEST), headers(5, b"\xbf"))
    assert client.alive


def test_a_client_that_answers_no_ping_is_told_its_last_stream_too() -> None:
    client = MemoryClient()
    client.core.go_away()
    client.taken()
    client.core.leave()
    (said,) = client.taken()

    assert (Kind.GOAWAY, 0) == (said.kind, int.from_bytes(said.payload[:4], "big"))
    assert [] == client.send(ping(b"farewell", ack=True))


# # --- 4.3: the HPACK table of a connection ------------------------------------------------------

INSERT = b"\x40\x01a\x01"
"""Inserts an entry into the dynamic table: the header `a` with a value of one byte."""
NEWEST = b"\xbe"


@pytest.mark.parametrize(
    ("name", "parts"),
    {
        "a stream that we have reset": (
            headers(1, literals([(":path", "/")])),  # malformed
            headers(1, REQUEST + INSERT + b"1"),
        ),
        "a stream that is refused": (
            OPEN,
            headers(3, REQUEST),
            headers(5, REQUEST + INSERT + b"1"),
            rst_stream(1),
        ),
        "trailers": (OPEN, headers(1, INSERT + b"1", end_stream=True)),
        "trailers that do not end": (OPEN, headers(1, INSERT + b"1")),
        "a stream that has ended": (ENDED, headers(1, INSERT + b"1")),
        "a request that is malformed": (headers(1, INSERT + b"1"),),
        "a request that depends on itself": (
            headers(1, priority(1, 1).payload + REQUEST + INSERT + b"1")._replace(
                flags=Flag.PRIORITY | Flag.END_HEADERS
            ),
        ),
        "a block in two frames": (HALF, continuation(1, REQUEST[10:] + INSERT + b"1")),
    }.items(),
)
def test_every_block_is_decoded_whatever_becomes_of_it(name: str, parts: Parts) -> None:
    """Otherwise the tables of both sides would diverge."""
    client = MemoryClient(max_streams=STREAMS)
    client.send(*parts)
    client.send(headers(99, REQUEST + NEWEST))

    assert client.alive, name
    assert ("a", "1") in client.core.streams[99].head.fields


def test_a_block_that_was_seen_is_read_anew_when_the_table_has_changed() -> None:
    """RFC 7541 2.3.2: its indexes refer to other entries then."""
    client = MemoryClient()
    client.send(headers(1, REQUEST + INSERT + b"1"), headers(3, REQUEST + NEWEST))
    client.send(headers(5, REQUEST + NEWEST), headers(7, REQUEST + INSERT + b"2"))
    client.send(headers(9, REQUEST + NEWEST))
    values = {n: dict(stream.head.fields)["a"] for n, stream in client.core.streams.items()}

    assert {1: "1", 3: "1", 5: "1", 7: "2", 9: "2"} == values


@pytest.mark.parametrize("index", [b"\x0f\x2f", b"\x0f\xaf\x00", b"\x0f\xaf\x80\x00"])
def test_a_name_of_the_table_is_read_anew_when_the_table_has_changed(index: bytes) -> None:
    """RFC 7541 2.3.2: even in a frequent block whose other fields do not change."""
    client = MemoryClient()
    named = REQUEST + index + b"\x011"  # the name of entry 62, in different encodings (5.1)
    client.send(headers(1, REQUEST + INSERT + b"1"), headers(3, REQUEST + NEVER))
    for stream in range(5, 13, 2):
        client.send(headers(stream, named))
    client.send(headers(13, REQUEST + b"\x40\x01b\x011"), headers(15, named))
    names = [client.core.streams[stream].head.fields[-1][0] for stream in (5, 11, 15)]

    assert ["a", "a", "b"] == names


# # --- 5.4.2, 8.1: after a reset ------------------------------------------------------------------


@pytest.mark.parametrize(
    "late",
    [
        data(1, b"more"),
        data(1, b"end", end_stream=True),
        padded(data(1, b"more"), 50),
        headers(1, TRAILERS, end_stream=True),
        window_update(1, 100),
        window_update(1, 0),
        rst_stream(1),
        priority(1),
    ],
    ids=lambda frame: f"{Kind(frame.kind).name} {frame.flags}",
)
def test_what_was_on_its_way_to_a_stream_that_we_have_reset_is_ignored(late: Frame) -> None:
    """5.1, closed: the client has not seen the RST_STREAM yet."""
    client = MemoryClient()
    client.send(OPEN, window_update(1, 0))
    assert [MALFORMED] == client.ended
    for _ in range(3):
        assert [] == told(client.send(late))
    assert client.alive


@pytest.mark.parametrize("cut", [10, 14, 20, 60])
def test_an_answer_within_the_last_frame_of_a_request_resets_nothing(cut: int) -> None:
    """8.1: the frame has END_STREAM already; the rest of its payload is dropped."""
    client = MemoryClient()
    frame = bytes(data(1, b"\2" + bytes(60), end_stream=True))
    client.send(OPEN, frame[:cut])
    if not client.route.streams:
        client.core.sweep(0, 0)
        client.core.sweep(0, 0)
    stream = client.route.streams[1]
    assert stream.problem is not None
    assert not stream.ended_by_client
    stream.send_headers(literals([("grpc-status", "13")]), end=True)

    assert [Kind.HEADERS] == [frame.kind for frame in client.taken()]
    assert [ping(ack=True)] == client.send(frame[cut:], ping())


# # --- 10.5: counters --------------------------------------------------------------------------

MOST = 20
FLOODS: dict[str, tuple[Parts, Frame | bytes]] = {
    "PING": ((), ping()),
    "acknowledged PING": ((), ping(ack=True)),
    "SETTINGS": ((), settings()),
    "acknowledged SETTINGS": ((), SETTINGS_ACK),
    "PRIORITY": ((), priority(1)),
    "types that are not known": ((), UNKNOWN),
    "long ones of them": ((), sized(UNKNOWN, 17_000)),
    "GOAWAY": ((), goaway()),
    "WINDOW_UPDATE of the connection": ((), window_update(0, 1)),
    "WINDOW_UPDATE of a stream": ((OPEN,), window_update(1, 1)),
    "WINDOW_UPDATE of a closed stream": ((OPEN, rst_stream(1)), window_update(1, 1)),
    "RST_STREAM of a closed stream": ((OPEN, rst_stream(1)), rst_stream(1)),
    "empty DATA": ((OPEN,), data(1)),
    "DATA of nothing but padding": ((OPEN,), padded(data(1), 9)),
    "DATA of a stream that we have reset": ((OPEN, window_update(1, 0)), data(1, b"a")),
    "CONTINUATION without end": ((HALF,), continuation(1, b"", end_headers=False)),
}


@pytest.mark.parametrize("name", FLOODS)
def test_every_frame_that_carries_nothing_is_counted_once(name: str) -> None:
    """Every kind of useless frame reaches the same limit."""
    before, flood = FLOODS[name]
    client = MemoryClient(Streaming(), max_control_frames=MOST, max_frame_bytes=LARGEST)
    client.send(*before)
    for _ in range(MOST):
        client.send(flood)
    lives = client.alive
    client.send(flood)

    assert lives
    assert [CALM] == [text for text in client.ended if text.startswith("GOAWAY")]


RESETS: dict[str, Callable[[int], Parts]] = {
    "by the client": lambda n: (headers(n, REQUEST), rst_stream(n)),
    "for what it sent": lambda n: (headers(n, REQUEST), window_update(n, 0)),
    "for how it asked": lambda n: (headers(n, literals([(":path", "/")])),),
    "for DATA behind its end": lambda n: (headers(n, REQUEST, end_stream=True), data(n, b"a")),
    "for being past its window": lambda n: (
        headers(n, REQUEST),
        *(padded(data(n), 255) for _ in range(5)),
    ),
}


@pytest.mark.parametrize("name", RESETS)
def test_every_stream_that_is_reset_is_counted(name: str) -> None:
    """CVE-2023-44487 and its successors: which side resets does not matter."""
    client = MemoryClient(Streaming(), max_resets=MOST, stream_window_bytes=1024)
    for number in range(MOST):
        client.send(*RESETS[name](2 * number + 1))
    lives = client.alive
    client.send(*RESETS[name](2 * MOST + 1))

    assert lives
    assert CALM == client.ended[-1]
    assert {} == client.core.streams


def test_a_stream_too_many_is_counted_as_a_control_frame() -> None:
    client = MemoryClient(Streaming(), max_control_frames=MOST, max_streams=1)
    client.send(OPEN)
    for number in range(1, MOST + 1):
        client.send(headers(2 * number + 1, REQUEST))
    lives = client.alive
    client.send(headers(2 * MOST + 3, REQUEST))

    assert lives
    assert [*["RST_STREAM"] * MOST, "GOAWAY"] == [text.split()[0] for text in client.ended]


# --- header blocks in progress (6.10, 10.5.1) ---------------------------------------------------


def _pieces(stream: int) -> tuple[Frame, Frame, Frame]:
    first, second, last = REQUEST[:5], REQUEST[5:9], REQUEST[9:]
    return (
        headers(stream, first, end_headers=False),
        continuation(stream, second, end_headers=False),
        continuation(stream, last),
    )


def test_a_block_in_progress_is_on_the_ledger_until_its_end() -> None:
    client = MemoryClient(Unary())
    held = []
    for piece in (*_pieces(1), *_pieces(3)):
        client.send(piece)
        held.append(client.ledger.held)

    assert [5, 9, 0, 5, 9, 0] == held
    assert {1, 3} == set(client.core.streams)


def test_a_block_has_the_time_of_a_message_from_its_own_beginning() -> None:
    """However old the connection is; then it ends, and no memory stays reserved."""
    client = MemoryClient(Unary())
    for _ in range(9):
        client.core.sweep(2, 2)
    client.send(_pieces(1)[0])
    for _ in range(2):
        client.core.sweep(2, 2)
    assert client.alive
    client.core.sweep(2, 2)
    client.taken()

    assert ["GOAWAY ENHANCE_YOUR_CALM"] == client.ended
    assert 0 == client.ledger.held
