"""The model to measure, reached over gRPC or REST."""

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from xlaserve.bench.errors import BenchmarkRefused, ServerUnreachable
from xlaserve.bench.grpc_target import GrpcTarget
from xlaserve.bench.inputs import Inputs
from xlaserve.bench.load import Connect, Connection, Load
from xlaserve.bench.rest_connection import RestConnection, RestRequest
from xlaserve.dialing.address import ServerAddress
from xlaserve.dialing.over_rest import RestClient, infer_body, model_path
from xlaserve.tensors import TensorSpec


class RestTarget:
    """A model reached over REST; tensors are sent in the binary form or as JSON."""

    multiplexes = False
    """Whether a connection can have several requests in flight."""

    def __init__(
        self, address: ServerAddress, model: str, version: str, *, timeout: float, binary: bool
    ) -> None:
        self._address, self._timeout, self._binary = address, timeout, binary
        self._model, self._version = model, version

    @property
    def protocol(self) -> str:
        """Return the name of the protocol and tensor form: `rest binary` or `rest json`."""
        return "rest binary" if self._binary else "rest json"

    async def specs(self) -> Sequence[TensorSpec]:
        """Return the inputs of the model (V2 protocol, Model Metadata); raise XlaserveError."""
        async with RestClient(self._address, timeout=self._timeout) as client:
            return await client.inputs(self._model, self._version)

    async def probe(self, inputs: Inputs) -> None:
        """Run one inference; raise CallFailed if it fails."""
        async with RestClient(self._address, timeout=self._timeout) as client:
            await client.answer(self._model, self._version, inputs, binary=self._binary)

    def connector(self, inputs: Inputs) -> Connect:
        """Return a function that opens HTTP/1.1 connections for repeating this inference."""
        address = self._address
        headers, body = infer_body(inputs, binary=self._binary)
        path = f"{address.prefix}{model_path(self._model, self._version)}/infer"
        request = RestRequest(
            address.authority, path, {**headers, **address.headers}, body
        ).encode()

        async def connect(load: Load, _streams: int) -> Connection:
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(self._timeout):
                    _, connection = await loop.create_connection(
                        lambda: RestConnection(request, load),
                        address.host,
                        address.port,
                        ssl=address.tls,
                    )
            except TimeoutError as error:
                raise ServerUnreachable(address.url, "no answer in time") from error
            except OSError as error:
                problem = f"cannot connect: {error.strerror or error}"
                raise ServerUnreachable(address.url, problem) from error
            return connection

        return connect


Target: TypeAlias = GrpcTarget | RestTarget
"""A model on a server, reached over either protocol."""


def target(
    address: ServerAddress, model: str, version: str, *, timeout: float, binary: bool | None
) -> Target:
    """Create the target for an address; `binary` is None if the user did not choose a tensor form.

    Raises BenchmarkRefused if the protocol does not support the chosen form.
    """
    if address.rest:
        return RestTarget(address, model, version, timeout=timeout, binary=binary is not False)
    if binary is False:
        raise BenchmarkRefused("--json-tensors: over gRPC tensors travel raw")
    return GrpcTarget(address, model, version, timeout=timeout)
