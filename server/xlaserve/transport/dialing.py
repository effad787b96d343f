"""The client that an address asks for."""

from xlaserve.transport.address import ServerAddress
from xlaserve.transport.client import ServerClient
from xlaserve.transport.grpc.client import Client


def dial(address: ServerAddress, *, timeout: float) -> ServerClient:
    """Return a client of a server; it connects with the first call."""
    if not address.rest:
        return Client(address, timeout=timeout)
    # With aiohttp: over gRPC a probe is quicker without.
    from xlaserve.transport.rest.client import RestClient

    return RestClient(address, timeout=timeout)
