"""Closed-loop load: a constant number of requests in flight."""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

OK = "OK"
"""The status of a successful answer; any other status is an error."""

NO_ANSWER = "no answer in time"


@dataclass(frozen=True, slots=True)
class Step:
    """A level of load: the numbers of connections and of requests in flight."""

    connections: int
    streams: int
    """Requests in flight on each connection."""

    @property
    def concurrency(self) -> int:
        """Return the total number of requests in flight."""
        return self.connections * self.streams

    def __str__(self) -> str:
        return f"{self.connections}x{self.streams}"


@dataclass(frozen=True, slots=True)
class Timing:
    """The durations of a step, in seconds."""

    warmup: float
    """Duration of the warm-up; requests sent during it are not counted."""
    duration: float
    timeout: float
    """Timeout for opening connections, and for requests in flight at the end."""


class Connection(Protocol):
    """Sends the benchmark's request repeatedly, and reports answers to the load."""

    def request(self) -> None:
        """Send the request once."""

    def close(self) -> None:
        """Close the connection without reporting requests in flight."""


Connect: TypeAlias = "Callable[[Load, int], Awaitable[Connection]]"
"""Opens a connection for a load, with a number of concurrent requests."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The raw results of one step."""

    step: Step
    seconds: float
    """Seconds between the end of the warm-up and the last answer."""
    latencies: "array[float]"
    """Latencies of successful answers in seconds, in ascending order."""
    errors: "Counter[str]"
    """Status -> number of failed requests."""
    client_cpu: float
    """CPU usage of the client in cores; near 1, the client was the bottleneck."""


class Load:
    """Keeps a constant number of requests in flight, and records the answers."""

    def __init__(self, timing: Timing, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.timing = timing
        self._begin = self._end = self._last = 0.0
        self._latencies = array("d")
        self._errors: Counter[str] = Counter()
        self._open = 0
        self._idle = asyncio.Event()

    def start(self, connections: list[Connection], streams: int) -> None:
        """Send the first requests on every connection; the warm-up starts now."""
        self._begin = self._last = self.clock() + self.timing.warmup
        self._end = self._begin + self.timing.duration
        self._open = len(connections) * streams
        for connection in connections:
            for _ in range(streams):
                connection.request()

    def answered(self, connection: Connection, started: float, status: str) -> None:
        """Record an answer, and send the next request unless the time is up."""
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
        """Record a request as failed, because its connection was lost."""
        if started >= self._begin or self.clock() < self._begin:
            self._last = max(self.clock(), self._begin)
            self._errors[reason] += 1
        self._ended()

    def _ended(self) -> None:
        self._open -= 1
        if self._open <= 0:
            self._idle.set()

    async def finished(self) -> None:
        """Wait until the time is up and all requests have ended, or until the timeout."""
        wait = max(0.0, self._end - self.clock()) + self.timing.timeout
        try:
            await asyncio.wait_for(self._idle.wait(), wait)
        except TimeoutError:
            self._errors[NO_ANSWER] += self._open

    def measured(self, step: Step, client_cpu: float) -> Measured:
        """Return the results so far."""
        latencies = array("d", sorted(self._latencies))
        return Measured(step, self._last - self._begin, latencies, self._errors, client_cpu)


async def run_step(step: Step, timing: Timing, connect: Connect) -> Measured:
    """Open the connections, run the load on them, and return the results.

    Raises ServerUnreachable if a connection cannot be opened.
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
