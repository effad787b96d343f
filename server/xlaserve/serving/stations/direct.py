"""The queue of an unbatched model."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Protocol

from xlaserve.errors import Overloaded
from xlaserve.serving.infer_call import InferCall


class Copies(Protocol):
    """Takes calls, each for its own execution."""

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


class Order(Protocol):
    """Queued calls in some order: a deque is one."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[InferCall]: ...

    def append(self, call: InferCall, /) -> None:
        """Add a call."""
        ...

    def popleft(self) -> InferCall:
        """Remove and return the next one."""
        ...

    def remove(self, call: InferCall, /) -> None:
        """Remove a call; raises ValueError if it is missing."""
        ...

    def clear(self) -> None:
        """Remove all."""
        ...


class ByPrincipal:
    """Serves principals in rotation, each in arrival order (an Order)."""

    def __init__(self) -> None:
        self._calls: dict[str, deque[InferCall]] = {}
        """Never an empty one: the first of the first principal is the next."""

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def __iter__(self) -> Iterator[InferCall]:
        return chain.from_iterable(self._calls.values())

    def append(self, call: InferCall, /) -> None:
        """Append a call to those of its principal."""
        self._calls.setdefault(call.owner, deque()).append(call)

    def popleft(self) -> InferCall:
        """Remove and return the next call; its principal goes last."""
        name = next(iter(self._calls))
        calls = self._calls.pop(name)
        call = calls.popleft()
        if calls:
            self._calls[name] = calls
        return call

    def remove(self, call: InferCall, /) -> None:
        """Remove a call; raises ValueError if it is missing."""
        name = call.owner
        calls = self._calls.get(name, deque())
        calls.remove(call)
        if not calls:
            del self._calls[name]

    def clear(self) -> None:
        """Remove all."""
        self._calls.clear()


class DirectQueue:
    """Hands calls on, in the order in which they come where it is given no other.

    Those that come in one pass of the event loop are handed on in groups at its end. To wake a
    thread costs more than many a model, and while the pass lasts it could not have Python's lock.
    """

    def __init__(
        self,
        copies: Copies,
        max_requests: int,
        now_ns: Callable[[], int],
        order: Order | None = None,
    ) -> None:
        """Calls are in arrival order unless `order` says otherwise."""
        self._copies = copies
        self._max_requests = max_requests
        self._now_ns = now_ns
        self._calls: Order = deque[InferCall]() if order is None else order
        self._is_looking = False

    def pending_since(self) -> Iterator[int]:
        """Yield the submission times of queued calls."""
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
        if not self._is_looking and self._copies.room:
            self._is_looking = True
            asyncio.get_running_loop().call_soon(self.hand_on)

    def leave(self, call: InferCall) -> None:
        """Let a call leave the queue, unless it has left already."""
        try:
            self._calls.remove(call)
        except ValueError:
            return

    def retire(self) -> list[InferCall]:
        """Stop handing over; return the queued calls."""
        calls = list(self._calls)
        self._calls.clear()
        return calls

    def hand_on(self) -> None:
        """Hand on as many as the copies take."""
        self._is_looking = False
        copies, calls = self._copies, self._calls
        while calls and (room := copies.room):
            count = min(len(calls), room, copies.group)
            handed = [calls.popleft() for _ in range(count)]
            for call in handed:
                call.place = None
            copies.hand(handed)
