"""The known header blocks of a server, and the rules for adding one."""

from multidict import CIMultiDict, CIMultiDictProxy

from xlaserve.http.connection.plans import Finish, Plan, Plans, is_idle
from xlaserve.http.connection.request import Request
from xlaserve.http.messages import Begin
from xlaserve.http.threads import INLINE_BYTES

_FRAMING = ("Transfer-Encoding", "Upgrade")
"""Headers besides Content-Length that affect framing."""

GENERAL_PATH = (*_FRAMING, "Expect", "Content-Encoding", "Sec-Fetch-Site", "Origin")
"""Headers that only the general path can handle. Every other header is idle, part of a plan, or
belongs to the connection."""


class Heads:
    """The known header blocks of one server."""

    def __init__(self, max_heads: int, max_body_bytes: int) -> None:
        self.plans = Plans(max_heads, min(max_body_bytes, INLINE_BYTES))

    def learn(self, request: Request, begin: Begin, finish: Finish | None) -> None:
        """Cache the header block of a request if the fast path can answer such requests."""
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
    """Return the headers that determine a plan: all except the idle ones."""
    # Build a list: a generator would be slower.
    kept = [(name, value) for name, value in headers.items() if not is_idle(name.lower())]
    return CIMultiDictProxy(CIMultiDict(kept))


def _is_plain(head: bytes, request: Request) -> bool:
    """Tell whether the block has exactly one line for each parsed header."""
    line = f"{request.method} {request.written_target} HTTP/1.1\r\n".encode(
        errors="surrogateescape"
    )
    lines = head.count(b"\r\n")
    if not head.startswith(line) or lines != len(request.headers) + 2:
        return False
    return lines == head.count(b"\r") == head.count(b"\n")
