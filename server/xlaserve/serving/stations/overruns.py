"""Moves models off the event loop that prove slower than their warm-up."""

import asyncio
import weakref
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import structlog

from xlaserve.errors.panics import answerable
from xlaserve.runtime.loaded import Executable, Value
from xlaserve.serving.call import outside_call
from xlaserve.serving.stations.host import HostWork
from xlaserve.serving.stations.station import Served

_REPEATS = 5
"""Maximum repetitions; the first one within the limit shows that the model is not to blame."""

_FREEZE_SECONDS = 0.01
"""A model whose executions take this long never returns to the event loop, because every client
would notice the delay.
"""

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
"""Maximum time off the event loop for slightly slow models; the time doubles with each overrun."""


class Overruns:
    """Moves slow models off the event loop, and returns those that were slow only once.

    Another process or a thread holding the GIL may delay any execution. So an overrunning execution
    is repeated on a thread with the same inputs: if it is slow again, the model is to blame.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._away: weakref.WeakSet[Served] = weakref.WeakSet()
        """Models that currently avoid the event loop."""
        self._pauses: weakref.WeakKeyDictionary[Served, float] = weakref.WeakKeyDictionary()
        """Seconds that each model had to stay off the event loop after its last overrun."""
        self._log = structlog.get_logger("execution")

    def is_away(self, instance: Served) -> bool:
        """Tell whether a model must stay off the event loop."""
        return instance in self._away

    def overran(
        self,
        work: HostWork,
        executable: Executable,
        inputs: Mapping[str, Value],
        seconds: float,
        limit: float,
    ) -> None:
        """Move the model off the event loop, and measure on a thread whether it may return."""
        instance = work.instance
        if instance in self._away:
            return
        self._away.add(instance)
        instance.renew()
        # A copy: the request's memory may be reused before the thread reads it.
        kept = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in inputs.items()}
        repeat = partial(self._quickest, executable, kept, limit)
        judge = partial(self._judge, weakref.ref(instance), seconds, limit)
        try:
            work.in_thread(repeat, judge)
        except RuntimeError as error:  # no thread can be started
            judge(error)

    def _quickest(
        self, executable: Executable, inputs: Mapping[str, Value], limit: float, replica: int
    ) -> float | BaseException:
        """Return the shortest of several repeated executions, in seconds. Runs on a thread."""
        quickest = float("inf")
        for _ in range(_REPEATS):
            begun = self._now_ns()
            try:
                executable.execute(inputs, replica=replica)
            except BaseException as error:
                return answerable(error)
            seconds = (self._now_ns() - begun) / 1e9
            quickest = min(quickest, seconds)
            if quickest <= limit or seconds > _FREEZE_SECONDS * _REPEATS:
                break
        return quickest

    def _judge(
        self,
        found: "weakref.ref[Served]",
        seconds: float,
        limit: float,
        repeated: float | BaseException,
    ) -> None:
        instance = found()
        if instance is None:
            return
        again = seconds if isinstance(repeated, BaseException) else repeated
        if again <= limit:
            self._come_back(found)
            return
        for_good, before = again > _FREEZE_SECONDS, self._pauses.get(instance, 0.0)
        pause = min(_LONGEST_PAUSE_SECONDS, before * 2 or _FIRST_PAUSE_SECONDS)
        if for_good or not before:
            self._log.warning(
                "model moved to threads, too slow for the event loop",
                model=instance.model,
                seconds=round(seconds, 6),
                repeated_seconds=round(again, 6),
                inline_execution_seconds=limit,
                returns="never" if for_good else f"in {pause:g} s, doubled each time",
            )
        self._pauses[instance] = pause
        if not for_good:
            # A weak reference: a pending timer must not keep an unloaded model's memory alive.
            asyncio.get_running_loop().call_later(
                pause, self._come_back, found, context=outside_call()
            )

    def _come_back(self, found: "weakref.ref[Served]") -> None:
        instance = found()
        # A replaced instance may be closed already, and needs no station.
        if instance is not None and not instance.has_left:
            self._away.discard(instance)
            instance.renew()
