"""Deadlocks among Python models that call one another, found and ended.

A model that calls itself, or two that call each other, may wait for a copy that waits for them.
A deadlock lasts, so that it need not be noticed at once: a nested call that waits is looked at
from time to time.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from xlaserve.errors.code import Deadlock
from xlaserve.serving.answers import deliver
from xlaserve.serving.call import outside_call
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations.relay import Relay

FIRST_SECONDS = 0.05
MOST_SECONDS = 1.0
"""Seconds to the first look, and between later ones."""


class Executing(Protocol):
    """A station whose copies may wait for nested calls."""

    @property
    def lanes(self) -> int:
        """Return the number of concurrent executions."""
        ...

    @property
    def executing(self) -> Mapping[InferCall, bool]:
        """Return the calls that copies have, and whether the code has begun with each."""
        ...

    @property
    def computing(self) -> Sequence[InferCall]:
        """Return the calls that the code has begun with, and has not ended."""
        ...


@runtime_checkable
class Awaiting(Protocol):
    """A place whose calls wait for other calls: for relays, or for those before them."""

    def awaited(self, call: InferCall) -> Iterable[InferCall]:
        """Return the calls that have to end before this one."""
        ...


class Waits:
    """Nested calls that wait: for a copy, or for other calls."""

    def __init__(self) -> None:
        self._places: dict[InferCall, Executing | None] = {}
        """Where each is executed; None where it waits for other calls."""

    def watch(self, call: InferCall, place: Executing | None = None) -> None:
        """Watch a nested call until its code starts or it ends.

        A relay is not watched: who waits for it is.
        """
        if call.parent is None or isinstance(call, Relay) or call in self._places:
            return
        self._places[call] = place
        asyncio.get_running_loop().call_later(
            FIRST_SECONDS, self._look, call, FIRST_SECONDS, context=outside_call()
        )

    def _look(self, call: InferCall, seconds: float) -> None:
        place = self._places[call]
        if call.has_ended or (place is not None and place.executing.get(call, False)):
            del self._places[call]
            return
        if self.is_stuck(call):
            del self._places[call]
            waited_at = call.place
            deliver([call], Deadlock(call.model, _chain(call)))
            if waited_at is not None:
                waited_at.leave(call)  # what it had begun there ends with it
            return
        seconds = min(2 * seconds, MOST_SECONDS)
        asyncio.get_running_loop().call_later(seconds, self._look, call, seconds)

    def is_stuck(self, call: InferCall) -> bool:
        """Tell whether a call will never end: all that could let it go on waits for it in turn.

        Of all calls that it may wait for those are taken away that may go on, until none is left
        that may, or this one is taken.
        """
        stuck: dict[InferCall, None] = {}
        found = [call]
        while found:
            one = found.pop()
            if one not in stuck:
                stuck[one] = None
                found.extend(self._before(one))
        while call in stuck:
            going = [one for one in stuck if not self._waits_for(one, stuck)]
            if not going:
                return True
            for one in going:
                del stuck[one]
        return False

    def _before(self, call: InferCall) -> Iterator[InferCall]:
        """Yield the calls that may have to end before this one."""
        if isinstance(call.place, Awaiting):
            yield from call.place.awaited(call)
        elif (place := self._pending_at(call)) is not None:
            yield from place.computing
        else:
            yield from call.nested or ()

    def _waits_for(self, call: InferCall, stuck: Mapping[InferCall, None]) -> bool:
        """Tell whether a call waits for nothing but calls of these."""
        if call.has_ended:
            return False
        before = list(self._before(call))
        if isinstance(call.place, Awaiting):
            return any(one in stuck for one in before)
        place = self._pending_at(call)
        if place is not None:
            return len(before) >= place.lanes and all(one in stuck for one in before)
        # The code may go on with any of those that it waits for.
        return bool(before) and all(one in stuck for one in before)

    def _pending_at(self, call: InferCall) -> Executing | None:
        """Return the copies that a call waits for; None where it has begun, or waits for none."""
        place = self._places.get(call) or _copies(call)
        if place is None:
            return None
        has_begun = place.executing.get(call)
        is_queued = has_begun is None and call.place is not None
        return place if is_queued or has_begun is False else None


def _copies(call: InferCall) -> Executing | None:
    """Return the copies of the model of a call, if its code may wait for nested calls."""
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
