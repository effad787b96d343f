"""Failed calls: counts by reason, and the most recent ones."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, TypeAlias

import msgspec

from xlaserve.errors import XlaserveError
from xlaserve.serving.call import Call

KEPT = 50
"""Number of recent failures stored."""

MAX_REASONS = 256
"""Maximum number of reasons counted by name; exceeds the number of error classes."""

OTHER = "Other"
CANCELLED = "Cancelled"
UNEXPECTED = "Unexpected"
"""Reason of unexpected exceptions, whose tracebacks are in the server log."""
_MAX_TEXT = 256
_MAX_NAME = 128


class FailedCall(msgspec.Struct, frozen=True):
    """A failed call, as shown on the status page."""

    at_ns: Annotated[int, msgspec.Meta(description="Nanoseconds since the Unix epoch.")]
    reason: str
    operation: str
    model: str
    version: str
    id: str
    text: Annotated[str, msgspec.Meta(description="The error message that the client got.")]
    """Empty if the client got no text."""


def of_anybody(failure: FailedCall) -> FailedCall:
    """Return a failure without client data, to show to other callers."""
    return msgspec.structs.replace(failure, version="", id="", text="")


ReasonOf: TypeAlias = Callable[[BaseException, str], str]
"""Returns the reason of an error at a listener."""


def reason_name(error: BaseException, listener: str = "") -> str:
    """Return the reason of an error, independent of any transport."""
    if isinstance(error, XlaserveError):
        return type(error).__name__
    return CANCELLED if isinstance(error, asyncio.CancelledError) else UNEXPECTED


class Failures:
    """Counts failures by reason, in bounded memory. Belongs to the event loop."""

    def __init__(self, reason_of: ReasonOf = reason_name) -> None:
        self._reason_of = reason_of
        self._counts: dict[str, int] = {}
        self._last: deque[FailedCall] = deque(maxlen=KEPT)

    @property
    def counts(self) -> Mapping[str, int]:
        """Return the counts by reason."""
        return MappingProxyType(self._counts)

    @property
    def last(self) -> Sequence[FailedCall]:
        """Return the most recent failures, newest first."""
        return tuple(reversed(self._last))

    def note(self, call: Call, error: BaseException, now_ns: int) -> None:
        """Count a failed call; nested calls count only through their parent."""
        if call.parent is not None:
            return
        reason = self._reason_of(error, call.peer.listener)
        if reason not in self._counts and len(self._counts) >= MAX_REASONS:
            reason = OTHER
        self._counts[reason] = self._counts.get(reason, 0) + 1
        # If the model is hidden from the caller, omit its name: others may see this failure.
        is_seen = call.sight is None or call.sight.shows(call.model)
        model, version = (call.model, call.version) if is_seen else ("", "")
        self._last.append(
            FailedCall(
                now_ns,
                reason,
                call.operation.value,
                model[:_MAX_NAME],
                version[:_MAX_NAME],
                getattr(call, "id", "")[:_MAX_NAME],
                str(error)[:_MAX_TEXT] if isinstance(error, XlaserveError) else "",
            )
        )
