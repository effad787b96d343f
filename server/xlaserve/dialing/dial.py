"""Creates the gRPC or REST client for an address."""

from xlaserve.dialing.address import ServerAddress
from xlaserve.dialing.interface import ServerClient
from xlaserve.dialing.over_grpc import Client


def dial(address: ServerAddress, *, timeout: float) -> ServerClient:
    """Return a client of a server; it connects at the first call."""
    if not address.rest:
        return Client(address, timeout=timeout)
    # Imported lazily, because importing aiohttp would slow down gRPC probes.
    from xlaserve.dialing.over_rest import RestClient

    return RestClient(address, timeout=timeout)
