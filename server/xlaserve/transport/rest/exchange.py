"""One request of another protocol on the port of HTTP, and the means to answer it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from xlaserve.core.serving.call import Peer
from xlaserve.transport.rest.held import Held


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request whose host and origin were checked, and nothing else."""

    request: web.BaseRequest
    path: str
    """Its target without what stands behind a question mark."""
    media_type: str
    """Type of its body, in lower case."""
    peer: Peer
    held: Held
    read: Callable[[], Awaitable[memoryview]]
    """Return the whole body, decompressed and within the limits; raises TooLarge and others."""
    headers: Mapping[str, str]
    """Headers that the answer has besides its own."""
    begin: Callable[[web.StreamResponse], None]
    """Is called with the answer before its headers are sent."""


class OtherProtocol(Protocol):
    """Answers what is no request of REST; each request passes the gates there."""

    def takes(self, media_type: str) -> bool:
        """Tell whether a POST with a body of this type, in lower case, is of the protocol."""
        ...

    async def answer(self, exchange: Exchange) -> web.StreamResponse:
        """Answer a request, and return what was sent."""
        ...
