"""Deadlock detection among Python models that call one another.

A model that calls itself, or two that call each other, may wait for a copy that waits for them. A
deadlock is permanent, so there is no hurry: waiting nested calls are checked periodically.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, runtime_checkable
from weakref import WeakSet

from xlaserve.errors.code import Deadlock
from xlaserve.serving.answers import deliver
from xlaserve.serving.call import outside_call
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations.relay import Relay

FIRST_SECONDS = 0.05
MOST_SECONDS = 1.0
"""Delay before the first check of a call, and maximum delay between later ones."""
MOST_WAITS = 10_000
"""Maximum number of calls and dependencies examined by one check, which takes about 50 ms."""


class Executing(Protocol):
    """A station whose model copies may wait for nested calls."""

    @property
    def lanes(self) -> int:
        """Return the number of concurrent executions."""
        ...

    @property
    def executing(self) -> Mapping[InferCall, bool]:
        """Return the calls handed to copies, and whether the code has begun each of them."""
        ...

    @property
    def computing(self) -> Sequence[InferCall]:
        """Return the calls that the model's code is working on."""
        ...


@runtime_checkable
class Awaiting(Protocol):
    """A Holder whose calls wait for other calls: for relays, or for earlier calls."""

    def awaited(self, call: InferCall) -> Iterable[InferCall]:
        """Return the calls that must end before this one can."""
        ...


class Waits:
    """Nested calls that wait for a model copy or for other calls."""

    def __init__(self) -> None:
        self._places: dict[InferCall, Executing | None] = {}
        """The station that executes each watched call; None if the call waits for other calls."""
        self._timers: dict[InferCall, asyncio.TimerHandle] = {}
        """Timer of each call's next check."""
        self._going: WeakSet[InferCall] = WeakSet()
        """Calls found able to proceed since `_going_since`; shared by checks that closely follow
        each other."""
        self._going_since = 0.0

    def watch(self, call: InferCall, place: Executing | None = None) -> None:
        """Watch a nested call until its code starts or it ends.

        Relays are not watched: the calls that wait for them are.
        """
        if call.parent is None or isinstance(call, Relay) or call in self._places:
            return
        self._places[call] = place
        call.hold(partial(self._forget, call))
        self._timers[call] = asyncio.get_running_loop().call_later(
            FIRST_SECONDS, self._check, call, FIRST_SECONDS, context=outside_call()
        )

    def _forget(self, call: InferCall) -> None:
        """Stop watching a call; a pending timer would keep its tensors alive."""
        self._places.pop(call, None)
        timer = self._timers.pop(call, None)
        if timer is not None:
            timer.cancel()

    def _check(self, call: InferCall, seconds: float) -> None:
        place = self._places[call]
        if call.has_ended or (place is not None and place.executing.get(call, False)):
            self._forget(call)
            return
        if self.is_stuck(call, self._known_going()):
            self._forget(call)
            waited_at = call.place
            deliver([call], Deadlock(call.model, _chain(call)))
            if waited_at is not None:
                waited_at.leave(call)  # also stops the call's work there
            return
        seconds = min(2 * seconds, MOST_SECONDS)
        loop = asyncio.get_running_loop()
        self._timers[call] = loop.call_later(seconds, self._check, call, seconds)

    def _known_going(self) -> WeakSet[InferCall]:
        """Return the calls recently found able to proceed; a later check corrects errors."""
        now = asyncio.get_running_loop().time()
        if now - self._going_since >= FIRST_SECONDS:
            self._going.clear()
            self._going_since = now
        return self._going

    def is_stuck(self, call: InferCall, going: WeakSet[InferCall] | None = None) -> bool:
        """Tell whether a call is deadlocked: everything that could unblock it waits for it in turn.

        Reduces the wait graph: calls that can proceed are removed until none is left that can.
        `going` has calls known to proceed, and is extended by those found here. Returns False if
        the graph exceeds `MOST_WAITS`.
        """
        known: Collection[InferCall] = () if going is None else going
        needed: dict[InferCall, int] = {}
        """Number of predecessors that must proceed first; 0 for calls that can proceed."""
        followers: dict[InferCall, list[InferCall]] = {}
        found, free, count = [call], list[InferCall](), 0
        while found:
            one = found.pop()
            if one in needed:
                continue
            before = {} if one.has_ended or one in known else dict.fromkeys(self._before(one))
            needed[one] = self._needed(one, before) if before else 0
            if not needed[one]:
                free.append(one)
                continue
            count += 1 + len(before)
            if count > MOST_WAITS:
                return False
            for earlier in before:
                followers.setdefault(earlier, []).append(one)
            found.extend(before)
        _let_go(free, needed, followers)
        if going is not None:
            going.update(one for one, count in needed.items() if count <= 0)
        return needed[call] > 0

    def _before(self, call: InferCall) -> Iterator[InferCall]:
        """Yield the calls that may have to end before this one can."""
        if isinstance(call.place, Awaiting):
            yield from call.place.awaited(call)
        elif (place := self._pending_at(call)) is not None:
            yield from place.computing
        else:
            yield from call.nested or ()
            for companion in call.companions:
                one = companion()
                if one is not call and isinstance(one, InferCall):
                    yield from one.nested or ()

    def _needed(self, call: InferCall, before: Collection[InferCall]) -> int:
        """Return how many of a call's predecessors (at least one) must proceed before it can."""
        if isinstance(call.place, Awaiting):
            return len(before)
        place = self._pending_at(call)
        if place is not None:
            return int(len(before) >= place.lanes)
        return 1  # the code may proceed after any one of the calls that it waits for

    def _pending_at(self, call: InferCall) -> Executing | None:
        """Return the station whose copy a call waits for, or None."""
        place = self._places.get(call) or _copies(call)
        if place is None:
            return None
        has_begun = place.executing.get(call)
        is_queued = has_begun is None and call.place is not None
        return place if is_queued or has_begun is False else None


def _let_go(
    free: list[InferCall],
    needed: dict[InferCall, int],
    followers: Mapping[InferCall, Sequence[InferCall]],
) -> None:
    """Propagate progress: decrement the counts of dependent calls, which may become free too."""
    while free:
        for later in followers.get(free.pop(), ()):
            needed[later] -= 1
            if not needed[later]:
                free.append(later)


def _copies(call: InferCall) -> Executing | None:
    """Return the station whose copies run the call's model, if its code may send nested calls."""
    station = getattr(getattr(call, "instance", None), "station", None)
    while station is not None and hasattr(station, "within"):
        station = station.within
    found: Executing | None = getattr(station, "copies", None)
    return found


def _chain(call: InferCall) -> list[str]:
    names = [call.model]
    parent = call.parent
    while parent is not None:
        names.insert(0, parent.model)
        parent = parent.parent
    return names
