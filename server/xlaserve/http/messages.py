"""A request and a response of the gateway, as its handlers see them."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

from xlaserve.errors import InvalidBody
from xlaserve.http.json.json_text import check_depth, check_elements, check_members
from xlaserve.serving.call import Call, Headers, Peer
from xlaserve.serving.inference import Pending
from xlaserve.tensors import Buffer

JSON_TYPE = "application/json"
BINARY_TYPE = "application/octet-stream"
HTML_TYPE = "text/html"

NO_STORE: Mapping[str, str] = MappingProxyType({"Cache-Control": "no-store"})
"""Header of uncacheable answers (RFC 9111, 5.2.2.5)."""

JOINED_BYTES = 64 << 10
"""Answers up to this size leave in one write; the pieces of larger ones are not copied."""

_NO_HEADERS: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())


async def _no_body() -> memoryview:
    return memoryview(b"")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request for a handler: names from the path, and a body read on demand."""

    names: Mapping[str, str] = field(default_factory=dict)
    """The parts of the path that the route names, percent-decoded."""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: CIMultiDictProxy[str] = field(default_factory=lambda: _NO_HEADERS)
    read: Callable[[], Awaitable[memoryview]] = _no_body
    """Returns the whole body, decompressed and within the limits; raises TooLarge and others."""
    call: Call = field(default_factory=Call)
    """Itself as the core knows it; it has passed the gates."""
    grow: Callable[[int, str], None] = lambda count, what: None
    """Count this many more bytes that the request takes, until it is answered, and for what; raises
    BudgetExhausted."""

    @property
    def content_type(self) -> str:
        """Return the media type in lower case without parameters, or empty."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()


# Like those of the core: a frozen dataclass takes several times as long to make.
class HttpResponse(msgspec.Struct, frozen=True, gc=False):
    """The answer of a handler."""

    status: HTTPStatus = HTTPStatus.OK
    content_type: str = JSON_TYPE
    parts: Sequence[Buffer] = ()
    """The body, in pieces that are sent without being joined."""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    compressible: bool = True
    """Whether it may be compressed when the client accepts that: answers of models and pages.
    tritonclient.http.aio accepts it for every request, and inflates the answers of models alone."""

    @property
    def size(self) -> int:
        """The bytes of the body."""
        size = 0
        for part in self.parts:
            size += part.nbytes if isinstance(part, memoryview) else len(part)
        return size


@dataclass(frozen=True, slots=True)
class HttpStream:
    """An answer sent in parts."""

    content_type: str
    parts: AsyncGenerator[bytes, None]
    """Is asked for the next part once the client has read nearly all of those before it. What it
    raises before its first part is answered as what a handler raises."""


class Nothing(msgspec.Struct):
    """An empty object."""


Handler: TypeAlias = Callable[[HttpRequest], Awaitable[HttpResponse | HttpStream]]
"""Answers a request; raises XlaserveError, which becomes `{"error": text}` and its status."""

Answered: TypeAlias = Callable[[HttpResponse | BaseException], None]
"""Called once, on the event loop, with the answer to a request or its error."""

Begin: TypeAlias = Callable[[memoryview, Answered, Headers, Peer, int], HttpResponse | Pending]
"""Answers a body at once, or calls back later with what a handler would return or raise.

Each time it makes a call, with the headers and the peer of this request, that passes the gates. The
number is when the headers were there, by the clock of the engine; 0 for now.
Raises what a handler would raise, if it is known at once.
"""

Prepare: TypeAlias = Callable[[HttpRequest], Begin | None]
"""Makes of a request without its body what answers all those that differ in the body only.

Returns None where only the handler can. Raises XlaserveError where every such request is refused.
"""

MakeCall: TypeAlias = Callable[[Mapping[str, str], Headers, Peer], Call]
"""Makes the call of a request, of the names in its path."""


def json_response(value: object, status: HTTPStatus = HTTPStatus.OK) -> HttpResponse:
    """Answer with a value that msgspec can write; it is not compressed."""
    return HttpResponse(status, parts=[msgspec.json.encode(value)], compressible=False)


def read_json(body: Buffer, kind: Any, *, max_depth: int) -> Any:
    """Read a small JSON body as a msgspec type; an empty one is an empty object.

    Raises InvalidBody that says where it is wrong.
    """
    check_depth(body, max_depth)
    check_members(body)
    check_elements(body)
    try:
        # As text: what is not read of the body must be UTF-8 as well.
        return msgspec.json.decode(str(body, "utf-8") or "{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidBody(f"the body is not the JSON that is expected here: {error}") from error
