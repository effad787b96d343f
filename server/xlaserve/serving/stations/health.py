"""Health of executions: models whose executions hang or fail become unready."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from weakref import WeakKeyDictionary, ref

import structlog

from xlaserve.errors import ExecutionStalled
from xlaserve.runtime.devices.device_failures import device_failure
from xlaserve.serving.call import outside_call
from xlaserve.serving.stations.station import Served

Fail = Callable[[BaseException], None]
"""Fails the calls of an execution; called on the event loop, at most once."""

_MOST_INTERVAL_SECONDS = 1.0
_CHECKS = 4
"""Checks per time limit of an execution."""

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
"""How long a model is unready after a device failure; the pause doubles if the model fails again
within twice the previous pause.
"""

DEFAULT_EXECUTION_SECONDS = 60.0


def _nobody() -> None:
    """Stand in for the weak reference to a missing instance."""


class Execution:
    """An execution that is queued or running."""

    __slots__ = ("begun", "fail", "line", "since")

    def __init__(self, begun: Callable[[], bool], fail: Fail, line: object) -> None:
        self.begun = begun
        """Tells whether a thread has begun the execution."""
        self.fail: Fail | None = fail
        """Fails the execution's calls; None after it was called."""
        self.line = line
        """Queue of executions that run one after the other, such as a device thread; None if there
        is none.
        """
        self.since: float | None = None
        """When the execution was first seen running, or when the previous one in its
        queue ended.
        """


class Watch:
    """The executions of one instance on threads and devices; detects stalled and failed ones."""

    def __init__(self, health: "Health", instance: Served | None = None) -> None:
        self._health = health
        # A weak reference: stations of the instance own the watch, which must not keep it alive.
        self._instance = _nobody if instance is None else ref(instance)
        self._model = "" if instance is None else instance.model
        self.executions: dict[Execution, None] = {}
        self._stalled = 0
        """Abandoned executions that are still running."""
        self._pause = 0.0
        """Seconds of unreadiness after the last device failure."""
        self._failed_at = 0.0
        self._log = structlog.get_logger("execution")

    def check(self) -> None:
        """Raise ExecutionStalled while an execution of the model is stalled."""
        if self._stalled:
            raise ExecutionStalled(self._model, self._health.seconds)

    def begin(self, begun: Callable[[], bool], fail: Fail, line: object = None) -> Execution:
        """Watch an execution until `over` is called; if it stalls, `fail` is called instead."""
        execution = Execution(begun, fail, line)
        self.executions[execution] = None
        self._health.watch_over(self)
        return execution

    def over(self, execution: Execution, result: object) -> bool:
        """Stop watching an execution; return whether its calls still wait for the result."""
        del self.executions[execution]
        self._health.progressed(execution.line)
        if isinstance(result, BaseException):
            self.saw(result)
        if execution.fail is not None:
            return True
        self._stalled -= 1
        if not self._stalled:
            self._log.info("stalled execution finished", model=self._model)
            self._resume()
        return False

    def saw(self, error: BaseException) -> None:
        """Record a failed execution; after a device failure the model is unready for a while."""
        reason, instance = device_failure(error), self._instance()
        if reason is None or instance is None:
            return
        if instance.fault:
            return  # this execution was in flight when an earlier one failed
        now = self._health.now()
        again = now - self._failed_at < 2 * self._pause
        pause = min(_LONGEST_PAUSE_SECONDS, 2 * self._pause) if again else _FIRST_PAUSE_SECONDS
        self._pause, self._failed_at = pause, now
        self._log.error(
            "execution failed on the device",
            model=self._model,
            reason=reason,
            consequence=f"the model is not ready for {pause:g} s",
        )
        instance.suspend("execution failed on the device")
        # A pending timer must not keep an unloaded instance alive: `_resume` uses the weak
        # reference.
        asyncio.get_running_loop().call_later(pause, self._resume, context=outside_call())

    def abandon_late(self, now: float, late: float) -> None:
        """Abandon executions beyond the time limit; `late` is the delay of this check."""
        for execution in list(self.executions):
            if execution.fail is None:
                continue
            if self._stalled and not execution.begun():
                # This execution waits for threads that are stalled.
                self._fail(execution)
            elif execution.begun():
                began = now if execution.since is None else execution.since + late
                execution.since = max(began, self._health.last_progress(execution.line))
                if now - execution.since >= self._health.seconds:
                    self._give_up(execution)

    def _give_up(self, execution: Execution) -> None:
        self._log.error(
            "execution stalled",
            model=self._model,
            seconds=self._health.seconds,
            setting="execution_seconds",
            consequence="the model is not ready until it ends; its thread cannot be stopped",
        )
        instance = self._instance()
        if instance is not None:
            instance.suspend(str(ExecutionStalled(self._model, self._health.seconds)))
        self._fail(execution)

    def _fail(self, execution: Execution) -> None:
        fail, execution.fail = execution.fail, None
        if fail is not None:
            self._stalled += 1
            fail(ExecutionStalled(self._model, self._health.seconds))

    def _resume(self) -> None:
        instance = self._instance()
        if instance is not None and not self._stalled:
            instance.resume()


class Health:
    """Periodically checks the executions of all instances, while there are any."""

    def __init__(
        self,
        seconds: float = DEFAULT_EXECUTION_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seconds` is the time limit of an execution; 0 for none."""
        self.seconds = seconds
        self.now = clock
        self._interval = min(_MOST_INTERVAL_SECONDS, seconds / _CHECKS)
        self._watches: WeakKeyDictionary[Served, Watch] = WeakKeyDictionary()
        self._watched: dict[Watch, None] = {}
        """Watches of instances that have executions."""
        self._progress: WeakKeyDictionary[object, float] = WeakKeyDictionary()
        """Time of the last completion in each queue of executions."""
        self._due: float | None = None
        """Time of the next check; None while no check is scheduled."""

    def watch(self, instance: Served) -> Watch:
        """Return the watch of an instance."""
        found = self._watches.get(instance)
        if found is None:
            found = self._watches[instance] = Watch(self, instance)
        return found

    def watch_over(self, watch: Watch) -> None:
        """Check a watch from now on, until it has no executions."""
        self._watched[watch] = None
        if self._due is None and self.seconds:
            self._schedule_check()

    def progressed(self, line: object) -> None:
        """Record the end of an execution in a queue."""
        if line is not None:
            self._progress[line] = self.now()

    def last_progress(self, line: object) -> float:
        """Return the time of the last completion in a queue; 0 if unknown."""
        return 0.0 if line is None else self._progress.get(line, 0.0)

    def _schedule_check(self) -> None:
        self._due = self.now() + self._interval
        check = partial(_check, ref(self))
        asyncio.get_running_loop().call_later(self._interval, check, context=outside_call())

    def check(self) -> None:
        """Check all watches, and schedule another check if executions remain."""
        now = self.now()
        # A suspended process or blocked event loop delays every execution: extend their limits.
        late = max(0.0, now - (self._due or now))
        late = late if late > self._interval else 0.0
        self._due = None
        for watch in list(self._watched):
            watch.abandon_late(now, late)
            if not watch.executions:
                del self._watched[watch]
        if self._watched:
            self._schedule_check()


def _check(found: "ref[Health]") -> None:
    health = found()
    if health is not None:
        health.check()
