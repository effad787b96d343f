"""Decodes answers of servers with another variant of V2 over gRPC (`--v2-dialect`)."""

from typing import Any

import betterproto
from grpclib import GRPCError
from grpclib.const import Status

from xlaserve.errors.message import MalformedMessage, TooManyFields
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.grpc.services.dialects import MetadataWithProperties
from xlaserve_proto import inference as pb


class DialectCodec(WireCodec):
    """Decodes metadata of both variants, and rejects MLServer's streams with a helpful error."""

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Decode a message; the GRPCError for an unsupported variant says what to do."""
        if message_type is pb.ModelMetadataResponse:
            return self._metadata(data)
        if message_type is pb.ModelStreamInferResponse:
            return self._streamed(data)
        return super().decode(data, message_type)

    def _metadata(self, data: bytes) -> pb.ModelMetadataResponse:
        """Decode metadata whose parameters are messages, or strings (Open Inference Protocol)."""
        known: pb.ModelMetadataResponse | None = self._read(pb.ModelMetadataResponse, data)
        # A string can be decoded as a parameter message without any known field.
        if known is not None and all(map(_has_value, known.parameters.values())):
            return known
        other = self._read(MetadataWithProperties, data)
        if other is None:
            found: pb.ModelMetadataResponse = super().decode(data, pb.ModelMetadataResponse)
            return found
        return pb.ModelMetadataResponse(
            name=other.name,
            versions=other.versions,
            platform=other.platform,
            inputs=other.inputs,
            outputs=other.outputs,
            parameters={
                name: pb.InferParameter(string_param=text)
                for name, text in other.parameters.items()
            },
        )

    def _streamed(self, data: bytes) -> pb.ModelStreamInferResponse:
        """Decode a response of a stream; raise GRPCError if it is a bare ModelInferResponse."""
        known: pb.ModelStreamInferResponse | None = self._read(pb.ModelStreamInferResponse, data)
        if known is not None and not known.error_message:
            return known
        # `error_message` has the same field number as the bare response's `model_name`.
        bare = self._read(pb.ModelInferResponse, data)
        if bare is not None and bare.outputs:
            raise GRPCError(
                Status.UNIMPLEMENTED,
                "the server streams as MLServer does (--v2-dialect mlserver), which this client "
                "cannot read; start it with --v2-dialect triton",
            )
        found: pb.ModelStreamInferResponse
        found = super().decode(data, pb.ModelStreamInferResponse) if known is None else known
        return found

    def _read(self, kind: Any, data: bytes) -> Any:
        try:
            return self.decode_message(kind, data)
        except (MalformedMessage, TooManyFields):
            return None


def _has_value(parameter: pb.InferParameter) -> bool:
    return bool(betterproto.which_one_of(parameter, "parameter_choice")[0])
