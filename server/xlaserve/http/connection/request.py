"""A general-path request: its header block is parsed, its body is arriving."""

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from multidict import MultiDict, MultiDictProxy

from xlaserve.http.connection.head_parser import HeadParser, tokens
from xlaserve.http.connection.request_body import Body

if TYPE_CHECKING:
    from xlaserve.http.connection.connection import Connection

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Request:
    """A general-path request and its connection."""

    def __init__(
        self, head: HeadParser, body: Body, connection: "Connection", waited_seconds: float
    ) -> None:
        self.method = head.method
        self.target = head.target
        """The target in origin form: path and query, undecoded."""
        self.headers = head.headers
        self.is_1_1 = head.is_1_1
        """Whether the version is HTTP/1.1; otherwise it is HTTP/1.0."""
        self.keeps_alive = head.keeps_alive and head.method != "CONNECT"
        """Whether the client wants to keep the connection open."""
        self.written_target = head.written_target
        """The target exactly as in the request line."""
        self.block = bytes(head.block)
        """The raw header block."""
        self.body = body
        self.connection = connection
        self.waited_seconds = waited_seconds
        """Seconds already spent waiting for the body on the fast path."""
        self.opened_ns = 0
        """Arrival time of the header block if the fast path received it; otherwise 0."""
        # RFC 9110, 10.1.1: not for HTTP/1.0; other expectations are ignored.
        self._is_asking = head.is_1_1 and "100-continue" in tokens(head.headers, "Expect")
        self.is_begun = False
        """Whether the header block of the response was sent."""
        self.is_last = False
        """Whether the connection closes after the response."""

    @property
    def transport(self) -> asyncio.Transport:
        """Return the transport of the connection."""
        return self.connection.transport

    @property
    def scheme(self) -> str:
        """Return `https` if the connection is encrypted, else `http`."""
        return "http" if self.transport.get_extra_info("ssl_object") is None else "https"

    @property
    def host(self) -> str:
        """Return the Host header, or an empty string."""
        return self.headers.get("Host", "")

    @property
    def media_type(self) -> str:
        """Return the body's media type in lower case without parameters, or an empty string."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @cached_property
    def query(self) -> MultiDictProxy[str]:
        """Return the parsed query string."""
        text = self.target.partition("?")[2].partition("#")[0]
        pairs = parse_qsl(text, keep_blank_values=True, errors="surrogateescape")
        return MultiDictProxy(MultiDict(pairs))

    def let_body_come(self) -> None:
        """Send `100 Continue` if the client is waiting for it."""
        if self._is_asking:
            self._is_asking = False
            self.transport.write(_CONTINUE)

    @property
    def may_lack_body(self) -> bool:
        """Tell whether the client may omit the body because `100 Continue` was not sent."""
        return self._is_asking and not self.body.is_complete
