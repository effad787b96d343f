"""Serves gRPC-Web on the HTTP port, through the runner of gRPC requests."""

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
"""HTTP/1.1 headers that are not passed on as gRPC headers."""


class GrpcWeb:
    """Answers gRPC-Web requests with the gRPC services, under the same access rules and limits.

    ModelMesh's ModelRuntime service is not available over gRPC-Web.
    """

    def __init__(self, runner: Runner, limits: Http2Limits, threads: OffLoop) -> None:
        self._runner = runner
        self._limits = limits
        self._threads = threads

    def takes(self, media_type: str) -> bool:
        """Tell whether a media type is gRPC-Web's."""
        return media_type in CONTENT_TYPES

    async def answer(self, exchange: Exchange) -> None:
        """Answer a request; the trailers at the end of the response have the gRPC status.

        If the client cancels, or the method fails to finish, the response has no trailers.
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
    """Convert the headers of an HTTP/1.1 request to gRPC headers, with lower-case names."""
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
