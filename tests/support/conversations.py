"""Random HTTP/2 client conversations on one connection, and mutations of them."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import TypeAlias

from support import frames
from support.frames import Flag, Frame, Kind, Setting, integer, literals
from support.wire import framed, request_headers

Conversation: TypeAlias = list[bytes]
"""The preface, then mostly one frame per item."""

_STREAMS = 3
"""Maximum number of requests per conversation."""
_ODD_BLOCK = 0.06
_MUTATED = 0.85


# --- header blocks -----------------------------------------------------------------------------


def _indexed(name: str, value: str) -> bytes:
    """Encode a header with incremental indexing (RFC 7541, 6.2.1)."""
    texts = (text.encode() for text in (name, value))
    return b"\x40" + b"".join(integer(len(text), 7) + text for text in texts)


def _path(size: int) -> str:
    return f"/answer/{size}"


def _request(size: int, *more: tuple[str, str]) -> bytes:
    return literals(request_headers(_path(size), *more))


_POST = b"\x83\x86" + literals([(":authority", "localhost")])
_FIRST = _POST + _indexed(":path", _path(7)) + _indexed("te", "trailers")
_SAME = _POST + b"\xbf\xbe"
"""The same request, encoded with table indices."""
_OTHER = _POST + _indexed(":path", _path(9)) + b"\xbf"
"""A request that shifts the dynamic table: the indices of `_SAME` then mean other fields."""
_REMEMBERING = _SAME + _indexed("x-a", "1") + _indexed("x-b", "2")
_FORGETTING = b"\x20" + _POST + literals([(":path", _path(1))])
_SMALL_TABLE = b"\x3f\x21" + _POST + _indexed(":path", _path(2)) + _indexed("x-a", "1")
_HUFFMAN = _POST + bytes.fromhex("4487607523c16c61af")

BLOCKS = (
    *[_request(size) for size in (1, 2, 5, 100)] * 2,
    _request(70_000),
    _request(3, ("content-length", "5")),
    _request(3, ("x-long", "v" * 300)),
    _HUFFMAN,
    _SMALL_TABLE,
)
"""Valid requests."""
_WITH_TABLE = (_SAME, _SAME, _OTHER, _REMEMBERING, _FORGETTING, _request(1))
"""Requests that follow `_FIRST`; in some orders they are invalid."""

_PLAIN = request_headers(_path(3))
ODD_BLOCKS = (
    *[literals([line for line in _PLAIN if line[0] != name]) for name in (":path", ":method")],
    literals([line for line in _PLAIN if line[0] not in (":scheme", ":authority")]),
    literals([*_PLAIN[1:], _PLAIN[0]]),
    literals([_PLAIN[0], *_PLAIN]),
    literals([(":path", ""), *_PLAIN[:2], *_PLAIN[3:]]),
    literals([(":status", "200"), *_PLAIN]),
    literals([*_PLAIN, ("X-Upper", "1")]),
    literals([*_PLAIN, ("connection", "close")]),
    literals([*_PLAIN, ("transfer-encoding", "chunked")]),
    literals([*_PLAIN, ("te", "gzip")]),
    literals([*_PLAIN, ("x-a", "b\r\nc: d")]),
    literals([*_PLAIN, ("x-a", " b")]),
    literals([*_PLAIN, ("x a", "b")]),
    literals([*_PLAIN, ("", "b")]),
    literals([*_PLAIN, ("x-caf\xe9", "1"), ("x-a", "caf\xc3\xa9")]),
    literals([*_PLAIN, ("host", "elsewhere")]),
    literals([*_PLAIN, ("cookie", "a=1"), ("cookie", "b=2")]),
    literals([*_PLAIN, ("content-length", "5"), ("content-length", "6")]),
    *[literals([*_PLAIN, ("content-length", text)]) for text in ("x", "-1", "", "+5", "9" * 30)],
    literals([*_PLAIN, ("x-much", "v" * 5000)]),
    literals([*_PLAIN, *[("x-many", "v" * 40)] * 60]),
    _SAME,
    _POST[:2] + literals([(":path", _path(1))]),
    b"",
    b"\x80",
    b"\xff\xff\xff\xff\xff\xff\xff",
    b"\x3f\xe1\xff\x7f",
    b"\x40\x03ab",
    _PLAIN[0][0].encode(),
)
"""Malformed or unusual requests."""

TRAILERS = literals([("x-end", "1")])
ODD_TRAILERS = (literals([(":path", "/")]), literals([("X-End", "1")]), b"\xbe", b"")


# --- conversations -----------------------------------------------------------------------------


def conversation(random: Random) -> list[Frame]:
    """Generate what a client might send after its preface; most of it is valid."""
    spoken = [frames.settings(*_settings(random)), frames.SETTINGS_ACK]
    blocks = _with_table(random) if random.random() < 0.25 else _blocks(random)
    waiting = [_exchange(random, 2 * at + 1, blocks) for at in range(random.randint(1, _STREAMS))]
    speaking = [_asides(random)] if random.random() < 0.3 else []
    while waiting or speaking:
        # Streams are opened in order (RFC 9113, 5.1.1), but their frames may interleave.
        if waiting and (not speaking or random.random() < 0.3):
            speaking.append(waiting.pop(0))
            speaker = speaking[-1]
        else:
            speaker = random.choice(speaking)
        frame = next(speaker, None)
        if frame is None:
            speaking.remove(speaker)
            continue
        spoken.append(frame)
        while not frame.flags & Flag.END_HEADERS and frame.kind in (
            Kind.HEADERS,
            Kind.CONTINUATION,
        ):
            frame = next(speaker)  # a header block must not be interrupted
            spoken.append(frame)
    return spoken


def _begins_a_block(frame: Frame) -> bool:
    kinds = (Kind.HEADERS, Kind.CONTINUATION)
    return frame.kind in kinds and not frame.flags & Flag.END_HEADERS


def _settings(random: Random) -> Sequence[tuple[int, int]]:
    if random.random() < 0.6:
        return ()
    return random.choice(_ODD_SETTINGS if random.random() < 0.1 else _SETTINGS)


_SETTINGS: Sequence[Sequence[tuple[int, int]]] = (
    [(Setting.INITIAL_WINDOW_SIZE, 0)],
    [(Setting.INITIAL_WINDOW_SIZE, 10)],
    [(Setting.INITIAL_WINDOW_SIZE, 100_000)],
    [(Setting.INITIAL_WINDOW_SIZE, 100), (Setting.INITIAL_WINDOW_SIZE, 1)],
    [(Setting.INITIAL_WINDOW_SIZE, 2**31 - 1)],
    [(Setting.MAX_FRAME_SIZE, 16_384)],
    [(Setting.MAX_FRAME_SIZE, 2**24 - 1)],
    [(Setting.ENABLE_PUSH, 0)],
    [(Setting.HEADER_TABLE_SIZE, 0)],
    [(Setting.MAX_CONCURRENT_STREAMS, 0)],
    [(Setting.MAX_HEADER_LIST_SIZE, 1)],
    [(0x4A4A, 7), (Setting.HEADER_TABLE_SIZE, 4096)],
)
_ODD_SETTINGS: Sequence[Sequence[tuple[int, int]]] = (
    [(Setting.INITIAL_WINDOW_SIZE, 2**31)],
    [(Setting.MAX_FRAME_SIZE, 16_383)],
    [(Setting.MAX_FRAME_SIZE, 2**24)],
    [(Setting.ENABLE_PUSH, 1)],
    [(Setting.ENABLE_PUSH, 2)],
)


def _blocks(random: Random) -> Iterator[bytes]:
    while True:
        yield random.choice(ODD_BLOCKS if random.random() < _ODD_BLOCK else BLOCKS)


def _with_table(random: Random) -> Iterator[bytes]:
    yield _FIRST
    while True:
        yield random.choice(_WITH_TABLE)


def _exchange(random: Random, stream: int, blocks: Iterator[bytes]) -> Iterator[Frame]:
    """Yield the frames of one request, in order."""
    block = next(blocks)
    message = framed(bytes(random.choice((0, 0, 1, 5, 40))))
    kind = random.random()
    if kind < 0.06:
        message = random.choice((message + message, message[:-1], b"\2" + message[1:], message[:3]))
    elif kind < 0.08:
        message = framed(bytes(random.choice((20_000, 50_000))))
    elif kind < 0.1:
        message = b"\0\xff\xff\xff\xff" + bytes(40)
    yield from _head(random, stream, block, end_stream=random.random() < 0.05)
    if random.random() < 0.08:
        yield frames.window_update(stream, random.choice((1, 10, 1000)))
    trailers = random.random() < 0.1
    yield from _body(random, stream, message, end_stream=not trailers)
    if trailers:
        block = random.choice(ODD_TRAILERS) if random.random() < 0.2 else TRAILERS
        yield from _head(random, stream, block, end_stream=random.random() < 0.9)
    if random.random() < 0.3:
        yield random.choice(
            (
                frames.window_update(stream, random.choice((1, 10, 100_000))),
                frames.rst_stream(stream),
                frames.data(stream, b"late", end_stream=True),
                frames.priority(stream, 0),
            )
        )


def _head(random: Random, stream: int, block: bytes, *, end_stream: bool) -> Iterator[Frame]:
    if random.random() < 0.1:
        cut = random.randint(0, len(block))
        yield frames.headers(stream, block[:cut], end_stream=end_stream, end_headers=False)
        if random.random() < 0.3:
            yield frames.continuation(stream, b"", end_headers=False)
        yield frames.continuation(stream, block[cut:])
        return
    frame = frames.headers(stream, block, end_stream=end_stream)
    if random.random() < 0.1:
        depends_on = random.choice((0, 0, stream + 2, stream))
        payload = frames.priority(stream, depends_on).payload + block
        frame = frame._replace(flags=frame.flags | Flag.PRIORITY, payload=payload)
    if random.random() < 0.1:
        frame = frames.padded(frame, random.choice((0, 1, 200)))
    yield frame


def _body(random: Random, stream: int, body: bytes, *, end_stream: bool) -> Iterator[Frame]:
    size = len(body) if random.random() < 0.6 else random.randint(1, len(body))
    size = min(max(size, len(body) // 4), frames.LARGEST_FRAME)
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    if random.random() < 0.1:
        parts.insert(random.randint(0, len(parts)), b"")
    for at, part in enumerate(parts):
        frame = frames.data(stream, part, end_stream=end_stream and at == len(parts) - 1)
        fits = len(part) + 201 <= frames.LARGEST_FRAME
        if fits and random.random() < 0.1:
            frame = frames.padded(frame, random.choice((0, 1, 200)))
        yield frame


def _asides(random: Random) -> Iterator[Frame]:
    for _ in range(random.randint(1, 2)):
        yield _aside(random)


def _aside(random: Random) -> Frame:
    """Make a frame that may come at any time; some are invalid."""
    return random.choice(_ASIDES)(random)


_ASIDES: Sequence[Callable[[Random], Frame]] = (
    lambda random: frames.ping(random.randbytes(8)),
    lambda random: frames.ping(ack=True),
    lambda random: frames.settings(*_settings(random)),
    lambda random: frames.window_update(0, random.choice((1, 1000, 100_000))),
    lambda random: frames.priority(random.choice((1, 3, 5, 101)), random.choice((0, 3, 7))),
    lambda random: frames.goaway(),
    lambda random: Frame(random.choice((0x0A, 0x10, 0xFA)), random.randrange(256), 0, b"unknown"),
)


# --- Mutations -----------------------------------------------------------------------------------

_Mutation: TypeAlias = Callable[[Random, list[Frame], int], None]
"""Mutates a conversation at the frame with this index."""


def _drop(random: Random, spoken: list[Frame], at: int) -> None:
    del spoken[at]


def _duplicate(random: Random, spoken: list[Frame], at: int) -> None:
    spoken.insert(random.randint(at, len(spoken)), spoken[at])


def _move(random: Random, spoken: list[Frame], at: int) -> None:
    frame = spoken.pop(at)
    spoken.insert(random.randint(0, len(spoken)), frame)


def _insert(random: Random, spoken: list[Frame], at: int) -> None:
    spoken.insert(at, _aside(random))


def _change_kind(random: Random, spoken: list[Frame], at: int) -> None:
    spoken[at] = spoken[at]._replace(kind=random.randrange(11))


def _change_flags(random: Random, spoken: list[Frame], at: int) -> None:
    flag = random.choice((Flag.END_STREAM, Flag.END_HEADERS, Flag.PADDED, Flag.PRIORITY, 0x40))
    spoken[at] = spoken[at]._replace(flags=spoken[at].flags ^ flag)


def _change_stream(random: Random, spoken: list[Frame], at: int) -> None:
    spoken[at] = spoken[at]._replace(stream=random.choice((0, 1, 2, 3, 5, 7, 101, 2**31 - 1)))


def _change_payload(random: Random, spoken: list[Frame], at: int) -> None:
    payload = bytearray(spoken[at].payload)
    if payload:
        payload[random.randrange(len(payload))] ^= 1 << random.randrange(8)
        spoken[at] = spoken[at]._replace(payload=bytes(payload))


def _cut_payload(random: Random, spoken: list[Frame], at: int) -> None:
    payload = spoken[at].payload
    spoken[at] = spoken[at]._replace(payload=payload[: random.randrange(len(payload) + 1)])


def _lengthen_payload(random: Random, spoken: list[Frame], at: int) -> None:
    more = random.randbytes(random.choice((1, 1, 5, 300)))
    spoken[at] = spoken[at]._replace(payload=spoken[at].payload + more)


def _change_number(random: Random, spoken: list[Frame], at: int) -> None:
    frame = spoken[at]
    if frame.kind in (Kind.WINDOW_UPDATE, Kind.RST_STREAM, Kind.SETTINGS) and frame.payload:
        number = random.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1))
        spoken[at] = frame._replace(payload=frame.payload[:-4] + number.to_bytes(4, "big"))


def _ask_again(random: Random, spoken: list[Frame], at: int) -> None:
    stream = random.choice((1, 2, 3, 5, 7, 9))
    block = random.choice(BLOCKS)
    spoken.insert(at, frames.headers(stream, block, end_stream=random.random() < 0.5))


def _for_a_stream(random: Random, spoken: list[Frame], at: int) -> None:
    stream = random.choice((1, 1, 3, 5, 9))
    spoken.insert(
        at,
        random.choice(
            (
                frames.rst_stream(stream),
                frames.window_update(stream, random.choice((0, 1, 50, 2**31 - 1))),
                frames.data(stream, b"xx", end_stream=random.random() < 0.5),
                frames.priority(stream, random.choice((0, stream))),
                frames.headers(stream, TRAILERS, end_stream=random.random() < 0.8),
                frames.continuation(stream, b""),
            )
        ),
    )


_MUTATIONS: Sequence[_Mutation] = (
    _drop,
    _duplicate,
    _move,
    _insert,
    _change_kind,
    _change_flags,
    _change_stream,
    _change_payload,
    _cut_payload,
    _lengthen_payload,
    _change_number,
    _ask_again,
    _for_a_stream,
    _for_a_stream,
)


def mutated(random: Random) -> Conversation:
    """Generate a conversation, and mutate most of them in one to three places."""
    spoken = conversation(random)
    if random.random() < _MUTATED:
        for _ in range(random.choice((1, 1, 2, 3))):
            if spoken:
                # Prefer later frames: damage to the initial settings is rarely interesting.
                at = max(random.randrange(len(spoken)), random.randrange(len(spoken)))
                random.choice(_MUTATIONS)(random, spoken, at)
    said = [frames.PREFACE, *map(bytes, spoken)]
    if random.random() < 0.03:
        return _cut(_damaged(random, b"".join(said)))
    return said


def _cut(octets: bytes) -> Conversation:
    """Split bytes into frames by their length fields."""
    parts = [octets[: len(frames.PREFACE)]]
    at = len(frames.PREFACE)
    while at < len(octets):
        size = frames.HEAD_BYTES + int.from_bytes(octets[at : at + 3], "big")
        parts.append(octets[at : at + size])
        at += size
    return parts


def _damaged(random: Random, said: bytes) -> bytes:
    """Mutate bytes regardless of frame boundaries, including length fields."""
    octets = bytearray(said)
    where = random.randrange(len(octets))
    change = random.randrange(3)
    if change == 0:
        octets[where] ^= 1 << random.randrange(8)
    elif change == 1:
        del octets[where]
    else:
        octets.insert(where, random.randrange(256))
    return bytes(octets)
