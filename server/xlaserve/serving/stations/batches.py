"""Stations that batch calls, on the host or on a device."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from xlaserve.serving.call import current_call, outside_call
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations.batching import ALONE_IN_A_ROW, Batcher
from xlaserve.serving.stations.host import Inline
from xlaserve.serving.stations.station import Station

_RESIDENT = ("resident",)
"""Part of the key of calls with device tensors, which prevents their batching."""


class Batches:
    """Batches calls; ensemble steps with device tensors run alone (a Station)."""

    def __init__(
        self,
        batcher: Batcher,
        alone: Station,
        inline: Inline | None = None,
        *,
        is_ruled: bool = False,
    ) -> None:
        """`inline` immediately executes a call that is probably the only one of its iteration.

        `is_ruled` says that the queue has policies, which then also apply to calls that run alone.
        """
        self._is_ruled = is_ruled
        self._batcher = batcher
        self._alone = alone
        self._inline = inline

    def pending_since(self) -> Iterator[int]:
        """Yield the submission times of queued calls and executions."""
        return chain(self._batcher.pending_since(), self._alone.pending_since())

    def begin(self, call: InferCall) -> None:
        """Execute a call immediately or in a batch; raises Overloaded."""
        inline, batcher = self._inline, self._batcher
        if call.resident and not self._is_ruled:
            self._alone.begin(call)
        elif call.resident:
            call.key = (*call.key, _RESIDENT)
            batcher.submit(call)
        elif (
            inline is not None
            and batcher.in_a_row >= ALONE_IN_A_ROW
            and batcher.is_alone(call.started_ns)
        ):
            inline.begin(call, batcher.submit)
            if call.executed is not None:
                batcher.passed(call.executed.ended_ns)
        else:
            batcher.submit(call)

    def retire(self) -> Sequence[InferCall]:
        """Start no more batches; return the queued calls."""
        return self._batcher.retire()


class LoopClock:
    """The engine's clock, with timers of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, now_ns: Callable[[], int]) -> None:
        self._loop = loop
        self.now_ns = now_ns
        """Returns the engine's time."""

    def soon(self, call: Callable[[], None]) -> None:
        """Schedule a callback after all currently ready ones."""
        self._loop.call_soon(call)

    def at(self, time_ns: int, call: Callable[[], None]) -> Callable[[], None]:
        """Schedule a callback outside any call's context; returns a function that cancels it."""
        context = outside_call() if current_call.get() is not None else None
        seconds = (time_ns - self.now_ns()) / 1e9
        return self._loop.call_later(seconds, call, context=context).cancel
