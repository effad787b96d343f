"""Liveness and readiness over HTTP, with small JSON bodies that every client can read."""

import json
from collections.abc import Callable
from http import HTTPStatus

from aiohttp import web


def health_routes(server_ready: Callable[[], bool]) -> list[web.RouteDef]:
    """Return `GET /v2/health/live` and `GET /v2/health/ready` (V2 protocol, Health)."""

    async def live(request: web.Request) -> web.Response:
        return _json({"live": True}, HTTPStatus.OK)

    async def ready(request: web.Request) -> web.Response:
        is_ready = server_ready()
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return _json({"ready": is_ready}, status)

    return [web.get("/v2/health/live", live), web.get("/v2/health/ready", ready)]


def _json(body: dict[str, bool], status: HTTPStatus) -> web.Response:
    return web.Response(text=json.dumps(body), status=status.value, content_type="application/json")
