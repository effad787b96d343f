"""Testee of protobuf's conformance runner: reads and writes messages with the server's codec.

    python tools/acceptance/testee.py FOLDER

FOLDER contains a package `messages` with the classes of the runner's messages. Requests and answers
are prefixed with their size in four bytes, little-endian.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

_TOOLS = Path(__file__).resolve().parents[1]
_PROTO3 = "protobuf_test_messages.proto3.TestAllTypesProto3"
_PROTOBUF = 1
"""The wire format `PROTOBUF` of the runner."""


def serve(read: BinaryIO, written: BinaryIO, answer: Callable[[bytes], bytes]) -> None:
    """Answer each request until there are no more."""
    while len(size := read.read(4)) == 4:
        octets = answer(read.read(int.from_bytes(size, "little")))
        written.write(len(octets).to_bytes(4, "little") + octets)
        written.flush()


def answerer() -> Callable[[bytes], bytes]:
    """Return a function that answers one request of the runner."""
    import betterproto

    from xlaserve.errors.message import MalformedMessage
    from xlaserve.grpc.protobuf.codec import WireCodec

    runner: Any = import_module("messages.conformance")
    known = {_PROTO3: import_module("messages.protobuf_test_messages.proto3").TestAllTypesProto3}
    codec = WireCodec()

    def respond(request: Any) -> Any:
        kind, _ = betterproto.which_one_of(request, "payload")
        message_type = known.get(request.message_type)
        binary = (kind, request.requested_output_format) == ("protobuf_payload", _PROTOBUF)
        if message_type is None or not binary:
            return runner.ConformanceResponse(skipped="not binary, or not of proto3")
        try:
            message = codec.decode_message(message_type, request.protobuf_payload)
        except MalformedMessage as error:
            return runner.ConformanceResponse(parse_error=str(error))
        try:
            return runner.ConformanceResponse(protobuf_payload=codec.encode_message(message))
        except ValueError as error:
            return runner.ConformanceResponse(serialize_error=str(error))

    def answer(octets: bytes) -> bytes:
        request: Any = codec.decode_message(runner.ConformanceRequest, octets)
        if request.message_type == "conformance.FailureSet":
            return codec.encode_message(runner.ConformanceResponse(protobuf_payload=b""))
        return codec.encode_message(respond(request))

    return answer


if __name__ == "__main__":
    sys.path[0] = str(_TOOLS)
    sys.path.append(sys.argv[1])
    serve(sys.stdin.buffer, sys.stdout.buffer, answerer())
