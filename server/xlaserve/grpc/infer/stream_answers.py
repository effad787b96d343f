"""The answers of ModelStreamInfer: those of ModelInfer in an envelope, the last one marked."""

from grpclib import GRPCError

from xlaserve.grpc.infer.infer_codec import InferCodec
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.grpc.protobuf.wire import LENGTH, write_varint
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferResponse
from xlaserve_proto import inference as pb

FINAL_RESPONSE = "triton_final_response"
"""The parameter of an answer that says whether it is the last one to its request."""

_INFER_RESPONSE = write_varint(2 << 3 | LENGTH)
"""Tag in a ModelStreamInferResponse."""


class StreamAnswers:
    """Writes the messages of a stream."""

    def __init__(self, codec: InferCodec, *, bare: bool = False) -> None:
        """With `bare` an answer is a ModelInferResponse, as MLServer's are; no error has a form."""
        self._codec = codec
        self.is_bare = bare
        self._messages = WireCodec()
        # A parser takes the fields of a message in any order: the parameter comes last.
        self._marks = {
            last: self._messages.encode_message(pb.ModelInferResponse(parameters=_mark(last)))
            for last in (False, True)
        }

    def write(self, response: InferResponse, *, typed: bool, last: bool) -> bytes:
        """Return the message of an answer; raises if it cannot be encoded."""
        encode = self._codec.encode_typed if typed else self._codec.encode
        parts, size = encode(response)
        mark = self._marks[last]
        if self.is_bare:
            return b"".join((*parts, mark))
        return b"".join((_INFER_RESPONSE, write_varint(size + len(mark)), *parts, mark))

    def refuse(self, call: InferCall, refusal: GRPCError) -> bytes:
        """Return the message for an error.

        It names the request by its id, and its model where there is one: it may be answered behind
        others. The text is never empty, since clients know an error by it.
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
