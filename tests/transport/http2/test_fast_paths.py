"""The engine's fast paths are equivalent to the general path: bytes in, state and bytes out.

One engine has fast paths, the other none. Both get the same reads and must agree in stream
states, windows and answers, byte for byte.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.frames import (
    Flag,
    Frame,
    Kind,
    Setting,
    data,
    head,
    headers,
    literals,
    padded,
    ping,
    rst_stream,
    settings,
    window_update,
)
from support.memory_client import REQUEST, MemoryClient, Streaming, Unary, answer, request

from xlaserve.grpc.http2.messages import PREFIX, PREFIX_BYTES, StreamingReader
from xlaserve.grpc.http2.stream import ServerStream
from xlaserve.net.ledger import Kind as Held

MOST = 50_000
"""Largest message in bytes."""
LIMITS: Mapping[str, Any] = {
    "max_message_bytes": MOST,
    "max_frame_bytes": 20_000,
    "stream_window_bytes": 30_000,
    "connection_window_bytes": 1 << 20,
    "max_streams": 3,
    "max_control_frames": 10**6,
}


class Waiting:
    """A call that waits for the test to answer its request."""

    awaits_client = False

    def cancel(self, reason: str) -> None: ...


class Keeping(Unary):
    """A route whose requests wait to be answered, each with a call."""

    def begin(self, stream: ServerStream) -> None:
        super().begin(stream)
        stream.call = Waiting()


ROUTES: Mapping[str, type[Keeping] | type[Streaming]] = {"unary": Keeping, "streaming": Streaming}


def fast(route: str = "unary", **limits: Any) -> MemoryClient:
    return MemoryClient(ROUTES[route](), **{**LIMITS, **limits})


def general(route: str = "unary", **limits: Any) -> MemoryClient:
    """Return a client of an engine without fast paths."""
    client = fast(route, **limits)
    core: Any = client.core
    reader = core._reader
    reader._data.whole_message = lambda *frame: False
    reader._data.empty_end = lambda stream: False
    reader._data.next_message = lambda *frame: False
    reader._data.run = lambda *frame: 0
    reader._headers.open_next = lambda stream_id, block: False
    sender = core._sender
    sender._pump_long = lambda: None
    sender.answer = sender._long_answer

    sender.short_data = lambda *given: False
    return client


def told(client: MemoryClient) -> dict[str, object]:
    """Return all state that must not depend on the path."""
    core: Any = client.core
    return {
        "failed": None if core.failed is None else core.failed.code,
        "left": core._windows.left,
        "window": core._sender.window,
        "highest": core._streams.highest,
        "streams": {number: _of(stream) for number, stream in core.streams.items()},
        "begun": {
            n: (s.problem, s.compressed, None if s.message is None else bytes(s.message))
            for n, s in client.route.streams.items()
        },
    }


def _waiting(stream: ServerStream) -> tuple[object, ...]:
    """Return the received and still unread part of a streaming request, which is counted for it."""
    reader = stream.reader
    if not isinstance(reader, StreamingReader):
        return ()
    return bytes(reader.received), stream.charged, stream.reserved


def _of(stream: ServerStream) -> tuple[object, ...]:
    # The received bytes of a request that has ended do not matter.
    received = () if stream.ended_by_client else (stream.received, stream.recv_window)
    return (
        stream.state,
        stream.begun,
        stream.problem,
        received,
        stream.send_window,
        stream.unsent,
        _waiting(stream),
    )


class Both:
    """Both engines, fed with the same input."""

    def __init__(self, route: str = "unary", **limits: Any) -> None:
        self.fast, self.general = fast(route, **limits), general(route, **limits)

    def send(self, *frames: Frame | bytes) -> None:
        """Send frames as one read, and compare."""
        ours, theirs = self.fast.send(*frames), self.general.send(*frames)

        assert theirs == ours
        self.compare()

    def answer(self, stream: int, size: int) -> None:
        """Answer a request on both."""
        for client in (self.fast, self.general):
            answer(client.route.streams[stream], bytes(size))

        assert self.general.taken() == self.fast.taken()
        self.compare()

    def compare(self) -> None:
        assert told(self.general) == told(self.fast)
        for stream in self.fast.core.streams.values():
            # A waiting message is charged whole on either path, at most with its prefix.
            held = len(stream.message or b"")
            if stream.call is not None and held:
                assert held <= stream.charged <= held + PREFIX_BYTES
        if not self.fast.core.streams:
            assert 0 == self.fast.ledger.held


def message(size: int, flag: int = 0, declared: int | None = None) -> bytes:
    return PREFIX.pack(flag, size if declared is None else declared) + bytes(size)


END = data(1, end_stream=True)
EMPTY = data(1)
SMALL = message(3)
LONG = message(40_000)


def sized(size: int) -> Frame:
    """Open stream 1 with this content-length."""
    return headers(1, request(("content-length", str(size))))


def run(octets: bytes, size: int, *, end: bool = False) -> tuple[Frame, ...]:
    """Split bytes into equal frames on stream 1."""
    cuts = range(0, len(octets), size)
    return tuple(
        data(1, octets[at : at + size], end_stream=end and at + size >= len(octets)) for at in cuts
    )


OPEN = headers(1, REQUEST)
SEQUENCES: dict[str, Sequence[Frame]] = {
    "a message that ends": (OPEN, data(1, SMALL, end_stream=True)),
    "a message, and the end": (OPEN, data(1, SMALL), END),
    "a message, nothing, and the end": (OPEN, data(1, SMALL), EMPTY, END),
    "a message, and a byte more": (OPEN, data(1, SMALL), data(1, b"a", end_stream=True)),
    "a message, and a byte more that ends nothing": (OPEN, data(1, SMALL), data(1, b"a"), END),
    "a message in padding": (OPEN, padded(data(1, SMALL, end_stream=True), 7)),
    "a message in padding, and the end": (OPEN, padded(data(1, SMALL), 7), END),
    "a message, and an end of padding": (OPEN, data(1, SMALL), padded(END, 3)),
    "a message, and padding": (OPEN, data(1, SMALL), padded(EMPTY, 3), END),
    "two messages in a frame": (OPEN, data(1, SMALL * 2, end_stream=True)),
    "two messages": (OPEN, data(1, SMALL), data(1, SMALL, end_stream=True)),
    "a message and a trailer": (OPEN, data(1, SMALL), headers(1, b"\0\1a\1b", end_stream=True)),
    "a trailer and no message": (OPEN, headers(1, b"\0\1a\1b", end_stream=True)),
    "an empty message": (OPEN, data(1, message(0), end_stream=True)),
    "an empty message, and the end": (OPEN, data(1, message(0)), END),
    "a message in two": (OPEN, data(1, SMALL[:6]), data(1, SMALL[6:], end_stream=True)),
    "a prefix in two": (OPEN, data(1, SMALL[:4]), data(1, SMALL[4:], end_stream=True)),
    "a message that is cut off": (OPEN, data(1, SMALL[:6], end_stream=True)),
    "a prefix that is cut off": (OPEN, data(1, SMALL[:4], end_stream=True)),
    "no message": (OPEN, END),
    "nothing at all": (headers(1, REQUEST, end_stream=True),),
    "a compressed message": (OPEN, data(1, message(3, 1), end_stream=True)),
    "a compressed message, and the end": (OPEN, data(1, message(3, 1)), END),
    "a wrong flag": (OPEN, data(1, message(3, 2), end_stream=True)),
    "a message that says more": (OPEN, data(1, message(3, 0, 4), end_stream=True)),
    "a message that says less": (OPEN, data(1, message(3, 0, 2), end_stream=True)),
    "a message that says too much": (OPEN, data(1, message(3, 0, MOST + 1), end_stream=True)),
    "the content-length": (sized(8), data(1, SMALL, end_stream=True)),
    "less than the content-length": (sized(9), data(1, SMALL, end_stream=True)),
    "more than the content-length": (sized(7), data(1, SMALL, end_stream=True)),
    "less than it, and the end": (sized(9), data(1, SMALL), END),
    "it, and the end": (sized(8), data(1, SMALL), END),
    "DATA behind the end": (OPEN, data(1, SMALL, end_stream=True), data(1, b"a")),
    "the end twice": (OPEN, data(1, SMALL), END, END),
    "the largest frame": (OPEN, data(1, message(19_995), end_stream=True)),
    "a frame of the window": (OPEN, *run(message(29_995), 20_000, end=True)),
    "frames past the window": (OPEN, data(1, message(19_995)), data(1, bytes(10_001))),
    "frames of 4 KB": (OPEN, *run(LONG, 4096, end=True)),
    "frames of 4 KB less a byte": (OPEN, *run(LONG, 4095, end=True)),
    "frames of 4 KB and a byte": (OPEN, *run(LONG, 4097, end=True)),
    "frames of 16 KB": (OPEN, *run(LONG, 16_384, end=True)),
    "frames of 20,000": (OPEN, *run(LONG, 20_000, end=True)),
    "and the end": (OPEN, *run(LONG, 5000), END),
    "and a byte more": (OPEN, *run(LONG, 5000), data(1, b"a", end_stream=True)),
    "frames of more": (OPEN, *run(LONG + bytes(5000), 5000, end=True)),
    "frames of less": (OPEN, *run(LONG[:-5000], 5000, end=True)),
    "with their content-length": (sized(40_005), *run(LONG, 5000, end=True)),
    "with more": (sized(40_000), *run(LONG, 5000, end=True)),
    "with less": (sized(40_006), *run(LONG, 5000, end=True)),
    "frames that are padded": (
        OPEN,
        *(padded(frame, 9 * (n % 2)) for n, frame in enumerate(run(LONG, 5000, end=True))),
    ),
    "frames between others": (
        OPEN,
        *(other for frame in run(LONG, 5000) for other in (frame, ping(), EMPTY)),
        END,
    ),
    "a run beside one of another stream": (
        OPEN,
        headers(3, REQUEST),
        *(
            one
            for frame in run(LONG[:30_000], 5000)
            for one in (frame, frame._replace(stream=3), frame._replace(stream=3))
        ),
    ),
    "a run that its client resets": (
        OPEN,
        *run(LONG[:20_000], 5000),
        rst_stream(1),
        *run(LONG, 5000),
    ),
    "a frame with flags that are not known": (
        OPEN,
        data(1, SMALL)._replace(flags=0xF6 & ~Flag.PADDED),
        END,
    ),
    "a run of frames with flags that are not known": (
        OPEN,
        *(frame._replace(flags=0x40 * (n % 2)) for n, frame in enumerate(run(LONG, 5000))),
        END,
    ),
    "a frame too large in a run": (OPEN, *run(LONG[:15_000], 5000), data(1, bytes(20_001))),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequence(name: str, route: str) -> None:
    """Tested both as one read, and with a read per frame."""
    frames = SEQUENCES[name]
    at_once, one_by_one = Both(route), Both(route)
    for frame in frames:
        one_by_one.send(frame)
    at_once.send(*frames)

    def end(both: Both) -> tuple[object, ...]:
        said = told(both.fast)
        return (
            said["failed"],
            said["begun"],
            [f for f in both.fast.all if f.kind == Kind.RST_STREAM],
        )

    assert end(one_by_one) == end(at_once)


@pytest.mark.parametrize("behind", range(1, 12))
@pytest.mark.parametrize("name", ["frames of 4 KB", "frames of 16 KB", "frames between others"])
def test_a_run_may_end_with_a_frame_that_has_come_in_part(name: str, behind: int) -> None:
    """Either its header or its payload is incomplete."""
    octets = b"".join(map(bytes, SEQUENCES[name]))
    places = [0, *_ends(SEQUENCES[name])]
    for place in places[2:5]:
        both = Both()
        both.send(octets[: place + behind])
        both.send(octets[place + behind :])


def _ends(frames: Sequence[Frame]) -> Iterator[int]:
    at = 0
    for frame in frames:
        at += len(bytes(frame))
        yield at


WIDE: Mapping[str, Any] = {
    "max_frame_bytes": 1 << 20,
    "stream_window_bytes": 1 << 20,
    "max_message_bytes": 1 << 20,
}
TIGHT: Mapping[str, Any] = {"stream_window_bytes": 10_000, "max_message_bytes": 10_002}


@pytest.mark.parametrize("size", [9_993, 9_994, 9_995, 9_996, 10_002, 10_003])
@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("ends", [True, False])
def test_a_message_about_as_large_as_its_window_and_the_limit(
    size: int, frames: int, ends: bool
) -> None:
    """A client with an empty window could not even end the request: it is granted more (6.9)."""
    both = Both(**TIGHT)
    for frame in (OPEN, *run(message(size), -(-(size + 5) // frames), end=ends)):
        both.send(frame)
    if both.fast.core.streams and not ends:
        assert both.fast.core.streams[1].recv_window > 0
        both.send(END)


@pytest.mark.parametrize("size", [65_535, 65_536, 70_000, 131_072, 200_000])
@pytest.mark.parametrize("more", [0, 5000])
def test_a_run_of_frames_whose_length_takes_three_octets(size: int, more: int) -> None:
    """4.1: the length field of a frame has three octets."""
    both = Both(**WIDE)
    octets = message(500_000)
    first, rest = octets[: 100_000 + more], octets[100_000 + more :]
    both.send(OPEN, data(1, first))
    for part in (rest[: 2 * size], rest[2 * size :]):
        both.send(*run(part, size))
    both.send(END)

    assert octets[PREFIX_BYTES:] == both.fast.route.streams[1].message


@pytest.mark.parametrize("end", [END, data(1, b"a", end_stream=True), EMPTY])
def test_under_pressure_a_short_message_is_reserved_like_any_other(end: Frame) -> None:
    """On either path the ledger decides then."""
    both = Both()
    for client in (both.fast, both.general):
        client.ledger.is_pressed = True
    both.send(OPEN, data(1, SMALL), end)


@pytest.mark.parametrize("reserved", [0, 3, 8, 100])
def test_each_message_of_many_is_counted_and_kept(reserved: int) -> None:
    """A message in a single frame, after one that was read and after one that was not."""
    both = Both("streaming")
    both.send(OPEN)
    for taken in (True, True, False, False):
        for client in (both.fast, both.general):
            stream = client.route.streams[1]
            assert stream.expect(reserved)
        both.send(data(1, SMALL), data(1, SMALL))
        for client in (both.fast, both.general):
            reader = client.route.streams[1].reader
            assert isinstance(reader, StreamingReader)
            while taken and reader.next() is not None:
                pass
        both.compare()
    both.send(END)


@pytest.mark.parametrize("size", [0, 1, 5, 16_383, 16_384, 16_385, 30_000])
@pytest.mark.parametrize("paused", [False, True])
def test_messages_of_an_answer_of_many_leave_in_their_order(size: int, paused: bool) -> None:
    """Until the stream's window is used up, and again once it is widened."""
    both = Both("streaming")
    both.send(OPEN, data(1, SMALL))
    for number in range(6):
        for client in (both.fast, both.general):
            stream = client.route.streams[1]
            if not number:
                stream.send_headers(b"\x88")
            if paused and number == 2:
                client.core.pause()
            octets = bytes((number,)) * size
            assert stream.send_data((PREFIX.pack(0, size), octets), size + PREFIX_BYTES)
        assert both.general.taken() == both.fast.taken()
        both.compare()
    if paused:
        for client in (both.fast, both.general):
            client.core.resume()
    both.send(window_update(1, 200_000), window_update(0, 200_000))
    for client in (both.fast, both.general):
        client.route.streams[1].send_headers(b"\x88", end=True)
    both.send(END)

    assert not both.fast.core.streams


# # --- random conversations
# ------------------------------------------------------------------------


class Conversation:
    """Random frames, mostly valid, and answers."""

    def __init__(self, random: Random, route: str) -> None:
        self.random = random
        self.both = Both(route)
        self.next = 1
        self.unsent: dict[int, bytes] = {}
        self.opened: list[int] = []
        self.both.send(self.open())

    def open(self) -> Frame:
        stream = self.next
        self.next += self.random.choice((2, 2, 2, 2, 2, 2, 4))
        octets = message(self.random.choice((0, 1, 3, 300, 5000, 16_379, 40_000)))
        lengths = (None, None, None, len(octets), len(octets), len(octets) - 1)
        declared = self.random.choice(lengths)
        lines = [] if declared is None else [("content-length", str(max(0, declared)))]
        self.unsent[stream] = octets
        self.opened.append(stream)
        return headers(stream, request(*lines))

    def upload(self) -> Frame:
        opened = set(self.both.fast.core.streams)
        waiting = [stream for stream in self.unsent if stream in opened]
        stream = self.random.choice([*waiting * 3, self.opened[-1]])
        octets = self.unsent.get(stream, b"")
        size = self.random.choice((1, 4096, 5000, 16_384, 20_000, 20_000))
        now, rest = octets[:size], octets[size:]
        if self.random.random() < 0.03:
            now += b"\0"
        ends = not rest and self.random.random() < 0.6
        self.unsent[stream] = rest
        if not rest and (ends or self.random.random() < 0.3):
            self.unsent.pop(stream)
        frame = data(stream, now, end_stream=ends)
        return padded(frame, self.random.choice((0, 9))) if self.random.random() < 0.1 else frame

    def other(self) -> Frame:
        stream = self.random.choice((0, *self.opened))
        opened = self.random.choice([*self.both.fast.core.streams] or self.opened[-1:])
        return self.random.choice(
            (
                ping(),
                window_update(stream, 1000),
                window_update(0, 60_000),
                settings((Setting.INITIAL_WINDOW_SIZE, self.random.choice((10, 20_000, 65_535)))),
                rst_stream(opened),
                headers(opened, literals([("x-end", "1")]), end_stream=True),
                Frame(0x30, 0, 0, b"new"),
            )
        )

    def step(self) -> None:
        """Send some frames as one read, or have a request answered."""
        waiting = [n for n in self.both.fast.core.streams if n in self.both.fast.route.streams]
        if waiting and self.random.random() < 0.4:
            stream = self.random.choice(waiting)
            self.both.answer(stream, self.random.choice((0, 10, 9000, 17_000, 50_000)))
            return
        makers = [self.open, self.upload, self.upload, self.upload, self.upload]
        frames = [
            (self.other if self.random.random() < 0.06 else self.random.choice(makers))()
            for _ in range(self.random.randint(1, 5))
        ]
        self.both.send(*frames)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("seed", range(12))
def test_conversation(seed: int, route: str) -> None:
    """Whatever is sent and answered, both engines end in the same state."""
    random = Random(f"{seed} {route}")
    steps = 0
    for _ in range(6):
        conversation = Conversation(random, route)
        for _ in range(40):
            if not conversation.both.fast.alive:
                break
            conversation.step()
            steps += 1

    assert steps > 40


# # --- interleaved long messages
# -------------------------------------------------------------------

SIZES = (1, 4095, 4096, 5000, 16_384, 19_000)
"""Payload sizes around the smallest that the run path takes."""
WAYS: Mapping[str, Callable[[Frame], Sequence[Frame]]] = {
    "plain": lambda frame: (frame,),
    "padded": lambda frame: (padded(frame, 9),),
    "flag": lambda frame: (frame._replace(flags=0x40),),
    "reserved": lambda frame: (frame._replace(stream=frame.stream | 1 << 31),),
    "empty": lambda frame: (data(frame.stream), frame),
    "reset": lambda frame: (frame, rst_stream(frame.stream)),
    "ping": lambda frame: (ping(), window_update(frame.stream, 1), frame),
    "end": lambda frame: (frame._replace(flags=Flag.END_STREAM),),
}
TURNS = st.tuples(
    st.sampled_from((1, 3, 5)),
    st.sampled_from(SIZES),
    st.sampled_from((*("plain",) * 12, *WAYS)),
)
"""A frame: its stream, payload size and variant."""
CUTS = st.lists(st.sampled_from((1, 8, 9, 100, 5000, 16_393, 1 << 17, 1 << 18)), max_size=8)
WAYS_OF_SIZE = (None, 0, 0, -1, 1)
"""Error of the content-length, or None if there is none."""


def turned(
    turns: Sequence[tuple[int, int, str]], sizes: Sequence[int], more: Sequence[int | None]
) -> Iterator[Frame]:
    """Write three requests with interleaved message frames; the remaining bytes come last."""
    left = {}
    for number, size, length in zip((1, 3, 5), sizes, more, strict=True):
        octets = bytearray(message(size))
        octets[PREFIX_BYTES:] = Random(number).randbytes(size)
        left[number] = bytes(octets)
        told = () if length is None else (("content-length", str(len(octets) + length)),)
        yield headers(number, request(*told))
    for number, size, way in turns:
        now, left[number] = left[number][:size], left[number][size:]
        frame = data(number, now)
        yield from WAYS[way](frame)
    for number, rest in left.items():
        frames = run(rest, 19_000, end=True) or (END,)
        yield from (frame._replace(stream=number) for frame in frames)


def _but_for_the_connection(frames: Sequence[Frame]) -> list[Frame]:
    return [f for f in frames if (f.kind, f.stream) != (Kind.WINDOW_UPDATE, 0)]


@pytest.mark.parametrize("window", [70_000, 1 << 20])
@given(
    st.lists(TURNS, max_size=20),
    st.tuples(*[st.sampled_from((0, 9_000, 29_995, 40_000, 50_000, 50_001))] * 3),
    st.tuples(*[st.sampled_from(WAYS_OF_SIZE)] * 3),
    CUTS,
)
def test_long_messages_by_turns(
    window: int,
    turns: list[tuple[int, int, str]],
    sizes: tuple[int, int, int],
    more: tuple[int | None, ...],
    cuts: list[int],
) -> None:
    """For any frames in between, and any read boundaries.

    The connection's window is widened by the same amount, though possibly after other frames.
    """
    both = Both(connection_window_bytes=window)
    octets = b"".join(map(bytes, turned(turns, sizes, more)))
    for cut in [*cuts, len(octets)]:
        ours, theirs = (c.send(octets[:cut]) for c in (both.fast, both.general))
        octets = octets[cut:]
        ended = both.general.core.failed
        if ended is not None:
            assert both.fast.core.failed is not None
            assert ended.code is both.fast.core.failed.code
            return

        assert _but_for_the_connection(theirs) == _but_for_the_connection(ours)
        assert _granted(both.general) == _granted(both.fast)
        assert {**told(both.general), "left": 0} == {**told(both.fast), "left": 0}


def _granted(client: MemoryClient) -> int:
    """Return the remaining connection window, as the client and the server count it."""
    frames = [f for f in client.all if (f.kind, f.stream) == (Kind.WINDOW_UPDATE, 0)]
    core: Any = client.core
    left: int = core._windows.left
    return left - sum(int.from_bytes(frame.payload) for frame in frames)


def test_a_run_asks_no_more_of_a_client_than_frame_by_frame() -> None:
    """The window of the connection is widened after each frame that leaves it half empty."""
    both = Both(connection_window_bytes=70_000)
    numbers = (1, 3, 5)
    cut = [[f._replace(stream=n) for f in run(LONG, 5000, end=True)] for n in numbers]
    frames = [frame for turn in zip(*cut, strict=True) for frame in turn]
    for client in (both.fast, both.general):
        client.send(*(headers(n, REQUEST) for n in numbers), *frames)

    assert both.general.alive
    assert both.fast.alive
    route: Any = both.fast.route
    assert dict.fromkeys(numbers, LONG[PREFIX_BYTES:]) == route.messages


@pytest.mark.parametrize("streams", [2, 3])
def test_a_run_takes_the_frames_of_all_long_messages(streams: int) -> None:
    """All frames of a read are handled together: none goes through the per-frame rules."""
    client = fast(max_streams=streams)
    core: Any = client.core
    numbers = [1 + 2 * n for n in range(streams)]
    cut = [[f._replace(stream=n) for f in run(LONG[:25_000], 5000)] for n in numbers]
    client.send(*(headers(n, REQUEST) for n in numbers), *(frames[0] for frames in cut))
    taken: list[int] = []
    original = core._reader._data.run

    def noted(*frame: Any) -> int:
        taken.append(original(*frame))
        return taken[-1]

    core._reader._data.run = noted
    client.send(*(frame for turn in zip(*cut, strict=True) for frame in turn[:]))

    assert [streams * 5 * 5009] == taken


@given(
    st.lists(st.sampled_from((16_384, 16_385, 40_000, 90_000)), min_size=3, max_size=3),
    st.lists(
        st.tuples(
            st.sampled_from((0, 1, 3, 5)), st.sampled_from((1, 16_383, 16_384, 16_385, 120_000))
        ),
        max_size=8,
    ),
)
def test_long_answers_by_turns(sizes: list[int], windows: list[tuple[int, int]]) -> None:
    """However the windows open, frames are equal; the ledger counts the bytes not yet sent."""
    both = Both()
    both.send(
        *(f for n in (1, 3, 5) for f in (headers(n, REQUEST), data(n, SMALL, end_stream=True)))
    )
    for number, size in zip((1, 3, 5), sizes, strict=True):
        both.answer(number, size)
    for number, increment in windows:
        both.send(
            window_update(number, increment) if number in (0, *both.fast.core.streams) else b""
        )
        for client in (both.fast, both.general):
            unsent = sum(stream.unsent for stream in client.core.streams.values())
            assert unsent == client.core.account.held_for(Held.ANSWERS)


def test_long_answers_leave_without_a_look_at_each_frame() -> None:
    """Interleaved answers whose frames leave a remainder."""
    client = fast()
    client.send(
        *(f for n in (1, 3) for f in (headers(n, REQUEST), data(n, SMALL, end_stream=True)))
    )
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 1 << 20)))
    for number in (1, 3):
        answer(client.route.streams[number], bytes(400_000))
    client.taken()
    core: Any = client.core
    looked: list[int] = []
    original = core._sender._send

    def noted(stream: Any, most: int) -> None:
        looked.append(stream.id)
        original(stream, most)

    core._sender._send = noted
    frames = client.send(window_update(0, 1 << 20))

    sent = [frame for frame in frames if frame.kind == Kind.DATA and frame.payload]
    assert len(sent) > 30
    assert len(looked) <= 4


@pytest.mark.parametrize("path", ["fast", "general"])
def test_a_header_alone_is_judged(path: str) -> None:
    """An invalid frame is detected before its payload arrives (5.1, 6.1)."""
    client = {"fast": fast, "general": general}[path]()
    client.send(head(10, Kind.DATA, 0, 1))

    assert ["GOAWAY PROTOCOL_ERROR"] == client.ended


def test_the_fast_paths_are_taken() -> None:
    """Otherwise the tests above would compare nothing."""
    client = fast()
    taken = []
    core: Any = client.core
    reader = core._reader
    for name in ("whole_message", "empty_end", "run"):
        original = getattr(reader._data, name)

        def noting(*frame: Any, original: Any = original, name: str = name) -> object:
            done = original(*frame)
            taken.append((name, bool(done)))
            return done

        setattr(reader._data, name, noting)
    client.send(*SEQUENCES["a message, and the end"])
    client.send(headers(3, REQUEST), *(f._replace(stream=3) for f in run(LONG[:25_000], 5000)))

    assert {"whole_message", "empty_end", "run"} == {name for name, done in taken if done}
