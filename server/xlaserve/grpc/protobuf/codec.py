"""The codec of the server: betterproto's classes, without betterproto's parser and serializer."""

from types import MappingProxyType
from typing import Any, TypeVar

import betterproto
from grpclib import GRPCError
from grpclib.const import Status
from grpclib.encoding.base import CodecBase

from xlaserve.errors.message import MalformedMessage, TooManyFields
from xlaserve.grpc.protobuf.decoder import Decoder, Views
from xlaserve.grpc.protobuf.encoder import Encoder
from xlaserve_proto import inference

T = TypeVar("T", bound=betterproto.Message)

VIEWS: Views = MappingProxyType(
    {
        inference.ModelInferRequest: ("raw_input_contents",),
        inference.ModelInferResponse: ("raw_output_contents",),
    }
)
"""The bytes fields whose values are views of the received message: the contents of tensors."""


class WireCodec(CodecBase):
    """Reads and writes every message as protobuf itself does, within bounds.

    A message with more than `max_fields` fields is refused: it would keep the event loop busy.
    One that is nested deeper than `max_depth` is malformed, as it is to protobuf.
    """

    def __init__(self, *, max_fields: int = 100_000, max_depth: int = 100) -> None:
        self._decoder = Decoder(max_fields=max_fields, max_depth=max_depth, views=VIEWS)
        self._encoder = Encoder()

    # --- as grpclib calls it ---

    @property
    def __content_subtype__(self) -> str:
        """Return the content subtype, after `application/grpc+`."""
        return "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        """Return the bytes of a message. Raises TypeError when it has another type."""
        if not isinstance(message, message_type):
            raise TypeError(f"expected {message_type.__name__}, got {type(message).__name__}")
        return self.encode_message(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Return the message; raises GRPCError without any of its contents."""
        try:
            return self.decode_message(message_type, data)
        except (MalformedMessage, TooManyFields) as error:
            refusal = refusal_of(error, message_type.__name__)
        # Out here, so that what is raised does not keep the cause, and with it the message, alive;
        # and another one, so that no frame holds an error that holds the frame.
        raise GRPCError(refusal.status, refusal.message)

    # --- as everything else does ---

    def encode_message(self, message: betterproto.Message) -> bytes:
        """Return the bytes of a message; bytes fields may hold any contiguous buffer.

        Raises ValueError with the name of a field that holds what its type cannot.
        """
        return self._encoder.encode(message)

    def decode_message(self, message_type: type[T], data: bytes | memoryview) -> T:
        """Return the message that all of the data is.

        Raises MalformedMessage where protobuf's own parser would refuse it, and TooManyFields.
        """
        message: T = self._decoder.decode(message_type, data)
        return message


def refusal_of(error: MalformedMessage | TooManyFields, message_name: str) -> GRPCError:
    """Return the error text of a message that cannot be read, without anything it holds."""
    if isinstance(error, TooManyFields):
        return GRPCError(Status.RESOURCE_EXHAUSTED, str(error))
    return GRPCError(Status.INTERNAL, f"the request is not a valid {message_name} message")
