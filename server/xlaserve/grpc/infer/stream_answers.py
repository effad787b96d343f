"""Encodes the responses of ModelStreamInfer, and marks the last one of each request."""

from grpclib import GRPCError

from xlaserve.grpc.infer.infer_codec import InferCodec
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.grpc.protobuf.wire import LENGTH, write_varint
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferResponse
from xlaserve_proto import inference as pb

FINAL_RESPONSE = "triton_final_response"
"""Boolean response parameter: whether this is the last response to its request."""

_INFER_RESPONSE = write_varint(2 << 3 | LENGTH)
"""Tag of the field `infer_response` in a ModelStreamInferResponse."""


class StreamAnswers:
    """Encodes the response messages of streams."""

    def __init__(self, codec: InferCodec, *, bare: bool = False) -> None:
        """With `bare`, a response is a ModelInferResponse, as in MLServer's API.

        That message cannot carry an error, so errors end the stream.
        """
        self._codec = codec
        self.is_bare = bare
        self._messages = WireCodec()
        # Protobuf fields may come in any order, so the parameter is appended to the message.
        self._marks = {
            last: self._messages.encode_message(pb.ModelInferResponse(parameters=_mark(last)))
            for last in (False, True)
        }

    def write(self, response: InferResponse, *, typed: bool, last: bool) -> bytes:
        """Encode a response; raise if it cannot be encoded."""
        encode = self._codec.encode_typed if typed else self._codec.encode
        parts, size = encode(response)
        mark = self._marks[last]
        if self.is_bare:
            return b"".join((*parts, mark))
        return b"".join((_INFER_RESPONSE, write_varint(size + len(mark)), *parts, mark))

    def refuse(self, call: InferCall, refusal: GRPCError) -> bytes:
        """Encode an error.

        It has the request's id and, if found, the model, so that the client can match it with the
        request. Its text is never empty, because clients detect errors by the text.
        """
        found = call.found if call.is_found else None
        return self._messages.encode_message(
            pb.ModelStreamInferResponse(
                error_message=refusal.message or refusal.status.name,
                infer_response=pb.ModelInferResponse(
                    model_name=found.model if found else "",
                    model_version=found.number if found else "",
                    id=call.id,
                    parameters=_mark(last=True),
                ),
            )
        )


def _mark(last: bool) -> dict[str, pb.InferParameter]:
    return {FINAL_RESPONSE: pb.InferParameter(bool_param=last)}
