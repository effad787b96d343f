"""Calls of a model's code to other models of the server."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import numpy as np

from xlaserve.tensors import Parameter

Array: TypeAlias = "np.ndarray[Any, Any]"
"""A tensor; one of BYTES has dtype object and holds `bytes`."""

Arrays: TypeAlias = Mapping[str, Array]
"""Tensors by name."""

WINDOW = 16
"""Unread answers of another model before it pauses."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of the code of a model."""

    model: str
    inputs: Arrays
    version: str = ""
    """Empty for the newest."""
    outputs: Sequence[str] = ()
    """Empty for all."""
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: MappingProxyType({}))
    seconds: float = 0.0
    """Its timeout; 0 for the remaining time of its request."""


class Answered(dict[str, Array]):
    """The outputs of another model, and the parameters of its answer."""

    parameters: Mapping[str, Parameter] = MappingProxyType({})


def answered(outputs: Arrays, parameters: Mapping[str, Parameter]) -> Answered:
    """Return outputs with the parameters of their answer."""
    found = Answered(outputs)
    found.parameters = parameters
    return found


def parameters_of(outputs: Arrays) -> dict[str, Parameter]:
    """Return the parameters of another model's answer."""
    return dict(outputs.parameters) if isinstance(outputs, Answered) else {}


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A load or an unload that the code of a model asks for."""

    by: str
    """The model whose code asks."""
    model: str
    is_load: bool
    parameters: Mapping[str, bool | int | str | bytes]
    """Parameters of the model repository extension."""


class Replies:
    """Answers to one request, in order. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Arrays] = deque()
        self._has_ended = False
        self._error: BaseException | None = None
        self.is_end_empty = False
        """Whether the last answer had no outputs, and is not returned."""
        self.is_cancelled = False
        """Whether the reader has stopped."""
        self.on_taken: Callable[[], object] = lambda: None
        """Called after an answer is taken (backpressure)."""
        self.on_cancel: Callable[[], object] = lambda: None

    @property
    def is_full(self) -> bool:
        """Tell whether the producer should pause until some answers were read."""
        return len(self._waiting) >= WINDOW

    def put(self, outputs: Arrays) -> None:
        """Add an answer."""
        with self._changed:
            self._waiting.append(outputs)
            self._changed.notify()

    def end(self, error: BaseException | None = None) -> None:
        """Mark the end of the answers, or the error that ended them."""
        with self._changed:
            self._has_ended, self._error = True, self._error or error
            self._changed.notify_all()

    def cancel(self) -> None:
        """Cancel the remaining answers."""
        self.is_cancelled = True
        self.on_cancel()

    def __iter__(self) -> Iterator[Arrays]:
        return self

    def __next__(self) -> Arrays:
        """Return the next answer once it arrives; raises the other model's error."""
        with self._changed:
            while not self._waiting and not self._has_ended:
                self._changed.wait()
            if self._waiting:
                found = self._waiting.popleft()
            elif self._error is not None:
                raise self._error
            else:
                raise StopIteration
        self.on_taken()
        return found


class Calls(Protocol):
    """Calls other models, from any thread."""

    def infer(self, asked: Asked, within: object) -> "Future[Arrays]":
        """Request one answer, as part of a request; the future raises the model's error."""
        ...

    def stream(self, asked: Asked, within: object, replies: Replies | None = None) -> Replies:
        """Start a request with any number of answers; return an iterator over them."""
        ...

    def change(self, change: Change, within: object) -> "Future[None]":
        """Load or unload a model, with the permissions and limits that every client has."""
        ...

    def is_ready(self, model: str, version: str, within: object) -> bool:
        """Tell whether a model would answer now, as part of a request."""
        ...


_current: ContextVar[object] = ContextVar("python_request", default=None)


begin_computing = _current.set
"""Make the calls that follow part of a request; returns a token for `end_computing`."""
end_computing = _current.reset


@contextmanager
def computing(request: object) -> Iterator[None]:
    """Make calls within the block part of a request."""
    token = begin_computing(request)
    try:
        yield
    finally:
        end_computing(token)


def current_request() -> object:
    """Return the request of the current thread or coroutine."""
    return _current.get()
