"""Open-loop load: every request is sent when due, regardless of how many are in flight."""

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias

from xlaserve.bench.generation.schedule import Arrival
from xlaserve.bench.load import OK
from xlaserve.errors import XlaserveError

Send: TypeAlias = Callable[[int, Arrival], AsyncGenerator[None, None]]
"""Sends a request, given its number and arrival, and yields once per token; raises
XlaserveError."""


@dataclass(slots=True)
class Trace:
    """The timestamps of one request, all by the same clock."""

    arrival: Arrival
    due: float
    """Scheduled time of the request, from which latencies are measured."""
    sent: float
    """Time at which the request was sent; later than `due` if the client cannot keep up."""
    tokens: "array[float]" = field(default_factory=lambda: array("d"))
    status: str = ""
    """OK, or the error message; empty if the answer is not finished."""
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Observed:
    """The raw results of an open-loop measurement."""

    traces: Sequence[Trace]
    begun: float
    """Start of the schedule."""
    cutoff: float
    """End of the measurement."""
    client_cpu: float
    """CPU usage of the client in cores; near 1, the client was the bottleneck."""


async def observe(
    arrivals: Sequence[Arrival],
    send: Send,
    *,
    wait: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Observed:
    """Send each request when it is due, then wait up to `wait` seconds for unfinished answers.

    Requests still unfinished then are cancelled; their traces have no status.
    """
    traces: list[Trace] = []
    tasks: list[asyncio.Task[None]] = []
    cpu, begun = time.process_time(), clock()
    try:
        for number, arrival in enumerate(arrivals):
            due = begun + arrival.at
            await _until(due, clock)
            trace = Trace(arrival, due, clock())
            traces.append(trace)
            following = _follow(trace, send(number, arrival), clock)
            tasks.append(asyncio.create_task(following))
        if tasks:
            await asyncio.wait(tasks, timeout=wait)
        cutoff = clock()
        share = (time.process_time() - cpu) / max(cutoff - begun, 1e-9)
        for task in tasks:
            if task.done():
                task.result()  # raise unexpected errors, which are bugs in this client
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Observed(traces, begun, cutoff, share)


async def _until(due: float, clock: Callable[[], float]) -> None:
    """Wait until a time; yields at least once, so that answers are read even behind schedule."""
    while True:
        await asyncio.sleep(max(due - clock(), 0.0))
        if clock() >= due:
            return


async def _follow(
    trace: Trace, tokens: AsyncGenerator[None, None], clock: Callable[[], float]
) -> None:
    try:
        async with aclosing(tokens):
            async for _ in tokens:
                trace.tokens.append(clock())
    except XlaserveError as error:
        trace.status, trace.ended = str(error), clock()
    else:
        trace.status, trace.ended = OK, clock()
