"""Calls of general-path requests whose handler returns the response."""

from collections.abc import Mapping

from xlaserve.serving.call import Call, Headers, Operation, Peer
from xlaserve.serving.infer_call import AwaitedInfer


def call_of(operation: Operation, names: Mapping[str, str], headers: Headers, peer: Peer) -> Call:
    """Return the call of a request whose handler returns the response for the server to write.

    `names` are the path parameters of the route.
    """
    call = AwaitedInfer() if operation is Operation.INFER else Call()
    call.operation = operation
    call.protocol = "REST"
    call.model = names.get("model", "")
    call.version = names.get("version", "")
    call.headers = headers
    call.peer = peer
    return call
