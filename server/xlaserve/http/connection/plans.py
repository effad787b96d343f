"""Plans of HTTP requests, cached by header block or by its relevant lines."""

import asyncio
import re
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from xlaserve.http.messages import Begin, HttpResponse
from xlaserve.net.bounded_cache import BoundedCache, MakingCache, remembered
from xlaserve.net.ledger import Account

HEAD_BYTES = 4 << 10
"""Longer header blocks are not cached."""
_MAX_LINES = 64
_MAX_ONCE = 256

IDLE_NAMES: Final = frozenset(
    (
        # identity of the client
        "api-key",
        "authorization",
        "cookie",
        "dnt",
        "forwarded",
        "from",
        "referer",
        "user-agent",
        "via",
        # purpose of the request
        "accept-language",
        "baggage",
        "cache-control",
        "correlation-id",
        "idempotency-key",
        "pragma",
        "priority",
        "request-id",
        # traces
        "b3",
        "elastic-apm-traceparent",
        "newrelic",
        "sentry-trace",
        "traceparent",
        "tracestate",
        "uber-trace-id",
        # sent by browsers; of these, only Origin and Sec-Fetch-Site matter
        "sec-fetch-dest",
        "sec-fetch-mode",
        "sec-fetch-user",
        "upgrade-insecure-requests",
    )
)
"""Idle headers, in lower case: they vary between requests and are not part of a plan.

They do not affect how a request is parsed. Other effects, such as permissions, are evaluated for
each request from its own headers.
"""
IDLE_PREFIXES: Final = ("cf-", "ot-tracer-", "sec-ch-", "x-")
"""Name prefixes of further idle headers."""
DECIDING_PREFIXES: Final = ("x-amzn-sagemaker-",)
"""Exceptions to `IDLE_PREFIXES`: headers with these prefixes are part of a plan."""
_LENGTH = "content-length"
_MAX_LENGTH_DIGITS = 9
_MAX_NAME_BYTES = 64
_MAX_NAMES = 1024
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_PLAIN = bytes(range(0x20, 0x7F))


@remembered(_MAX_NAME_BYTES, _MAX_NAMES)
def is_idle(name: str) -> bool:
    """Tell whether a header, by its lower-case name, never affects how a request is parsed."""
    if name in IDLE_NAMES:
        return True
    return name.startswith(IDLE_PREFIXES) and not name.startswith(DECIDING_PREFIXES)


DECIDES, IDLE, IS_LENGTH = range(3)
"""Roles of headers."""


def _role(name: bytes) -> int:
    text = name.decode("latin-1").lower()
    if text == _LENGTH:
        return IS_LENGTH
    return IDLE if _NAME.fullmatch(name) and is_idle(text) else DECIDES


_ROLES: Final = MakingCache(_role, _MAX_NAMES)
"""Role of each header, by its name as clients write it."""


def role_of(line: bytes, end: int) -> int:
    """Return the role of a header line whose name ends at `end`."""
    return _ROLES[line[:end]] if 0 < end <= _MAX_NAME_BYTES else DECIDES


Finish: TypeAlias = Callable[[HttpResponse, Account], "asyncio.Task[HttpResponse] | None"]
"""Returns a task that compresses a response, or None if the response can be written unchanged."""


class Plan(msgspec.Struct, frozen=True):
    """How to execute the requests that have a certain header block."""

    method: str
    path: str
    length: int
    """Length of the body in bytes."""
    begin: Begin
    finish: Finish | None = None
    """Compresses responses; None if every response can be written unchanged."""

    def with_length(self, length: int) -> "Plan":
        """Return the plan for a body of another length."""
        if length == self.length:
            return self
        return Plan(self.method, self.path, length, self.begin, self.finish)


class Plans:
    """Plans of a server, keyed by header block including the request line and the empty line."""

    def __init__(self, max_heads: int, max_length: int) -> None:
        known = BoundedCache[bytes, Plan](max_heads)
        self._known = known
        self._alike = BoundedCache[bytes, Plan](max_heads)
        self._max_length = max_length
        self._once: set[int] = set()
        """Hashes of header blocks seen once; they are cached when seen again."""
        self.get = known.get
        """Returns the plan for a known header block, or None."""

    def keep(self, head: bytes, plan: Plan) -> None:
        """Cache the plan for a header block that has one line for each header."""
        if plan.length <= self._max_length and len(head) <= HEAD_BYTES:
            self._known.keep(head, plan)
            essence = essence_of(head)
            # A length in another notation stays in the key, and a second length would go unnoticed.
            if essence is not None and essence[1] == plan.length:
                self._alike.keep(essence[0], plan)

    def find(self, head: bytes) -> Plan | None:
        """Return the plan of a similar block, which differs only in length and idle headers.

        Idle headers are removed as whole lines of printable ASCII, so that the remaining lines
        are exactly those of a block that the general path has parsed.
        """
        if not head or len(head) > HEAD_BYTES:
            return None
        essence = essence_of(head)
        if essence is None:
            return None
        return self.find_alike(head, *essence)

    def find_alike(self, head: bytes, key: bytes, length: int | None, varies: bool) -> Plan | None:
        """Return the plan for a header block whose essence is known."""
        plan = self._alike.get(key)
        if plan is None or length is None or length > self._max_length:
            return None
        plan = plan.with_length(length)
        if not varies or self._came_before(head):
            self._known.keep(head, plan)
        return plan

    def _came_before(self, head: bytes) -> bool:
        number = hash(head)
        if number in self._once:
            return True
        if len(self._once) >= _MAX_ONCE:
            self._once.clear()
        self._once.add(number)
        return False


def essence_of(head: bytes) -> tuple[bytes, int | None, bool] | None:
    """Return the essence of a header block, the body length, and whether it has idle headers.

    The essence is the block without idle headers and length. The length is that of the first
    Content-Length in supported notation, or None; any other Content-Length stays in the essence.
    Returns None for a block that is not plain: non-ASCII or control characters, too many lines, or
    a repeated idle header, which the general path may refuse.
    """
    first, *lines = head.split(b"\r\n")
    count = len(lines)
    if count > _MAX_LINES or head.translate(None, _PLAIN) != b"\r\n" * count:
        return None
    kept, idle, length = [first], set(), None
    for line in lines:
        end = line.find(b":")
        role = _ROLES[line[:end]] if 0 < end <= _MAX_NAME_BYTES else DECIDES
        if role == DECIDES:
            kept.append(line)
        elif role == IDLE:
            name = line[:end].lower()
            if name in idle:
                return None
            idle.add(name)
        elif length is None and is_number(line[end + 1 :]):
            length = int(line[end + 1 :])
        else:
            kept.append(line)
    return b"\r\n".join(kept), length, bool(idle)


def is_number(value: bytes) -> bool:
    """Tell whether a Content-Length value is supported: at most nine digits after spaces."""
    digits = value.lstrip(b" ")
    return digits.isdigit() and len(digits) <= _MAX_LENGTH_DIGITS
