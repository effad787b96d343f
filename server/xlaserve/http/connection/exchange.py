"""A request of another protocol on the HTTP port, with everything needed to answer it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from xlaserve.http.connection.held import Held
from xlaserve.http.connection.request import Request
from xlaserve.serving.call import Peer


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request whose Host and Origin were checked; it has not passed the gates."""

    request: Request
    path: str
    """The request target without its query."""
    media_type: str
    """Media type of the body, in lower case."""
    peer: Peer
    held: Held
    read: Callable[[], Awaitable[memoryview]]
    """Returns the whole body, decompressed and within the limits; raises TooLarge and others."""
    headers: Mapping[str, str]
    """Headers to add to the response."""


class OtherProtocol(Protocol):
    """Answers requests of another protocol on the REST port; it passes them through the gates."""

    def takes(self, media_type: str) -> bool:
        """Tell whether a POST with this media type, in lower case, belongs to the protocol."""
        ...

    async def answer(self, exchange: Exchange) -> None:
        """Send the response to a request."""
        ...
