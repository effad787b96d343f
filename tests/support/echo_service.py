"""A custom gRPC service with a method of each kind, using existing protobuf messages."""

from collections.abc import Mapping

from grpclib.const import Cardinality, Handler
from grpclib.server import Stream

from xlaserve import Models, Service
from xlaserve_proto.grpc.health.v1 import HealthCheckRequest as Asked
from xlaserve_proto.grpc.health.v1 import HealthCheckResponse as Answered

REFERENCE = f"{__file__}:create"
"""Value for `--service`."""


class Echo:
    """Service `test.Echo`: echoes each request; a method with a single response echoes one."""

    async def _echo(self, stream: "Stream[Asked, Answered]") -> None:
        while await stream.recv_message() is not None:
            await stream.send_message(Answered())
            if not stream._cardinality.client_streaming:
                return

    async def _last(self, stream: "Stream[Asked, Answered]") -> None:
        async for _ in stream:
            pass
        await stream.send_message(Answered())

    def __mapping__(self) -> Mapping[str, Handler]:
        rows = {
            "Unary": (self._echo, Cardinality.UNARY_UNARY),
            "Last": (self._last, Cardinality.STREAM_UNARY),
            "Many": (self._echo, Cardinality.UNARY_STREAM),
            "Chat": (self._echo, Cardinality.STREAM_STREAM),
        }
        return {
            f"/test.Echo/{name}": Handler(run, cardinality, Asked, Answered)
            for name, (run, cardinality) in rows.items()
        }


def create(models: Models) -> Service:
    """Create the service."""
    return Service(handler=Echo())
