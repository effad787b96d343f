"""The client that an address asks for."""

from xlaserve.dialing.address import ServerAddress
from xlaserve.dialing.interface import ServerClient
from xlaserve.dialing.over_grpc import Client


def dial(address: ServerAddress, *, timeout: float) -> ServerClient:
    """Return a client of a server; it connects with the first call."""
    if not address.rest:
        return Client(address, timeout=timeout)
    # With aiohttp: over gRPC a probe is quicker without.
    from xlaserve.dialing.over_rest import RestClient

    return RestClient(address, timeout=timeout)
