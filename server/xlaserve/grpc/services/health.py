"""The gRPC health service: readiness of the server and of models."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractContextManager, aclosing
from types import MappingProxyType
from typing import Any, Protocol

from grpclib import GRPCError
from grpclib.const import Status
from grpclib.server import Stream

from xlaserve.serving.access.sight import Sees, everything
from xlaserve_proto.grpc.health import v1
from xlaserve_proto.grpc.health.v1 import HealthCheckResponseServingStatus as ServingStatus

_MOST_LISTED = 100
"""List fails if there are more names; the protocol suggests this limit (grpc.health.v1, List)."""
_SHOWN_CHARACTERS = 80
"""Length to which an unknown name is truncated in error messages."""


class ReadinessSource(Protocol):
    """Reports readiness and notifies about changes."""

    def server_ready(self) -> bool:
        """Tell whether the server is ready."""
        ...

    def model_ready(self, name: str) -> bool | None:
        """Tell whether a model is ready; None if the name is unknown."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether unknown names are final; false while models may still appear, during startup."""
        ...

    def model_names(self) -> Collection[str]:
        """Return the names of known models."""
        ...

    def subscribe(self) -> AbstractContextManager[asyncio.Event]:
        """Return a context manager with an event that is set at every change."""
        ...


class HealthService(v1.HealthBase):
    """`grpc.health.v1.Health`. A name identifies a service or a model; "" is the server."""

    def __init__(
        self,
        *,
        services: Collection[str],
        source: ReadinessSource,
        max_watchers: int,
        sight: Callable[[], Sees] = lambda: everything,
    ) -> None:
        """`sight` returns the models visible to the current caller."""
        self._services = frozenset(("", *services))
        self._source = source
        self._max_watchers = max_watchers
        self._sight = sight
        self._watchers: set[asyncio.Event] = set()
        self._closed = False

    async def check(self, health_check_request: v1.HealthCheckRequest) -> v1.HealthCheckResponse:
        """Return the status of a name; raise NOT_FOUND if it is unknown."""
        name = health_check_request.service
        status = self._status(name, self._sight())
        if status is ServingStatus.SERVICE_UNKNOWN:
            raise GRPCError(Status.NOT_FOUND, f"unknown service '{name[:_SHOWN_CHARACTERS]}'")
        return v1.HealthCheckResponse(status)

    async def list(self, health_list_request: v1.HealthListRequest) -> v1.HealthListResponse:
        """Return the status of every known name; raise RESOURCE_EXHAUSTED if there are too many."""
        sees = self._sight()
        names = self._services.union(filter(sees, self._source.model_names()))
        if len(names) > _MOST_LISTED:
            text = f"{len(names)} services and models, the limit of a list is {_MOST_LISTED}"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, text)
        return v1.HealthListResponse(
            {name: v1.HealthCheckResponse(self._status(name, sees)) for name in sorted(names)}
        )

    async def watch(
        self, health_check_request: v1.HealthCheckRequest
    ) -> AsyncIterator[v1.HealthCheckResponse]:
        """Send the status of a name now and after every change, until the service is closed.

        An unknown name has the status SERVICE_UNKNOWN until it becomes known.
        """
        if len(self._watchers) >= self._max_watchers:
            text = f"{self._max_watchers} health watches are already open (max_health_watchers)"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, text)
        with self._source.subscribe() as changed:
            self._watchers.add(changed)
            try:
                async for status in self._statuses(health_check_request.service, changed):
                    yield v1.HealthCheckResponse(status)
            finally:
                self._watchers.discard(changed)

    def close(self) -> None:
        """End every watch after it has sent the current status."""
        self._closed = True
        for changed in self._watchers:
            changed.set()

    async def _statuses(self, name: str, changed: asyncio.Event) -> AsyncIterator[ServingStatus]:
        sent = None
        closed = False
        while not closed:
            # Read `_closed` and clear the event before reading the status, to miss no change.
            closed = self._closed
            changed.clear()
            # Ask for the visible models every time: the access rules may have changed.
            status = self._status(name, self._sight())
            if status is not sent:
                yield status
                sent = status
            if not closed:
                await changed.wait()

    def _status(self, name: str, sees: Sees) -> ServingStatus:
        if name in self._services:
            ready: bool | None = self._source.server_ready()
        else:
            # Report a hidden model exactly like a missing one.
            hidden = None if self._source.is_settled else False
            ready = self._source.model_ready(name) if sees(name) else hidden
        return ServingStatus(_STATUSES[ready])

    async def _call_rpc_handler_server_stream(
        self,
        handler: Callable[[Any], AsyncIterator[Any]],
        stream: Stream[Any, Any],
        request: Any,
    ) -> None:
        # Close the generator explicitly: if the client disconnects, betterproto leaves it to the
        # garbage collector, and the watcher would remain counted until then.
        async with aclosing(handler(request)) as responses:  # type: ignore[type-var]
            async for response in responses:
                await stream.send_message(response)


_STATUSES = MappingProxyType(
    {
        True: ServingStatus.SERVING,
        False: ServingStatus.NOT_SERVING,
        None: ServingStatus.SERVICE_UNKNOWN,
    }
)
"""Readiness -> health status; None means an unknown name."""
