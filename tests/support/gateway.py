"""The HTTP server alone, with routes that a test defines."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from xlaserve.concurrency.host import HostThreads
from xlaserve.grpc.http2.limits import Shared
from xlaserve.http.connection.server import HttpLimits, HttpServer
from xlaserve.http.routing import RouteTable
from xlaserve.net.ledger import Ledger
from xlaserve.net.memory import MessageMemory
from xlaserve.process.endpoints import Endpoint, listen
from xlaserve.serving.gates import Gates


@asynccontextmanager
async def serving_routes(
    routes: RouteTable,
    limits: HttpLimits,
    ledger: Ledger | None = None,
    *,
    backlog: int = 8,
    gates: Gates | None = None,
) -> AsyncIterator[tuple[str, HttpServer]]:
    """Serve on a free port for the duration of a block; yields the address and the server."""
    listener = listen(
        "http_endpoint", Endpoint(port=0), host="127.0.0.1", unix_socket_mode=0o600, backlog=backlog
    )
    threads = HostThreads(1)
    server = HttpServer(
        routes,
        limits,
        threads,
        Shared(ledger or Ledger(1 << 30), MessageMemory(0)),
        gates or Gates(),
    )
    server.listen(listener.socket)
    try:
        yield listener.address, server
    finally:
        await server.drain(5)
        threads.close()
