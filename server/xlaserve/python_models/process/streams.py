"""Forwards streamed answers of other models to the process that called them."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from xlaserve.python_models.process.errors import named
from xlaserve.runtime.calls import WINDOW, Arrays, Replies, parameters_of


class Send(Protocol):
    """Enqueues a message for the process; does not block."""

    def __call__(self, header: Mapping[str, Any], tensors: Arrays, /) -> None:
        """Queue a message with a header and tensors."""
        ...


class ForwardedReplies(Replies):
    """Sends each answer to the process, and counts the answers that its code has not consumed."""

    def __init__(self, number: int, send: Send, on_end: Callable[[], None]) -> None:
        super().__init__()
        self._number = number
        self._send = send
        self._on_end = on_end
        self._count = threading.Lock()
        """Guards the counter and `_is_over`."""
        self._not_taken = 0
        self._is_over = False

    @property
    def is_full(self) -> bool:
        """Tell whether the other model should pause until the process has consumed an answer."""
        return self._not_taken >= WINDOW

    @property
    def is_awaited(self) -> bool:
        """Tell whether the process has consumed all answers and waits for the next."""
        return not self._not_taken

    def put(self, outputs: Arrays) -> None:
        """Send an answer to the process."""
        with self._count:
            self._not_taken += 1
        header = {"kind": "reply", "call": self._number, "parameters": parameters_of(outputs)}
        self._send(header, outputs)

    def end(self, error: BaseException | None = None) -> None:
        """Send the end of the answers, or the error, to the process; only the first call counts."""
        with self._count:
            is_first, self._is_over = not self._is_over, True
        if is_first:
            self._on_end()
            failure = None if error is None else named(error)
            ended = {"kind": "replied", "call": self._number, "empty": self.is_end_empty}
            self._send({**ended, "error": failure}, {})

    def taken(self) -> None:
        """Record that the code has consumed an answer."""
        with self._count:
            self._not_taken -= 1
        self.on_taken()


class Streams:
    """The open streaming calls of one process."""

    def __init__(self) -> None:
        self._open: dict[int, ForwardedReplies] = {}

    @property
    def are_awaited(self) -> bool:
        """Tell whether the process waits for an answer of another model."""
        return any(replies.is_awaited for replies in list(self._open.values()))

    def begin(self, number: int, send: Send) -> ForwardedReplies:
        """Register a streaming call, and return the object that forwards its answers."""
        replies = ForwardedReplies(number, send, lambda: self._ended(number))
        self._open[number] = replies
        return replies

    def taken(self, number: int) -> None:
        """Record that the process has consumed an answer of a call."""
        replies = self._open.get(number)
        if replies is not None:
            replies.taken()

    def cancel(self, number: int) -> None:
        """Cancel a call."""
        replies = self._open.get(number)
        if replies is not None:
            replies.cancel()

    def close(self) -> None:
        """Cancel all calls: the process has ended."""
        for number in list(self._open):
            self.cancel(number)
        self._open.clear()

    def _ended(self, number: int) -> None:
        self._open.pop(number, None)
