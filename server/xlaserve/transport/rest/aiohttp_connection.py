"""aiohttp's connection, with all that the gateway takes of it and aiohttp does not promise.

No other module touches a private of aiohttp. `PRIVATES` names them, a test looks for each by its
name, and `pyproject.toml` bounds aiohttp to the versions with which the tests were run.
"""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

PRIVATES: Mapping[str, str] = MappingProxyType(
    {
        "_waiter": "the future for which a connection waits while it has no request",
        "_process_keepalive": "the callback that closes a connection that is idle for too long",
        "_next_keepalive_close_time": "the loop time before which that callback closes nothing",
    }
)
"""Each private of `aiohttp.web_protocol.RequestHandler` that is used here, with what it is."""


def missing_privates() -> list[str]:
    """Return those of `PRIVATES` that the installed aiohttp does not have."""
    return [name for name in PRIVATES if not hasattr(RequestHandler, name)]


class AiohttpConnection(RequestHandler):
    """A connection that can be asked whether it waits for a request, and kept from closing."""

    def __init__(
        self, manager: web.Server, *, loop: asyncio.AbstractEventLoop, **options: Any
    ) -> None:
        self._awaited: asyncio.Future[None] | None = None
        super().__init__(manager, loop=loop, **options)
        self._idle_seconds = self.keepalive_timeout

    # aiohttp sets it when it begins to wait for a request, and says so in no other way.
    def _awaited_request(self) -> "asyncio.Future[None] | None":
        return self._awaited

    def _await_request(self, waiter: "asyncio.Future[None] | None") -> None:
        self._awaited = waiter
        if waiter is not None:
            self.answered_all()

    _waiter = property(_awaited_request, _await_request)  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

    def answered_all(self) -> None:
        """Take note that aiohttp has answered all requests that it has read."""

    @property
    def awaits_request(self) -> bool:
        """Tell whether aiohttp has answered all requests that it has read.

        It may have the first bytes of a header block then.
        """
        waiter = self._waiter
        return waiter is not None and not waiter.done()

    @property
    def used_at(self) -> float:
        """Return the loop time of the last answer of which aiohttp does not know.

        That is now while there is such a request.
        """
        return 0.0

    def _process_keepalive(self) -> None:
        # Looked at when the time is over, so that no answer has to say anything.
        idle_until = self.used_at + self._idle_seconds
        self._next_keepalive_close_time = max(self._next_keepalive_close_time, idle_until)
        super()._process_keepalive()
