"""The queue of a model that executes each call separately."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Protocol

from xlaserve.errors import Overloaded
from xlaserve.serving.infer_call import InferCall


class Copies(Protocol):
    """Model copies that accept calls, each as an execution of its own."""

    @property
    def room(self) -> int:
        """Return how many calls the copies accept now."""
        ...

    @property
    def group(self) -> int:
        """Return how many calls to hand to one copy at a time, at most."""
        ...

    def hand(self, calls: list[InferCall]) -> None:
        """Hand calls to the least busy copy."""
        ...


class Order(Protocol):
    """An ordered collection of queued calls, such as a deque."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[InferCall]: ...

    def append(self, call: InferCall, /) -> None: ...

    def popleft(self) -> InferCall:
        """Remove and return the next call."""
        ...

    def remove(self, call: InferCall, /) -> None:
        """Remove a call; raises ValueError if it is missing."""
        ...

    def clear(self) -> None: ...


class ByPrincipal:
    """Serves principals round-robin, and the calls of each in arrival order (an Order)."""

    def __init__(self) -> None:
        self._calls: dict[str, deque[InferCall]] = {}
        """Has no empty queues; the first call of the first principal is the next."""

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def __iter__(self) -> Iterator[InferCall]:
        return chain.from_iterable(self._calls.values())

    def append(self, call: InferCall, /) -> None:
        """Append a call to its principal's queue."""
        self._calls.setdefault(call.owner, deque()).append(call)

    def popleft(self) -> InferCall:
        """Remove and return the next call; its principal goes to the end of the rotation."""
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
        self._calls.clear()


class DirectQueue:
    """Hands calls to model copies, in arrival order unless an `Order` is given.

    Calls of one event-loop iteration are handed over in groups at its end: waking a thread costs
    more than many executions, and during the iteration the thread could not get the GIL anyway.
    """

    def __init__(
        self,
        copies: Copies,
        max_requests: int,
        now_ns: Callable[[], int],
        order: Order | None = None,
    ) -> None:
        """`order` is the queue; None for arrival order."""
        self._copies = copies
        self._max_requests = max_requests
        self._now_ns = now_ns
        self._calls: Order = deque[InferCall]() if order is None else order
        self._is_hand_on_scheduled = False

    def pending_since(self) -> Iterator[int]:
        """Yield the submission times of queued calls."""
        return (call.submitted_ns for call in self._calls)

    def submit(self, call: InferCall) -> None:
        """Enqueue a call; raises Overloaded."""
        call.submitted_ns = call.submitted_ns or self._now_ns()
        if len(self._calls) >= self._max_requests:
            self.hand_on()
        if len(self._calls) >= self._max_requests:
            raise Overloaded(call.model, self._max_requests, "max_requests_per_model")
        self._calls.append(call)
        call.wait_at(self)
        if not self._is_hand_on_scheduled and self._copies.room:
            self._is_hand_on_scheduled = True
            asyncio.get_running_loop().call_soon(self.hand_on)

    def leave(self, call: InferCall) -> None:
        """Remove an ended call from the queue; does nothing if it has already left."""
        try:
            self._calls.remove(call)
        except ValueError:
            return

    def retire(self) -> list[InferCall]:
        """Hand over no more calls; return the queued ones."""
        calls = list(self._calls)
        self._calls.clear()
        return calls

    def hand_on(self) -> None:
        """Hand over as many calls as the copies accept."""
        self._is_hand_on_scheduled = False
        copies, calls = self._copies, self._calls
        while calls and (room := copies.room):
            count = min(len(calls), room, copies.group)
            handed = [calls.popleft() for _ in range(count)]
            for call in handed:
                call.place = None
            copies.hand(handed)
