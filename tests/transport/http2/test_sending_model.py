"""Invariants of sending hold for any answers and window changes (RFC 9113 5.2, 6.9).

Random steps of a server and its client; after each step the windows, the ledger and the output
match a simple model.
"""

from collections.abc import Callable
from random import Random

import pytest
from support.frames import Frame, Kind, Setting, data, headers, rst_stream, settings, window_update
from support.memory_client import MESSAGE, OK, REQUEST, STATUS, MemoryClient, Unary
from support.walking import walk

from xlaserve.grpc.http2.states import State
from xlaserve.net.ledger import Kind as Held

STEPS = 60


class Model:
    """The windows that the client has granted, and the bytes sent to it."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.client = MemoryClient(route := Unary(), max_control_frames=10**9, max_resets=10**9)
        self.route = route
        self.initial = 65_535
        self.connection = 65_535
        self.windows: dict[int, int] = {}
        self.expected: dict[int, bytes] = {}
        self.received: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.ending: set[int] = set()
        self.gone: set[int] = set()
        self.paused = False
        self._next = 1

    # --- steps ---

    def open(self) -> None:
        number, self._next = self._next, self._next + 2
        self.client.send(headers(number, REQUEST), data(number, MESSAGE, end_stream=True))
        self.windows[number] = self.initial
        self.expected[number] = self.received[number] = b""

    def answer_whole(self) -> None:
        for number in self._idle():
            body = self._body()
            middle = self.random.randint(0, len(body))
            parts: list[bytes | memoryview] = [body[:middle], memoryview(body)[middle:]]
            self.ending.add(number)
            self.expected[number] += body
            assert self.route.streams[number].answer(OK, parts, len(body), STATUS)
            return

    def send_some(self) -> None:
        for number in self._unended():
            stream, body = self.route.streams[number], self._body()
            if not stream.headers_sent:
                stream.send_headers(OK)
            end = self.random.random() < 0.2
            self.expected[number] += body
            if end:
                self.ending.add(number)
            stream.send_data([body], len(body), end=end)
            return

    def send_trailers(self) -> None:
        for number in self._unended():
            self.ending.add(number)
            self.route.streams[number].send_headers(STATUS, end=True)
            return

    def widen_stream(self) -> None:
        for number in self._open():
            increment = self._window()
            self.windows[number] += increment
            self._take(self.client.send(window_update(number, increment)))
            return

    def widen_connection(self) -> None:
        increment = self._window()
        self.connection += increment
        self._take(self.client.send(window_update(0, increment)))

    def change_initial(self) -> None:
        new = self.random.choice((0, 1, 100, 65_535, 100_000))
        for number in self._open():
            self.windows[number] += new - self.initial
        self.initial = new
        self._take(self.client.send(settings((Setting.INITIAL_WINDOW_SIZE, new))))

    def change_frame(self) -> None:
        size = self.random.choice((16_384, 20_000))
        self._take(self.client.send(settings((Setting.MAX_FRAME_SIZE, size))))

    def pause(self) -> None:
        self.paused = True
        self.client.core.pause()

    def resume(self) -> None:
        self.paused = False
        self.client.core.resume()

    def reset_by_client(self) -> None:
        for number in self._open():
            self.gone.add(number)
            self._take(self.client.send(rst_stream(number)))
            return

    def reset_by_server(self) -> None:
        for number in self._open():
            self.gone.add(number)
            self.route.streams[number].reset()
            return

    # # --- state ---

    def _open(self) -> list[int]:
        return self._shuffled(set(self.windows) - self.ended - self.gone)

    def _unended(self) -> list[int]:
        return self._shuffled(set(self.windows) - self.ending - self.ended - self.gone)

    def _idle(self) -> list[int]:
        return [n for n in self._unended() if not self.route.streams[n].headers_sent]

    def _shuffled(self, numbers: set[int]) -> list[int]:
        return self.random.sample(sorted(numbers), len(numbers))

    def _body(self) -> bytes:
        return self.random.randbytes(self.random.choice((0, 1, 9, 1000, 16_384, 16_385, 90_000)))

    def _window(self) -> int:
        return self.random.choice((1, 7, 1000, 16_384, 200_000))

    # # --- invariants ---

    def look(self) -> None:
        """Take the output, and compare it with the model."""
        self._take(self.client.taken())
        core = self.client.core
        unsent = {number: stream.unsent for number, stream in core.streams.items()}
        for number, stream in core.streams.items():
            left = self.expected[number][len(self.received[number]) :]
            assert len(left) == stream.unsent == stream.parked
            assert self.windows[number] == stream.send_window
            assert stream.state is State.HALF_CLOSED_REMOTE
            sendable = min(self.windows[number], self.connection)
            assert not stream.unsent or sendable <= 0 or self.paused, "it is held back for nothing"
        assert core.account.held_for(Held.ANSWERS) == sum(unsent.values())
        assert {n for n, size in unsent.items() if size} == set(core.blocked)
        assert self.connection == core._sender.window
        assert set(core.streams) == set(self.windows) - self.ended - self.gone

    def _take(self, frames: list[Frame]) -> None:
        for frame in frames:
            if frame.kind == Kind.DATA:
                size = len(frame.payload)
                assert not size or size <= min(self.windows[frame.stream], self.connection)
                assert frame.stream not in self.ended
                self.windows[frame.stream] -= size
                self.connection -= size
                self.received[frame.stream] += frame.payload
                assert self.expected[frame.stream].startswith(self.received[frame.stream])
            if frame.ends_stream:
                assert self.expected[frame.stream] == self.received[frame.stream]
                self.ended.add(frame.stream)


WEIGHTS: dict[Callable[[Model], None], int] = {
    Model.open: 6,
    Model.answer_whole: 5,
    Model.send_some: 6,
    Model.send_trailers: 2,
    Model.widen_stream: 6,
    Model.widen_connection: 4,
    Model.change_initial: 2,
    Model.change_frame: 1,
    Model.pause: 1,
    Model.resume: 3,
    Model.reset_by_client: 1,
    Model.reset_by_server: 1,
}
"""Weight of each step."""


def walked(seed: int, steps: int) -> Model:
    return walk(Model(Random(f"sending {seed}")), WEIGHTS, steps)


@pytest.mark.parametrize("seed", range(40))
def test_the_invariants_hold_at_every_step(seed: int) -> None:
    model = walked(seed, STEPS)

    assert model.client.alive


@pytest.mark.parametrize("seed", range(10))
def test_everything_leaves_when_the_windows_open(seed: int) -> None:
    model = walked(seed, STEPS)
    model.resume()
    for number in model._open():
        # After a SETTINGS frame a window may be far below zero (6.9.2).
        model.windows[number] += 10_000_000
        model._take(model.client.send(window_update(number, 10_000_000)))
    model.connection += 500_000_000
    model._take(model.client.send(window_update(0, 500_000_000)))
    model.look()
    for number in model._unended():
        model.ending.add(number)
        model.route.streams[number].send_headers(STATUS, end=True)
    model.look()

    assert {} == model.client.core.streams
    assert 0 == model.client.ledger.held
    for number in set(model.expected) - model.gone:
        assert model.expected[number] == model.received[number]


@pytest.mark.large
def test_the_invariants_hold_for_long() -> None:
    for seed in range(1000, 1200):
        walked(seed, 500)


@pytest.mark.parametrize("streams", [2, 5, 20])
def test_turns_are_even(streams: int) -> None:
    """However the connection's window opens, no stream is more than one frame ahead."""
    random = Random(f"turns {streams}")
    client = MemoryClient(route := Unary(), max_control_frames=10**9)
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 1 << 30)))
    numbers = [2 * n + 1 for n in range(streams)]
    for number in numbers:
        client.send(headers(number, REQUEST), data(number, MESSAGE, end_stream=True))
    client.core.pause()
    for number in numbers:
        route.streams[number].answer(OK, [bytes(1 << 22)], 1 << 22, STATUS)
    client.core.resume()
    client.taken()
    sent = dict.fromkeys(numbers, 0)
    for _ in range(60):
        increment = random.choice((16_384, 30_000, 100_000))
        for frame in client.send(window_update(0, increment)):
            if frame.kind == Kind.DATA:
                sent[frame.stream] += 1

    assert max(sent.values()) - min(sent.values()) <= 1
