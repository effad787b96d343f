"""Failed calls: counts by reason, and the latest."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, TypeAlias

import msgspec

from xlaserve.errors import XlaserveError
from xlaserve.serving.call import Call

KEPT = 50
"""Limit of kept failures."""

MAX_REASONS = 256
"""Reasons counted by name: more than there are classes of errors."""

OTHER = "Other"
CANCELLED = "Cancelled"
UNEXPECTED = "Unexpected"
"""The log has the traceback of each."""
_MAX_TEXT = 256
_MAX_NAME = 128


class FailedCall(msgspec.Struct, frozen=True):
    """One call that failed, as pages show it."""

    at_ns: Annotated[int, msgspec.Meta(description="Since the epoch.")]
    reason: str
    operation: str
    model: str
    version: str
    id: str
    text: Annotated[str, msgspec.Meta(description="As its client was told.")]
    """Empty if it was told nothing."""


def of_anybody(failure: FailedCall) -> FailedCall:
    """Return a failure without what its client sent or was told: that may be another caller."""
    return msgspec.structs.replace(failure, version="", id="", text="")


ReasonOf: TypeAlias = Callable[[BaseException, str], str]
"""Names the reason of a call's error at an endpoint."""


def reason_name(error: BaseException, listener: str = "") -> str:
    """Name the reason of a failure without a transport."""
    if isinstance(error, XlaserveError):
        return type(error).__name__
    return CANCELLED if isinstance(error, asyncio.CancelledError) else UNEXPECTED


class Failures:
    """Counts failures by their reason. Of the event loop; its size does not grow with them."""

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
        """Return the last of them, the newest first."""
        return tuple(reversed(self._last))

    def note(self, call: Call, error: BaseException, now_ns: int) -> None:
        """Count a failed call; a nested one counts with its parent only."""
        if call.parent is not None:
            return
        reason = self._reason_of(error, call.peer.listener)
        if reason not in self._counts and len(self._counts) >= MAX_REASONS:
            reason = OTHER
        self._counts[reason] = self._counts.get(reason, 0) + 1
        # One that its caller may not see is of no model: those who may see that read its failures.
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
