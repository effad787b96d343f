"""A model to measure, reached over gRPC."""

import asyncio
from collections.abc import Sequence

from xlaserve.bench.errors import BenchmarkRefused, ServerUnreachable
from xlaserve.bench.grpc_connection import GrpcConnection, GrpcRequest
from xlaserve.bench.inputs import Inputs
from xlaserve.bench.load import Connect, Connection, Load
from xlaserve.dialing.address import ServerAddress
from xlaserve.dialing.over_grpc import Client, infer_request
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.tensors import TensorSpec

_METHOD = "/inference.GRPCInferenceService/ModelInfer"


class GrpcTarget:
    """A model reached over gRPC."""

    protocol = "grpc"
    multiplexes = True

    def __init__(self, address: ServerAddress, model: str, version: str, *, timeout: float) -> None:
        self._address, self._timeout = address, timeout
        self._model, self._version = model, version

    async def specs(self) -> Sequence[TensorSpec]:
        """Return the inputs of the model (V2 protocol, Model Metadata); raise XlaserveError."""
        async with Client(self._address, timeout=self._timeout) as client:
            return await client.inputs(self._model, self._version)

    async def probe(self, inputs: Inputs) -> None:
        """Run one inference; raise CallFailed if it fails."""
        async with Client(self._address, timeout=self._timeout) as client:
            await client.infer(self._model, self._version, inputs)

    def connector(self, inputs: Inputs) -> Connect:
        """Return a function that opens HTTP/2 connections for repeating this inference."""
        message = WireCodec().encode_message(infer_request(self._model, self._version, inputs))
        scheme = "https" if self._address.tls else "http"
        credentials = self._address.headers
        request = GrpcRequest(self._address.authority, _METHOD, message, scheme, credentials)

        async def connect(load: Load, streams: int) -> Connection:
            try:
                async with asyncio.timeout(self._timeout):
                    connection = await self._open(request, load)
                    await connection.ready
            except TimeoutError as error:
                raise ServerUnreachable(self._address.url, "no answer in time") from error
            except OSError as error:
                problem = f"cannot connect: {error.strerror or error}"
                raise ServerUnreachable(self._address.url, problem) from error
            if connection.max_streams < streams:
                limit = connection.max_streams
                connection.close()
                raise BenchmarkRefused(
                    f"{self._address.url}: {streams} requests on one connection, but the server"
                    f" allows {limit}: use --streams or --connections"
                )
            return connection

        return connect

    async def _open(self, request: GrpcRequest, load: Load) -> GrpcConnection:
        loop = asyncio.get_running_loop()

        address = self._address

        def make() -> GrpcConnection:
            return GrpcConnection(address.url, request, load)

        if address.socket_path:
            opened = loop.create_unix_connection(
                make,
                address.socket_path,
                ssl=address.tls,
                server_hostname=address.authority if address.tls else None,
            )
            return (await opened)[1]
        return (await loop.create_connection(make, address.host, address.port, ssl=address.tls))[1]
