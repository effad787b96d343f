"""gRPC-Web on the port of HTTP: an adapter to what runs the requests of gRPC."""

import asyncio
from collections.abc import Sequence
from typing import cast

from grpclib.protocol import Stream

from xlaserve.grpc.calls import FieldsView
from xlaserve.grpc.http2.limits import Http2Limits
from xlaserve.grpc.request_headers import refusal, refusal_headers, timeout_seconds
from xlaserve.grpc.runner import Runner
from xlaserve.grpc_web.frames import CONTENT_TYPES
from xlaserve.grpc_web.stream import WebStream
from xlaserve.http.connection.exchange import Exchange
from xlaserve.http.threads import OffLoop
from xlaserve.serving.call import Operation

_OF_HTTP = frozenset({"host", "connection", "transfer-encoding", "te", "content-length"})
"""Headers of the connection, which gRPC knows in another form or not at all."""


class GrpcWeb:
    """Answers gRPC-Web with the services of gRPC, by the same gates and limits.

    A mesh's ModelRuntime is not served: no browser is a mesh.
    """

    def __init__(self, runner: Runner, limits: Http2Limits, threads: OffLoop) -> None:
        self._runner = runner
        self._limits = limits
        self._threads = threads

    def takes(self, media_type: str) -> bool:
        """Tell whether a body of a type is one of gRPC-Web."""
        return media_type in CONTENT_TYPES

    async def answer(self, exchange: Exchange) -> None:
        """Answer a request; its call passes the gates, and the answer says its status at its end.

        An answer that the client has cancelled, or that was abandoned, has no trailers.
        """
        headers = _fields(exchange)
        seconds = timeout_seconds(headers)
        now = asyncio.get_running_loop().time()
        deadline = None if seconds is None else now + seconds
        method = self._runner.methods.get(exchange.path)
        is_served = method is not None and method.row.operation is not Operation.RUNTIME
        stream = WebStream(
            exchange,
            self._limits,
            self._threads,
            deadline=deadline,
            is_text=CONTENT_TYPES[exchange.media_type],
            streaming=method is not None and method.handler.cardinality.client_streaming,
        )
        refused = refusal(headers)
        if refused is None and not is_served:
            view = FieldsView(headers)
            refused = self._runner.no_method(exchange.path, view, exchange.peer, deadline)
        if refused is None:
            await self._runner.run(cast(Stream, stream), headers, exchange.peer)
        else:
            await stream.send_headers(refusal_headers(*refused), end_stream=True)
        stream.end()


def _fields(exchange: Exchange) -> Sequence[tuple[str, str]]:
    """Return the headers of a request as those of gRPC, with names in lower case."""
    request = exchange.request
    fields = [
        (":method", "POST"),
        (":scheme", request.scheme),
        (":path", exchange.path),
        (":authority", request.host),
        ("te", "trailers"),
    ]
    for name, value in request.headers.items():
        lowered = name.lower()
        if lowered not in _OF_HTTP:
            fields.append((lowered, value))
    return fields
