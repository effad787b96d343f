"""A model of a V2 gRPC server."""

import asyncio
from collections.abc import Sequence

from xlaserve.benchmark.errors import BenchmarkRefused, ServerUnreachable
from xlaserve.benchmark.grpc_connection import GrpcConnection, GrpcRequest
from xlaserve.benchmark.inputs import Inputs
from xlaserve.benchmark.load import Connect, Connection, Load
from xlaserve.tensors import TensorSpec
from xlaserve.transport.grpc.client import Client, infer_request
from xlaserve.transport.grpc.codec import WireCodec

_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_UNIX = "unix:"


class GrpcTarget:
    """At `host:port` or `unix:path`."""

    protocol = "grpc"
    multiplexes = True

    def __init__(self, address: str, model: str, version: str, *, timeout: float) -> None:
        self._address, self._timeout = address, timeout
        self._model, self._version = model, version

    async def specs(self) -> Sequence[TensorSpec]:
        """Return the inputs of the model (V2 protocol, Model Metadata); raises XlaserveError."""
        async with Client(self._address, timeout=self._timeout) as client:
            return await client.inputs(self._model, self._version)

    async def probe(self, inputs: Inputs) -> None:
        """Run one inference; raises CallFailed."""
        async with Client(self._address, timeout=self._timeout) as client:
            await client.infer(self._model, self._version, inputs)

    def connector(self, inputs: Inputs) -> Connect:
        """Return what opens HTTP/2 connections that ask for this inference."""
        message = WireCodec().encode_message(infer_request(self._model, self._version, inputs))
        authority = "localhost" if self._address.startswith(_UNIX) else self._address
        request = GrpcRequest(authority, _METHOD, message)

        async def connect(load: Load, streams: int) -> Connection:
            try:
                async with asyncio.timeout(self._timeout):
                    connection = await self._open(request, load)
                    await connection.ready
            except TimeoutError as error:
                raise ServerUnreachable(self._address, "no answer in time") from error
            except OSError as error:
                problem = f"cannot connect: {error.strerror or error}"
                raise ServerUnreachable(self._address, problem) from error
            if connection.max_streams < streams:
                limit = connection.max_streams
                connection.close()
                raise BenchmarkRefused(
                    f"{self._address}: {streams} requests on one connection, but the server "
                    f"allows {limit}; --streams or --connections spreads them"
                )
            return connection

        return connect

    async def _open(self, request: GrpcRequest, load: Load) -> GrpcConnection:
        loop = asyncio.get_running_loop()

        def make() -> GrpcConnection:
            return GrpcConnection(self._address, request, load)

        if self._address.startswith(_UNIX):
            path = self._address.removeprefix(_UNIX)
            return (await loop.create_unix_connection(make, path))[1]
        host, _, port = self._address.rpartition(":")
        return (await loop.create_connection(make, host.strip("[]"), int(port)))[1]
