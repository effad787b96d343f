"""Invariants of receiving hold for any client behavior and framing (RFC 9113 5.2, 6.1, 6.9).

Random steps of a client and its server; after each step windows and messages match a simple
model, and no stream with unsent data is left without a window.
"""

from collections.abc import Callable
from random import Random

import pytest
from support.frames import (
    Frame,
    Kind,
    data,
    headers,
    literals,
    padded,
    ping,
    rst_stream,
    window_update,
)
from support.memory_client import LINES, REQUEST, MemoryClient, Unary, answer
from support.walking import walk

from xlaserve.grpc.http2.frames import DEFAULT_WINDOW
from xlaserve.grpc.http2.messages import PREFIX

STEPS = 80
STREAM, CONNECTION, MAX_FRAME = 3000, 70_000, 16_384
"""Windows that a few frames fill, and the longest frame."""
SIZES = (0, 1, 5, 100, STREAM - 6, STREAM - 5, STREAM, 5000, 66_000, 200_000)
"""Message lengths: within a window, at its edges, and in the memory for long messages."""


class Model:
    """The windows that the server has granted, and the bytes sent to it."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.route = Unary()
        self.client = MemoryClient(
            self.route,
            stream_window_bytes=STREAM,
            connection_window_bytes=CONNECTION,
            max_frame_bytes=MAX_FRAME,
            max_control_frames=10**9,
            max_resets=10**9,
        )
        self.connection = DEFAULT_WINDOW
        self.windows: dict[int, int] = {}
        self.left: dict[int, bytes] = {}
        """Bytes that each stream has still to send."""
        self.messages: dict[int, bytes] = {}
        self.ended: set[int] = set()
        """Streams that the client has ended."""
        self._known_ended: set[int] = set()
        """Streams of `ended` whose end had reached the server before the last step."""
        self.gone: set[int] = set()
        """Streams that either side has reset."""
        self.answered: set[int] = set()
        self._next = 1
        self._take(self.client.all)

    # --- steps ---

    def open(self) -> None:
        number, self._next = self._next, self._next + 2
        message = self.random.randbytes(self.random.choice(SIZES))
        self.messages[number] = message
        self.left[number] = PREFIX.pack(0, len(message)) + message
        self.windows[number] = STREAM
        block = REQUEST
        if self.random.random() < 0.3:
            block = literals([*LINES, ("content-length", str(len(self.left[number])))])
        self._send(headers(number, block))

    def send_some(self) -> None:
        """Send a frame on each of some streams, as one read or cut anywhere."""
        octets = b"".join(bytes(self._frame(number)) for number in self._sending()[:3])
        self._take(self.client.send_at_random(octets, self.random))

    def send_a_run(self) -> None:
        """Send all that one stream's windows allow, in frames of one size."""
        for number in self._sending():
            size = self.random.choice((1000, 1 << 12, MAX_FRAME))
            frames = []
            while (room := self._room(number)) and self.left[number]:
                frames.append(self._cut(number, min(size, room)))
            self._send(*frames)
            return

    def end_late(self) -> None:
        """Send the empty frame with which many clients end a request (6.1)."""
        for number in self._shuffled(set(self.left) - self.ended - self.gone):
            if not self.left[number]:
                self.ended.add(number)
                self._send(data(number, b"", end_stream=True))
                return

    def answer(self) -> None:
        for number in self._begun():
            self.answered.add(number)
            assert answer(self.route.streams[number], b"abc")
            return

    def reset_by_client(self) -> None:
        for number in self._shuffled(set(self.left) - self.gone - self.answered):
            self.gone.add(number)
            self._send(rst_stream(number))
            return

    def reset_by_server(self) -> None:
        for number in self._begun():
            self.gone.add(number)
            self.route.streams[number].reset()
            return

    def send_to_nobody(self) -> None:
        """Send to a reset stream: the connection window is charged nevertheless (5.1)."""
        for number in self._shuffled(self.gone - self.ended):
            if size := min(self.connection, self.random.choice((0, 1, 2000))):
                self.connection -= size
                self._send(data(number, bytes(size)))
            return

    def send_else(self) -> None:
        """Send frames that belong to no request in between."""
        self._send(ping(b"12345678"), window_update(0, 1), Frame(0xEE, 0, 0, b"unknown"))

    # # --- state ---

    def _sending(self) -> list[int]:
        left = {number for number, octets in self.left.items() if octets}
        return self._shuffled(left - self.gone)

    def _begun(self) -> list[int]:
        return self._shuffled(set(self.route.streams) - self.answered - self.gone)

    def _shuffled(self, numbers: set[int]) -> list[int]:
        return self.random.sample(sorted(numbers), len(numbers))

    def _room(self, number: int) -> int:
        return max(0, min(self.windows[number], self.connection, MAX_FRAME))

    # --- frames ---

    def _frame(self, number: int) -> Frame:
        """Return a frame of any size that the windows allow, sometimes with padding."""
        room = self._room(number)
        pad = self.random.choice((0, 0, 0, 1, 7, 255))
        if pad and pad + 1 <= room:
            size = self.random.randint(0, room - pad - 1)
            chunk, self.left[number] = self.left[number][:size], self.left[number][size:]
            self._charge(number, len(chunk) + pad + 1)
            return padded(data(number, chunk), pad)
        sizes = (0, 1, 4, 5, 6, 1000, STREAM, MAX_FRAME, self.random.randint(0, room))
        size = self.random.choice(sizes)
        return self._cut(number, min(size, room))

    def _cut(self, number: int, size: int) -> Frame:
        chunk, self.left[number] = self.left[number][:size], self.left[number][size:]
        self._charge(number, len(chunk))
        ends = not self.left[number] and self.random.random() < 0.7
        if ends:
            self.ended.add(number)
        return data(number, chunk, end_stream=ends)

    def _charge(self, number: int, size: int) -> None:
        self.windows[number] -= size
        self.connection -= size

    def _send(self, *frames: Frame) -> None:
        self._take(self.client.send(*frames))

    def _take(self, frames: list[Frame]) -> None:
        for frame in frames:
            if frame.kind == Kind.WINDOW_UPDATE:
                increment = int.from_bytes(frame.payload, "big")
                assert increment > 0, "6.9: an increment of 0 is an error"
                if frame.stream:
                    assert frame.stream not in self._known_ended, "nothing more is to come on it"
                    self.windows[frame.stream] += increment
                else:
                    self.connection += increment

    # # --- invariants ---

    def look(self) -> None:
        """Take the output, and compare it with the model."""
        self._take(self.client.taken())
        self._known_ended = set(self.ended)
        core = self.client.core
        assert self.client.alive
        assert self.connection == core._windows.left
        assert CONNECTION // 2 <= self.connection <= CONNECTION
        open_ones = set(self.left) - self.gone - self.answered
        assert open_ones == set(core.streams)
        for number in open_ones - self.ended:
            assert self.windows[number] == core.streams[number].recv_window
            assert self.windows[number] > 0, "it could never end"
        assert set(self.route.streams) <= self.ended | self.gone
        for number in self.ended - self.gone - self.answered:
            assert self.messages[number] == self.route.messages[number]


WEIGHTS: dict[Callable[[Model], None], int] = {
    Model.open: 5,
    Model.send_some: 14,
    Model.send_a_run: 8,
    Model.end_late: 4,
    Model.answer: 3,
    Model.reset_by_client: 1,
    Model.reset_by_server: 1,
    Model.send_to_nobody: 2,
    Model.send_else: 1,
}
"""Weight of each step."""


def walked(seed: int, steps: int) -> Model:
    return walk(Model(Random(f"receiving {seed}")), WEIGHTS, steps)


@pytest.mark.parametrize("seed", range(30))
def test_the_invariants_hold_at_every_step(seed: int) -> None:
    walked(seed, STEPS)


@pytest.mark.parametrize("seed", range(10))
def test_everything_comes_whole_and_nothing_is_held(seed: int) -> None:
    """A client that gets the windows it needs completes each message."""
    model = walked(seed, STEPS)
    while model._sending():
        model.send_a_run()
        model.look()
    while set(model.left) - model.ended - model.gone:
        model.end_late()
        model.look()
    while model._begun():
        model.answer()
        model.look()

    assert {} == model.client.core.streams
    assert 0 == model.client.ledger.held


@pytest.mark.large
def test_the_invariants_hold_for_long() -> None:
    for seed in range(1000, 1200):
        walked(seed, 600)
