"""The calls that service methods answer, and their view of request headers."""

from collections.abc import Sequence

from xlaserve.serving.call import Call, Headers, Operation, Peer

_PROTOCOLS = {"http_endpoint": "gRPC-Web"}
"""Listener setting -> protocol name; any other listener is gRPC."""


class FieldsView:
    """Looks up headers in a request's list of fields without copying it."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Sequence[tuple[str, str]]) -> None:
        self._fields = fields

    def get(self, name: str, /) -> str | None:
        """Return the value of a header, or None if it is absent.

        Repeated headers are joined with commas (RFC 9110 5.3), so a gate that compares a header
        such as `authorization` with an exact value rejects a request that sends it twice.
        """
        values = [value for field, value in self._fields if field == name]
        return ", ".join(values) if values else None


class RpcCall(Call):
    """A call on the general path: a service method answers it through grpclib."""

    def __init__(
        self, operation: Operation, headers: Headers, peer: Peer, deadline: float | None
    ) -> None:
        self.operation = operation
        self.headers = headers
        self.peer = peer
        self.deadline = deadline
        self.protocol = _PROTOCOLS.get(peer.listener, "gRPC")
