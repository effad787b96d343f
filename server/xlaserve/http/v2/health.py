"""Health endpoints for clients and probes (KServe: Server Live, Ready)."""

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType

import msgspec

from xlaserve.http.edge import RETRY
from xlaserve.http.messages import HttpRequest, HttpResponse, json_response
from xlaserve.http.routing import Body, Route
from xlaserve.http.v2.v2_schemas import Live, Ready
from xlaserve.residence.following import RepositoryFollower
from xlaserve.serving.call import Operation

STATUS_OF_READY: Mapping[bool, HTTPStatus] = MappingProxyType(
    {True: HTTPStatus.OK, False: HTTPStatus.BAD_REQUEST}
)
"""Status by readiness: 4xx if not ready (KServe compatible RESTful API, Server Ready, Model
Ready)."""


def health_response(
    content: object, status: HTTPStatus = HTTPStatus.OK, *, bodies: bool
) -> HttpResponse:
    """Answer with a JSON body, or with only the status."""
    return json_response(content, status) if bodies else HttpResponse(status, compressible=False)


class HealthRoutes:
    """The health handlers; the metrics port serves them too, for probes without a certificate."""

    def __init__(self, follower: RepositoryFollower, *, bodies: bool = True) -> None:
        """Without `bodies`, only the status tells the result, as in Triton."""
        self._follower = follower
        self._bodies = bodies

    def table(self) -> list[Route]:
        """Return the routes of these handlers."""
        return [
            Route(
                "GET",
                "/v2/health/live",
                Operation.HEALTH,
                self.live,
                "Server live",
                "server",
                Body(Live),
            ),
            Route(
                "GET",
                "/v2/health/ready",
                Operation.HEALTH,
                self.ready,
                "Server ready",
                "server",
                Body(Ready),
                other={400: "Not ready."},
            ),
        ]

    async def live(self, request: HttpRequest) -> HttpResponse:
        """Answer true: a server that answers is live."""
        return health_response(Live(live=True), bodies=self._bodies)

    async def ready(self, request: HttpRequest) -> HttpResponse:
        """Tell whether the server is ready, as the readiness setting defines it, or why not."""
        follower = self._follower
        if follower.server_ready:
            return health_response(Ready(ready=True), bodies=self._bodies)
        content = Ready(ready=False, reason=follower.why_not_ready())
        answer = health_response(content, STATUS_OF_READY[False], bodies=self._bodies)
        return msgspec.structs.replace(answer, headers={**answer.headers, **RETRY})
