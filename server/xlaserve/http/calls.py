"""The calls of requests that a handler answers on the general path."""

from collections.abc import Mapping

from xlaserve.serving.call import Call, Headers, Operation, Peer
from xlaserve.serving.infer_call import AwaitedInfer


def call_of(operation: Operation, names: Mapping[str, str], headers: Headers, peer: Peer) -> Call:
    """Return the call of a request whose handler returns its answer, which the server writes.

    `names` are the parts of the path that its route names.
    """
    call = AwaitedInfer() if operation is Operation.INFER else Call()
    call.operation = operation
    call.protocol = "REST"
    call.model = names.get("model", "")
    call.version = names.get("version", "")
    call.headers = headers
    call.peer = peer
    return call
