"""The calls that service methods answer, and their view of request headers."""

from collections.abc import Sequence

from xlaserve.serving.call import Call, Headers, Operation, Peer

_PROTOCOLS = {"http_endpoint": "gRPC-Web"}
"""The protocol of each endpoint's setting; gRPC for all others."""


class FieldsView:
    """Headers looked up in a request's fields, without a copy."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Sequence[tuple[str, str]]) -> None:
        self._fields = fields

    def get(self, name: str, /) -> str | None:
        """Return the value of a header, None where it is absent.

        Several of one name are one list (RFC 9110 5.3): a gate that compares the value of a header
        which may be there once refuses two of them, whatever their order.
        """
        values = [value for field, value in self._fields if field == name]
        return ", ".join(values) if values else None


class RpcCall(Call):
    """A request whose answers grpclib writes, as a method of a service gives them to it."""

    def __init__(
        self, operation: Operation, headers: Headers, peer: Peer, deadline: float | None
    ) -> None:
        self.operation = operation
        self.headers = headers
        self.peer = peer
        self.deadline = deadline
        self.protocol = _PROTOCOLS.get(peer.listener, "gRPC")
