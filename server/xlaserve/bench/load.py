"""A closed loop: a constant number of requests in flight."""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

OK = "OK"
"""The status of an answer that counts; everything else is an error."""

NO_ANSWER = "no answer in time"


@dataclass(frozen=True, slots=True)
class Step:
    """One load: how many requests are in flight, and over how many connections."""

    connections: int
    streams: int
    """Requests in flight on each connection."""

    @property
    def concurrency(self) -> int:
        """Return how many requests are in flight."""
        return self.connections * self.streams

    def __str__(self) -> str:
        return f"{self.connections}x{self.streams}"


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of a step, in seconds."""

    warmup: float
    """Requests that begin in it are sent and not counted."""
    duration: float
    timeout: float
    """Timeout of a connection, and of requests in flight at the end."""


class Connection(Protocol):
    """Sends the one request of the benchmark, and tells the load when it is answered."""

    def request(self) -> None:
        """Send it once more."""

    def close(self) -> None:
        """Close it; no answer to requests in flight is reported."""


Connect: TypeAlias = "Callable[[Load, int], Awaitable[Connection]]"
"""Opens a connection for a number of streams."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one step."""

    step: Step
    seconds: float
    """Time from the first counted request to the last answer."""
    latencies: "array[float]"
    """Latencies of successful answers, in seconds, ascending."""
    errors: "Counter[str]"
    """Number of answers of each other status."""
    client_cpu: float
    """The share of a core that the client used; at 1 it is the client that was measured."""


class Load:
    """Decides which request to send next, and records the answers."""

    def __init__(self, timing: Timing, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.timing = timing
        self._begin = self._end = self._last = 0.0
        self._latencies = array("d")
        self._errors: Counter[str] = Counter()
        self._open = 0
        self._idle = asyncio.Event()

    def start(self, connections: list[Connection], streams: int) -> None:
        """Let every connection send its first requests; the time runs from now."""
        self._begin = self._last = self.clock() + self.timing.warmup
        self._end = self._begin + self.timing.duration
        self._open = len(connections) * streams
        for connection in connections:
            for _ in range(streams):
                connection.request()

    def answered(self, connection: Connection, started: float, status: str) -> None:
        """Count an answer, and send the next request unless the time is up."""
        now = self.clock()
        if started >= self._begin:
            self._last = now
            if status == OK:
                self._latencies.append(now - started)
            else:
                self._errors[status] += 1
        if now < self._end:
            connection.request()
        else:
            self._ended()

    def lost(self, started: float, reason: str) -> None:
        """Count a request that will not be answered: its connection is gone."""
        if started >= self._begin or self.clock() < self._begin:
            self._last = max(self.clock(), self._begin)
            self._errors[reason] += 1
        self._ended()

    def _ended(self) -> None:
        self._open -= 1
        if self._open <= 0:
            self._idle.set()

    async def finished(self) -> None:
        """Return when the time is up and nothing is in flight, or waiting has no use."""
        wait = max(0.0, self._end - self.clock()) + self.timing.timeout
        try:
            await asyncio.wait_for(self._idle.wait(), wait)
        except TimeoutError:
            self._errors[NO_ANSWER] += self._open

    def measured(self, step: Step, client_cpu: float) -> Measured:
        """Return the measurement."""
        latencies = array("d", sorted(self._latencies))
        return Measured(step, self._last - self._begin, latencies, self._errors, client_cpu)


async def run_step(step: Step, timing: Timing, connect: Connect) -> Measured:
    """Open the connections, run the load on them, and return the measurement.

    Raises ServerUnreachable where a connection cannot be opened.
    """
    load = Load(timing)
    connections: list[Connection] = []
    try:
        for _ in range(step.connections):
            connections.append(await connect(load, step.streams))
        wall, cpu = time.monotonic(), time.process_time()
        load.start(connections, step.streams)
        await load.finished()
        share = (time.process_time() - cpu) / (time.monotonic() - wall)
    finally:
        for connection in connections:
            connection.close()
    return load.measured(step, share)
