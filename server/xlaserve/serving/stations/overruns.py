"""Models slower on the event loop than their warm-up: they leave it at once."""

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
"""Most repetitions; the first within the limit shows that the machine was slow, not the model."""

_FREEZE_SECONDS = 0.01
"""An execution that takes so long by itself would be noticed by all clients: its model never comes
back to the event loop."""

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
"""Longest absence of a model that takes a little more than the limit; it doubles each time."""


class Overruns:
    """Takes models off the event loop, and lets back those that were only disturbed.

    Any execution may be held up by another process, or by a thread that has Python's lock. So one
    that overran is repeated in a thread, on the same inputs: what takes as long again is the
    model's own doing.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._away: weakref.WeakSet[Served] = weakref.WeakSet()
        """Models whose station avoids the event loop for now."""
        self._pauses: weakref.WeakKeyDictionary[Served, float] = weakref.WeakKeyDictionary()
        """Seconds each had to stay away when it overran last."""
        self._log = structlog.get_logger("execution")

    def is_away(self, instance: Served) -> bool:
        """Tell whether a model must not be executed on the event loop."""
        return instance in self._away

    def overran(
        self,
        work: HostWork,
        executable: Executable,
        inputs: Mapping[str, Value],
        seconds: float,
        limit: float,
    ) -> None:
        """Move the model off the event loop, and test in a thread whether it may return."""
        instance = work.instance
        if instance in self._away:
            return
        self._away.add(instance)
        instance.renew()
        # The memory of a request may be another's by the time that a thread looks at it.
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
        """Return the seconds of the quickest of some executions, in a thread."""
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
            # It may be unloaded by then, and its memory has to be free.
            asyncio.get_running_loop().call_later(
                pause, self._come_back, found, context=outside_call()
            )

    def _come_back(self, found: "weakref.ref[Served]") -> None:
        instance = found()
        # What has left may be closed: there is nothing by which a station could be chosen.
        if instance is not None and not instance.has_left:
            self._away.discard(instance)
            instance.renew()
