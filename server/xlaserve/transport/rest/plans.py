"""What heads of HTTP requests mean: known by their bytes, or by all that matters of these."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from xlaserve.transport.bounded_cache import BoundedCache
from xlaserve.transport.rest.messages import Begin, HttpResponse

_HEAD_BYTES = 4 << 10
"""Longer heads are not known."""

_IDLE_NAMES = (
    "b3",
    "baggage",
    "traceparent",
    "tracestate",
    "x-amzn-trace-id",
    "x-b3-[a-z]+",
    "x-cloud-trace-context",
    "x-correlation-id",
    "x-forwarded-for",
    "x-real-ip",
    "x-request-id",
)
"""Headers that differ from request to request and have no effect here."""

_IDLE = re.compile(
    rb"\r\n(?:%b):[ -~]{0,512}(?=\r\n)" % "|".join(_IDLE_NAMES).encode(), re.IGNORECASE
)
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]{1,9})(?=\r\n)", re.IGNORECASE)

Finish: TypeAlias = Callable[[HttpResponse], "asyncio.Task[HttpResponse] | None"]
"""Return what makes an answer ready that cannot leave as it is; None for one that can."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a head means."""

    method: str
    path: str
    length: int
    """Bytes of the body."""
    begin: Begin
    finish: Finish | None = None
    """None where every answer can leave as it is."""


class Plans:
    """The plans of a server, by head: request line, headers, and the empty line behind them."""

    def __init__(self, max_heads: int, max_length: int) -> None:
        known = BoundedCache[bytes, Plan](max_heads)
        self._known = known
        self._alike = BoundedCache[bytes, Plan](max_heads)
        self._max_length = max_length
        self.get = known.get
        """Returns the plan of a head that is known by its bytes, None for others."""

    def keep(self, head: bytes, plan: Plan) -> None:
        """Know a head of which every line but the first and the last is one header."""
        if plan.length <= self._max_length and len(head) <= _HEAD_BYTES:
            self._known.keep(head, plan)
            key, length = _essence(head)
            # A length that is written in another way is still in the key, and one more would pass.
            if length == plan.length:
                self._alike.keep(key, plan)

    def find(self, head: bytes) -> Plan | None:
        """Return the plan of a head that differs from a known one in nothing but its length.

        And in headers that have no effect. They are removed as whole lines of plain characters, so
        that what is left is what is left of a head that was read.
        """
        if not head or len(head) > _HEAD_BYTES:
            return None
        key, length = _essence(head)
        plan = self._alike.get(key)
        if plan is None or length is None or length > self._max_length:
            return None
        plan = replace(plan, length=length)
        if _IDLE.search(head) is None:
            self._known.keep(head, plan)
        return plan


def _essence(head: bytes) -> tuple[bytes, int | None]:
    """Return a head without what differs between requests, and its length if it has just one."""
    key, count = _LENGTH.subn(b"", head)
    found = _LENGTH.search(head) if count == 1 else None
    return _IDLE.sub(b"", key), int(found[1]) if found else None
