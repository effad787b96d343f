"""A request of another protocol on the HTTP port, and the means to answer it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from xlaserve.http.connection.held import Held
from xlaserve.http.connection.request import Request
from xlaserve.serving.call import Peer


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request whose host and origin were checked, and nothing else."""

    request: Request
    path: str
    """Its target without the query."""
    media_type: str
    """Media type of its body, in lower case."""
    peer: Peer
    held: Held
    read: Callable[[], Awaitable[memoryview]]
    """Returns the whole body, decompressed and within the limits; raises TooLarge and others."""
    headers: Mapping[str, str]
    """Headers that the answer has besides its own."""


class OtherProtocol(Protocol):
    """Answers requests of another protocol on REST's port; each passes the gates there."""

    def takes(self, media_type: str) -> bool:
        """Tell whether a POST with a body of this type, in lower case, is of the protocol."""
        ...

    async def answer(self, exchange: Exchange) -> None:
        """Answer a request, and return when the answer was sent."""
        ...
