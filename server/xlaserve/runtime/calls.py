"""Calls from a model's Python code to other models on the server."""

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
"""A tensor. BYTES tensors have dtype object, with `bytes` elements."""

Arrays: TypeAlias = Mapping[str, Array]
"""Tensors by name."""

WINDOW = 16
"""Number of unread answers after which the called model pauses (backpressure)."""


@dataclass(frozen=True, slots=True)
class NestedRequest:
    """An inference request from a model's code to another model."""

    model: str
    inputs: Arrays
    version: str = ""
    """The requested version, or an empty string for the newest."""
    outputs: Sequence[str] = ()
    """Names of the requested outputs; empty requests all outputs."""
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: MappingProxyType({}))
    seconds: float = 0.0
    """Timeout in seconds; 0 uses the time left of the enclosing request."""


class Answered(dict[str, Array]):
    """The outputs of another model, with the parameters of its response."""

    parameters: Mapping[str, Parameter] = MappingProxyType({})


def answered(outputs: Arrays, parameters: Mapping[str, Parameter]) -> Answered:
    """Return the outputs together with the parameters of the response."""
    found = Answered(outputs)
    found.parameters = parameters
    return found


def parameters_of(outputs: Arrays) -> dict[str, Parameter]:
    """Return the response parameters of another model's outputs; empty for plain arrays."""
    return dict(outputs.parameters) if isinstance(outputs, Answered) else {}


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A load or unload requested by a model's code."""

    by: str
    """Name of the model whose code makes the request."""
    model: str
    is_load: bool
    parameters: Mapping[str, bool | int | str | bytes]
    """Parameters of the model repository extension."""


class Replies:
    """The answers to one request, in order; an iterator for the calling model. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Arrays] = deque()
        self._has_ended = False
        self._error: BaseException | None = None
        self.is_end_empty = False
        """Whether the final answer had no outputs; the iterator does not return it."""
        self.is_cancelled = False
        """Whether the reader has cancelled the remaining answers."""
        self.on_taken: Callable[[], object] = lambda: None
        """Called after the reader takes an answer, so that the producer can continue."""
        self.on_cancel: Callable[[], object] = lambda: None

    @property
    def is_full(self) -> bool:
        """Tell whether the producer should pause until the reader catches up."""
        return len(self._waiting) >= WINDOW

    def put(self, outputs: Arrays) -> None:
        """Append an answer."""
        with self._changed:
            self._waiting.append(outputs)
            self._changed.notify()

    def end(self, error: BaseException | None = None) -> None:
        """Mark the stream as complete, or as failed with an error."""
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
        """Wait for the next answer and return it; raises the other model's error."""
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

    def infer(self, request: NestedRequest, within: object) -> "Future[Arrays]":
        """Send a request for one answer, on behalf of the request `within`.

        The future raises the called model's error.
        """
        ...

    def stream(
        self, request: NestedRequest, within: object, replies: Replies | None = None
    ) -> Replies:
        """Send a request that may have many answers; return an iterator over them."""
        ...

    def change(self, change: Change, within: object) -> "Future[None]":
        """Load or unload a model, with the same permissions and limits as any client."""
        ...

    def is_ready(self, model: str, version: str, within: object) -> bool:
        """Tell whether a model is ready, as seen by the request `within`."""
        ...


_current: ContextVar[object] = ContextVar("python_request", default=None)


begin_computing = _current.set
"""Treat subsequent calls as part of a request; returns a token for `end_computing`."""
end_computing = _current.reset


@contextmanager
def computing(request: object) -> Iterator[None]:
    """Treat calls to other models inside the `with` block as part of this request."""
    token = begin_computing(request)
    try:
        yield
    finally:
        end_computing(token)


def current_request() -> object:
    """Return the request that the current thread or coroutine is computing."""
    return _current.get()
