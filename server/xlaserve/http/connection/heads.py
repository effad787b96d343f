"""The known heads of HTTP requests, and the rules for keeping one."""

from multidict import CIMultiDict, CIMultiDictProxy

from xlaserve.http.connection.plans import Finish, Plan, Plans, is_idle
from xlaserve.http.connection.request import Request
from xlaserve.http.messages import Begin
from xlaserve.http.threads import INLINE_BYTES

_FRAMING = ("Transfer-Encoding", "Upgrade")
"""Framing headers besides Content-Length."""

GENERAL_PATH = (*_FRAMING, "Expect", "Content-Encoding", "Sec-Fetch-Site", "Origin")
"""Headers with an effect that only the general path knows. No other header has one but those that
a Plan is made from, and those of the connection."""


class Heads:
    """Known header blocks; one table per server."""

    def __init__(self, max_heads: int, max_body_bytes: int) -> None:
        self.plans = Plans(max_heads, min(max_body_bytes, INLINE_BYTES))

    def learn(self, request: Request, begin: Begin, finish: Finish | None) -> None:
        """Keep the head of a request that the fast path could have answered as well."""
        head, length = request.block, request.body.length
        if (
            length is not None
            and request.is_1_1
            and request.keeps_alive
            and _is_plain(head, request)
            and not any(name in request.headers for name in GENERAL_PATH)
        ):
            plan = Plan(request.method, request.target, length, begin, finish)
            self.plans.keep(head, plan)


def deciding(headers: CIMultiDictProxy[str]) -> CIMultiDictProxy[str]:
    """Return the headers that define a plan: all but the idle ones."""
    # A list: a generator would be resumed for each of them.
    kept = [(name, value) for name, value in headers.items() if not is_idle(name.lower())]
    return CIMultiDictProxy(CIMultiDict(kept))


def _is_plain(head: bytes, request: Request) -> bool:
    """Tell whether a header block has one line for each parsed header."""
    line = f"{request.method} {request.written_target} HTTP/1.1\r\n".encode(
        errors="surrogateescape"
    )
    lines = head.count(b"\r\n")
    if not head.startswith(line) or lines != len(request.headers) + 2:
        return False
    return lines == head.count(b"\r") == head.count(b"\n")
