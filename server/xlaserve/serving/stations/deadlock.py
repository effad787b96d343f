"""Deadlocks among Python models that call one another, found and ended.

A model that calls itself, or two that call each other, may wait for a copy that waits for them.
A deadlock lasts, so that it need not be noticed at once: a nested call that waits is looked at
from time to time.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from xlaserve.errors.code import Deadlock
from xlaserve.serving.answers import deliver
from xlaserve.serving.call import outside_call
from xlaserve.serving.infer_call import InferCall

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


class Waits:
    """Nested calls waiting for a copy, by place."""

    def __init__(self) -> None:
        self._places: dict[InferCall, Executing] = {}

    def watch(self, call: InferCall, place: Executing) -> None:
        """Watch a nested call until its code starts or it ends."""
        self._places[call] = place
        asyncio.get_running_loop().call_later(
            FIRST_SECONDS, self._look, call, FIRST_SECONDS, context=outside_call()
        )

    def _look(self, call: InferCall, seconds: float) -> None:
        if not self._is_pending(call):
            del self._places[call]
            return
        if self._is_stuck(self._places[call], set()):
            del self._places[call]
            deliver([call], Deadlock(call.model, _chain(call)))
            return
        seconds = min(2 * seconds, MOST_SECONDS)
        asyncio.get_running_loop().call_later(seconds, self._look, call, seconds)

    def _is_pending(self, call: InferCall) -> bool:
        return not call.has_ended and not self._places[call].executing.get(call, False)

    def _is_stuck(self, place: Executing, seen: set[int]) -> bool:
        """Tell whether no execution of a station will ever end: each waits for another of them."""
        if id(place) in seen:
            return True
        seen.add(id(place))
        begun = [call for call, has_begun in place.executing.items() if has_begun]
        return len(begun) >= place.lanes and all(self._is_blocked(call, seen) for call in begun)

    def _is_blocked(self, call: InferCall, seen: set[int]) -> bool:
        """Tell whether a call waits only for nested calls of stuck stations."""
        nested = call.nested or ()
        return bool(nested) and all(self._waits(one, seen) for one in nested)

    def _waits(self, nested: InferCall, seen: set[int]) -> bool:
        pending = [
            one
            for one in self._places
            if self._is_pending(one) and (one is nested or _is_part(one, nested))
        ]
        return bool(pending) and all(self._is_stuck(self._places[one], seen) for one in pending)


def _is_part(call: InferCall, whole: InferCall) -> bool:
    parent = call.parent
    while parent is not None and parent is not whole:
        parent = parent.parent
    return parent is whole


def _chain(call: InferCall) -> list[str]:
    names = [call.model]
    parent = call.parent
    while parent is not None:
        names.insert(0, parent.model)
        parent = parent.parent
    return names
