"""The calls of requests that a handler answers on the general path."""

from collections.abc import Mapping

from xlaserve.core.serving.call import Call, Headers, Operation, Peer


class HttpCall(Call):
    """A request whose handler returns its answer, which the server writes."""

    def __init__(
        self, operation: Operation, names: Mapping[str, str], headers: Headers, peer: Peer
    ) -> None:
        """`names` are the parts of the path that its route names."""
        self.operation = operation
        self.model = names.get("model", "")
        self.version = names.get("version", "")
        self.headers = headers
        self.peer = peer
