"""Requests and responses as HTTP handlers see them."""

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
"""Header that forbids caching a response (RFC 9111, 5.2.2.5)."""

JOINED_BYTES = 64 << 10
"""Answers up to this size are joined into one write; the parts of larger ones are not copied."""

_NO_HEADERS: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())


async def _no_body() -> memoryview:
    return memoryview(b"")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request for a handler: path parameters, and a body read on demand."""

    names: Mapping[str, str] = field(default_factory=dict)
    """The path parameters of the route, percent-decoded."""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: CIMultiDictProxy[str] = field(default_factory=lambda: _NO_HEADERS)
    read: Callable[[], Awaitable[memoryview]] = _no_body
    """Returns the whole body, decompressed and within the limits; raises TooLarge and others."""
    call: Call = field(default_factory=Call)
    """The request as a call of the core, which has passed the gates."""
    grow: Callable[[int, str], None] = lambda count, what: None
    """Charges further bytes until the request is answered, with a name for the error text; raises
    BudgetExhausted."""

    @property
    def content_type(self) -> str:
        """Return the media type in lower case without parameters, or an empty string."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()


# A msgspec struct, as in the core: a frozen dataclass takes several times as long to create.
class HttpResponse(msgspec.Struct, frozen=True, gc=False):
    """The response of a handler."""

    status: HTTPStatus = HTTPStatus.OK
    content_type: str = JSON_TYPE
    parts: Sequence[Buffer] = ()
    """The body, in parts that are sent without being joined."""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    compressible: bool = True
    """Whether the response may be compressed if the client accepts it. Only pages and responses of
    models may be: tritonclient.http.aio accepts compression for every request, but decompresses
    only the responses of models."""

    @property
    def size(self) -> int:
        """Return the size of the body in bytes."""
        size = 0
        for part in self.parts:
            size += part.nbytes if isinstance(part, memoryview) else len(part)
        return size


@dataclass(frozen=True, slots=True)
class HttpStream:
    """A response sent in parts."""

    content_type: str
    parts: AsyncGenerator[bytes, None]
    """The next part is requested once the client has read nearly all previous ones. An exception
    before the first part is answered like an exception of a handler."""


class Nothing(msgspec.Struct):
    """An empty JSON object."""


Handler: TypeAlias = Callable[[HttpRequest], Awaitable[HttpResponse | HttpStream]]
"""Answers a request; an XlaserveError becomes `{"error": text}` with its status."""

Answered: TypeAlias = Callable[[HttpResponse | BaseException], None]
"""Called once, on the event loop, with the response to a request or its error."""

Begin: TypeAlias = Callable[[memoryview, Answered, Headers, Peer, int], HttpResponse | Pending]
"""Answers a request immediately, or later by the callback, with its response or error.

Each invocation creates a call with the given headers and peer, and the call passes the gates. The
number is the arrival time of the headers on the engine's clock; 0 means now. Raises an error that
is known immediately.
"""

Prepare: TypeAlias = Callable[[HttpRequest], Begin | None]
"""Returns a function for all requests that differ from the given one only in the body.

Returns None if only the handler can answer them. Raises XlaserveError if all of them are refused.
"""

MakeCall: TypeAlias = Callable[[Mapping[str, str], Headers, Peer], Call]
"""Creates the call of a request; the mapping has the path parameters."""


def json_response(value: object, status: HTTPStatus = HTTPStatus.OK) -> HttpResponse:
    """Return an uncompressed JSON response; msgspec must support the value."""
    return HttpResponse(status, parts=[msgspec.json.encode(value)], compressible=False)


def read_json(body: Buffer, kind: Any, *, max_depth: int) -> Any:
    """Decode a small JSON body as a msgspec type; an empty body counts as an empty object.

    Raises InvalidBody with the position of the error.
    """
    check_depth(body, max_depth)
    check_members(body)
    check_elements(body)
    try:
        # Decode to text first: the ignored parts of the body must be valid UTF-8, too.
        return msgspec.json.decode(str(body, "utf-8") or "{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidBody(f"the body is not the expected JSON: {error}") from error
