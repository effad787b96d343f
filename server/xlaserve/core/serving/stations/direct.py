"""The queue of a Python model whose requests are not put together."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from xlaserve.core.serving.infer_call import InferCall
from xlaserve.errors import Overloaded


class Copies(Protocol):
    """Takes calls, each for an execution of its own."""

    @property
    def room(self) -> int:
        """Return how many calls the copies take now."""
        ...

    @property
    def group(self) -> int:
        """Return how many calls one copy should be handed at a time, at most."""
        ...

    def hand(self, calls: list[InferCall]) -> None:
        """Hand calls to the copy with the least to do."""
        ...


class DirectQueue:
    """Hands calls on in the order in which they come.

    Those that come in one pass of the event loop are handed on in groups at its end. To wake a
    thread costs more than many a model, and while the pass lasts it could not have Python's lock.
    """

    def __init__(self, copies: Copies, max_requests: int, now_ns: Callable[[], int]) -> None:
        self._copies = copies
        self._max_requests = max_requests
        self._now_ns = now_ns
        self._calls: deque[InferCall] = deque()
        self._is_looking = False

    def pending_since(self) -> Iterator[int]:
        """Yield when each call that waits was submitted."""
        return (call.submitted_ns for call in self._calls)

    def submit(self, call: InferCall) -> None:
        """Take a call; raises Overloaded."""
        call.submitted_ns = call.submitted_ns or self._now_ns()
        if len(self._calls) >= self._max_requests:
            self.hand_on()
        if len(self._calls) >= self._max_requests:
            raise Overloaded(call.model, self._max_requests, "max_requests_per_model")
        self._calls.append(call)
        call.wait_at(self)
        if self._copies.room:
            self._look_soon()

    def leave(self, call: InferCall) -> None:
        """Let a call leave the queue, unless it has left already."""
        try:
            self._calls.remove(call)
        except ValueError:
            return

    def retire(self) -> list[InferCall]:
        """Hand on nothing more; return the calls that wait."""
        calls = list(self._calls)
        self._calls.clear()
        return calls

    def hand_on(self) -> None:
        """Hand on as many as the copies take."""
        copies, calls = self._copies, self._calls
        while calls and (room := copies.room):
            count = min(len(calls), room, copies.group)
            handed = [calls.popleft() for _ in range(count)]
            for call in handed:
                call.place = None
            copies.hand(handed)

    def _look_soon(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._is_looking = False
        self.hand_on()
