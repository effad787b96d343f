"""The calls that failed: how many for which reason, and the last of them."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from xlaserve.core.serving.call import Call
from xlaserve.errors import XlaserveError

KEPT = 50
"""Failures that are kept one by one."""

MAX_REASONS = 64
"""Reasons that are counted by their name: there are as many as classes of errors."""

OTHER = "Other"
_CANCELLED = "Cancelled"
_UNEXPECTED = "Unexpected"
_MAX_TEXT = 256
_MAX_NAME = 128


class Failure(NamedTuple):
    """One call that failed."""

    at_ns: int
    """Since the epoch."""
    reason: str
    operation: str
    model: str
    version: str
    id: str
    text: str
    """Text of the error as its client was told it; empty where that was told nothing."""


class Failures:
    """Counts failures by their reason. Of the event loop; its size does not grow with them."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._last: deque[Failure] = deque(maxlen=KEPT)

    @property
    def counts(self) -> Mapping[str, int]:
        """Return how many there were, by reason."""
        return MappingProxyType(self._counts)

    @property
    def last(self) -> Sequence[Failure]:
        """Return the last of them, the newest first."""
        return tuple(reversed(self._last))

    def note(self, call: Call, error: BaseException, now_ns: int) -> None:
        """Count a call that failed; one that is part of another is counted with that alone."""
        if call.parent is not None:
            return
        reason = reason_name(error)
        if reason not in self._counts and len(self._counts) >= MAX_REASONS:
            reason = OTHER
        self._counts[reason] = self._counts.get(reason, 0) + 1
        self._last.append(
            Failure(
                now_ns,
                reason,
                call.operation.value,
                call.model[:_MAX_NAME],
                call.version[:_MAX_NAME],
                getattr(call, "id", "")[:_MAX_NAME],
                str(error)[:_MAX_TEXT] if isinstance(error, XlaserveError) else "",
            )
        )


def reason_name(error: BaseException) -> str:
    """Name the reason of a failure: the class of an error that the server has."""
    if isinstance(error, XlaserveError):
        return type(error).__name__
    return _CANCELLED if isinstance(error, asyncio.CancelledError) else _UNEXPECTED
