"""The server and the model that are measured, as one of the protocols reaches them."""

from collections.abc import Sequence
from typing import Protocol

from xlaserve.bench.errors import BenchmarkRefused
from xlaserve.bench.grpc_target import GrpcTarget
from xlaserve.bench.inputs import Inputs
from xlaserve.bench.load import Connect
from xlaserve.bench.rest_target import RestTarget
from xlaserve.dialing.address import ServerAddress
from xlaserve.tensors import TensorSpec


class Target(Protocol):
    """One model of one server."""

    @property
    def protocol(self) -> str:
        """Return how the tensors travel: `grpc`, `rest binary` or `rest json`."""
        ...

    @property
    def multiplexes(self) -> bool:
        """Tell whether a connection takes several requests at the same time."""
        ...

    async def specs(self) -> Sequence[TensorSpec]:
        """Return the inputs of the model; raises XlaserveError without any."""
        ...

    async def probe(self, inputs: Inputs) -> None:
        """Send the request once; raises XlaserveError where it is not answered as it should be."""
        ...

    def connector(self, inputs: Inputs) -> Connect:
        """Return what opens connections that send this request."""
        ...


def target(
    address: ServerAddress, model: str, version: str, *, timeout: float, binary: bool | None
) -> Target:
    """Return a model of a server; `binary` is None where the user said nothing of it.

    Raises BenchmarkRefused for a form of tensors that the protocol does not have.
    """
    if address.rest:
        return RestTarget(address, model, version, timeout=timeout, binary=binary is not False)
    if binary is False:
        raise BenchmarkRefused("--json-tensors: over gRPC tensors travel raw")
    return GrpcTarget(address, model, version, timeout=timeout)
