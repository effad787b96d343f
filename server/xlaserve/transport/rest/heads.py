"""Which heads of HTTP requests are known, and what a head must be like to be kept."""

from aiohttp import HttpVersion11, web
from multidict import CIMultiDict, CIMultiDictProxy

from xlaserve.transport.rest.messages import Begin
from xlaserve.transport.rest.plans import Finish, Plan, Plans, is_idle
from xlaserve.transport.rest.threads import INLINE_BYTES

_FRAMING = ("Transfer-Encoding", "Upgrade")
"""Headers with which more follows a head than its Content-Length says."""

GENERAL_PATH = (*_FRAMING, "Expect", "Content-Encoding", "Sec-Fetch-Site", "Origin")
"""Headers with an effect that only the general path knows. No other header has one but those that
a Plan is made from, and those of the connection, which aiohttp has read."""


class Heads:
    """The heads that are known; one for a server."""

    def __init__(self, max_heads: int, max_body_bytes: int) -> None:
        self.plans = Plans(max_heads, min(max_body_bytes, INLINE_BYTES))

    def learn(
        self, head: bytes, request: web.BaseRequest, begin: Begin, finish: Finish | None
    ) -> None:
        """Keep the head of a request that the fast path could have answered as well."""
        length = request.content_length
        if (
            length is not None
            and request.version == HttpVersion11
            and request.keep_alive
            and not any(name in request.headers for name in GENERAL_PATH)
        ):
            plan = Plan(request.method, request.raw_path, length, begin, finish)
            self.plans.keep(head, plan)


def deciding(headers: CIMultiDictProxy[str]) -> CIMultiDictProxy[str]:
    """Return the headers that a plan may be made from: all but those that are idle."""
    return CIMultiDictProxy(
        CIMultiDict((name, value) for name, value in headers.items() if not is_idle(name.lower()))
    )


def size_of(head: bytes, request: web.BaseRequest) -> int | None:
    """Return how many bytes a request has in all, if the head is its own and says so.

    It is its own if its first line is, and if it has as many lines as aiohttp found: nothing in it
    ended a line, or the head, for one and not for the other.
    """
    line = f"{request.method} {request.raw_path} HTTP/1.1\r\n".encode(errors="surrogateescape")
    lines = head.count(b"\r\n")
    if (
        not head.startswith(line)
        or lines != len(request.raw_headers) + 2
        or not lines == head.count(b"\r") == head.count(b"\n")
        or any(name in request.headers for name in _FRAMING)
    ):
        return None
    return len(head) + (request.content_length or 0)
