"""The health service: readiness of the server and of models, once or as a watch."""

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
"""The protocol asks for an error beyond a limit, and names this one (grpc.health.v1, List)."""
_SHOWN_CHARACTERS = 80
"""Characters of an unknown name in an error text."""


class ReadinessSource(Protocol):
    """Reports readiness, and its changes."""

    def server_ready(self) -> bool:
        """Tell whether the server is ready."""
        ...

    def model_ready(self, name: str) -> bool | None:
        """Tell whether a model is ready; None for an unknown one."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether unknown names are final; earlier, a model may still appear."""
        ...

    def model_names(self) -> Collection[str]:
        """Return the names of known models."""
        ...

    def subscribe(self) -> AbstractContextManager[asyncio.Event]:
        """Provide an event that is set at every change, during a block."""
        ...


class HealthService(v1.HealthBase):
    """`grpc.health.v1.Health`. A name is a service of the server or a model; "" is the server."""

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
        """Return the status of a name; an unknown one is NOT_FOUND."""
        name = health_check_request.service
        status = self._status(name, self._sight())
        if status is ServingStatus.SERVICE_UNKNOWN:
            raise GRPCError(Status.NOT_FOUND, f"unknown service '{name[:_SHOWN_CHARACTERS]}'")
        return v1.HealthCheckResponse(status)

    async def list(self, health_list_request: v1.HealthListRequest) -> v1.HealthListResponse:
        """Return the status of every known name, as Check would, up to a limit."""
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
        """Send the status of a name now and at every change, until the service is closed.

        A name that is not known is SERVICE_UNKNOWN, and may become known.
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
        """End every watch, once it has sent the status of this moment."""
        self._closed = True
        for changed in self._watchers:
            changed.set()

    async def _statuses(self, name: str, changed: asyncio.Event) -> AsyncIterator[ServingStatus]:
        sent = None
        closed = False
        while not closed:
            # Both are read before the status is, so that no change after it goes unseen.
            closed = self._closed
            changed.clear()
            # Other rules may hold by now.
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
            # Like a missing model, which is unknown while models may still come.
            hidden = None if self._source.is_settled else False
            ready = self._source.model_ready(name) if sees(name) else hidden
        return ServingStatus(_STATUSES[ready])

    async def _call_rpc_handler_server_stream(
        self,
        handler: Callable[[Any], AsyncIterator[Any]],
        stream: Stream[Any, Any],
        request: Any,
    ) -> None:
        # betterproto leaves a generator whose client has gone to the garbage collector, and with
        # it the watcher that is counted.
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
"""Readiness as the source reports it -> status; None for a service not known."""
