"""Streams the answers of other models to the process that asked for them."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from xlaserve.python_models.process.errors import named
from xlaserve.runtime.calls import WINDOW, Arrays, Replies, parameters_of


class Send(Protocol):
    """Enqueues a message for the process; does not block."""

    def __call__(self, said: Mapping[str, Any], tensors: Arrays, /) -> None:
        """Send it."""
        ...


class ForwardedReplies(Replies):
    """Answers that are sent on as they come; the process says how many its code has taken."""

    def __init__(self, number: int, send: Send, on_end: Callable[[], None]) -> None:
        super().__init__()
        self._number = number
        self._send = send
        self._on_end = on_end
        self._count = threading.Lock()
        """Held for the number of answers that are not taken."""
        self._not_taken = 0
        self._is_over = False

    @property
    def is_full(self) -> bool:
        """Tell whether no more should come before the code has taken some."""
        return self._not_taken >= WINDOW

    @property
    def is_awaited(self) -> bool:
        """Tell whether the code can only wait for the next answer."""
        return not self._not_taken

    def put(self, outputs: Arrays) -> None:
        """Send an answer."""
        with self._count:
            self._not_taken += 1
        said = {"kind": "reply", "call": self._number, "parameters": parameters_of(outputs)}
        self._send(said, outputs)

    def end(self, error: BaseException | None = None) -> None:
        """Tell the process, once, that no more come, or why."""
        with self._count:
            is_first, self._is_over = not self._is_over, True
        if is_first:
            self._on_end()
            said = None if error is None else named(error)
            ended = {"kind": "replied", "call": self._number, "empty": self.is_end_empty}
            self._send({**ended, "error": said}, {})

    def taken(self) -> None:
        """Record that the code has taken an answer."""
        with self._count:
            self._not_taken -= 1
        self.on_taken()


class Streams:
    """The calls for many answers that one process has made, and that have not ended."""

    def __init__(self) -> None:
        self._open: dict[int, ForwardedReplies] = {}

    @property
    def are_awaited(self) -> bool:
        """Tell whether the process waits for an answer of another model."""
        return any(replies.is_awaited for replies in list(self._open.values()))

    def begin(self, number: int, send: Send) -> ForwardedReplies:
        """Return what takes the answers to a call."""
        replies = ForwardedReplies(number, send, lambda: self._ended(number))
        self._open[number] = replies
        return replies

    def taken(self, number: int) -> None:
        """Let another answer come."""
        replies = self._open.get(number)
        if replies is not None:
            replies.taken()

    def cancel(self, number: int) -> None:
        """Ask for no more answers to a call."""
        replies = self._open.get(number)
        if replies is not None:
            replies.cancel()

    def close(self) -> None:
        """Ask for no more answers to any call: the process is gone."""
        for number in list(self._open):
            self.cancel(number)
        self._open.clear()

    def _ended(self, number: int) -> None:
        self._open.pop(number, None)
