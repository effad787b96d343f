"""An open loop: every request is sent when due, however many are in flight."""

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
"""Sends a numbered request, and yields at each of its tokens; raises XlaserveError."""


@dataclass(slots=True)
class Trace:
    """Observations of one request, all by the same clock."""

    arrival: Arrival
    due: float
    """Its scheduled time, from which latencies count."""
    sent: float
    """Its actual time, later if the client does not keep up."""
    tokens: "array[float]" = field(default_factory=lambda: array("d"))
    status: str = ""
    """OK, or why it failed; empty while its answer has no end."""
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Observed:
    """Results of an open loop."""

    traces: Sequence[Trace]
    begun: float
    """Start of the schedule."""
    cutoff: float
    """End of the measurement."""
    client_cpu: float
    """The share of a core that the client used; at 1 it is the client that was measured."""


async def observe(
    arrivals: Sequence[Arrival],
    send: Send,
    *,
    wait: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Observed:
    """Send all requests when they are due, then wait this many seconds for the rest of answers.

    What is unanswered by then is cancelled, and stays in its trace without a status.
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
                task.result()  # a mistake of ours is no figure
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Observed(traces, begun, cutoff, share)


async def _until(due: float, clock: Callable[[], float]) -> None:
    """Yield to other tasks at least once, so that a late client can catch up."""
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
