"""Codec for betterproto's message classes, in place of betterproto's parser and serializer."""

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
"""Bytes fields decoded as views of the received message: the raw contents of tensors."""


class WireCodec(CodecBase):
    """Decodes and encodes messages as protobuf does, within limits.

    A message with more than `max_fields` fields is rejected, because decoding it would block the
    event loop. A message nested deeper than `max_depth` is malformed, as in protobuf.
    """

    def __init__(self, *, max_fields: int = 100_000, max_depth: int = 100) -> None:
        self._decoder = Decoder(max_fields=max_fields, max_depth=max_depth, views=VIEWS)
        self._encoder = Encoder()

    # --- interface for grpclib ---

    @property
    def __content_subtype__(self) -> str:
        """Return the content subtype, after `application/grpc+`."""
        return "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        """Encode a message. Raises TypeError if it is not a `message_type`."""
        if not isinstance(message, message_type):
            raise TypeError(f"expected {message_type.__name__}, got {type(message).__name__}")
        return self.encode_message(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Decode a message. Raises GRPCError whose text does not quote the message."""
        try:
            return self.decode_message(message_type, data)
        except (MalformedMessage, TooManyFields) as error:
            refusal = refusal_of(error, message_type.__name__)
        # Raise outside the `except` block, so that the error has no context that keeps the message
        # alive; and raise a new one, so that no frame holds an exception that holds the frame.
        raise GRPCError(refusal.status, refusal.message)

    # --- interface for the server ---

    def encode_message(self, message: betterproto.Message) -> bytes:
        """Encode a message; bytes fields may hold any contiguous buffer.

        Raises ValueError, naming the field, for a value that does not fit the field's type.
        """
        return self._encoder.encode(message)

    def decode_message(self, message_type: type[T], data: bytes | memoryview) -> T:
        """Decode all of `data` as one message.

        Raises MalformedMessage if protobuf's own parser would reject it, and TooManyFields.
        """
        message: T = self._decoder.decode(message_type, data)
        return message


def refusal_of(error: MalformedMessage | TooManyFields, message_name: str) -> GRPCError:
    """Return the GRPCError for a message that cannot be decoded; it does not quote the message."""
    if isinstance(error, TooManyFields):
        return GRPCError(Status.RESOURCE_EXHAUSTED, str(error))
    return GRPCError(Status.INTERNAL, f"the request is not a valid {message_name} message")
