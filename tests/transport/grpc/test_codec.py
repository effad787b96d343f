"""The codec as used by grpclib and the handlers: round trips of whole messages."""

import copy
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import betterproto
import numpy as np
import pytest
from grpclib import GRPCError
from grpclib.const import Status
from hypothesis import given, settings
from hypothesis import strategies as st
from support.protobuf import Everything, contract_messages, everything

from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.grpc.protobuf.wire import ENUM, MAP, MESSAGE, SCALARS, Field, fields_of
from xlaserve_proto.inference import (
    InferParameter,
    ModelInferRequest,
    ModelInferRequestInferInputTensor,
    ModelInferResponse,
    ServerLiveRequest,
    ServerLiveResponse,
)

CONTRACTS = dict(contract_messages())


# # --- round trips -------------------------------------------------------------------------------


def _numbers(field: Field) -> st.SearchStrategy[Any]:
    dtype = SCALARS[field.type].dtype
    if dtype.kind == "f":
        return st.floats(width=32 if dtype.itemsize == 4 else 64, allow_nan=False)
    if dtype.kind == "b":
        return st.booleans()
    limits = np.iinfo(dtype)
    numbers = st.integers(int(limits.min), int(limits.max))
    return numbers.map(field.target.try_value) if field.type == ENUM else numbers


def _values(field: Field, depth: int) -> st.SearchStrategy[Any]:
    if field.type == MESSAGE:
        return _messages(field.target, depth - 1)
    if field.type == "string":
        return st.text()
    return st.binary() if field.type == "bytes" else _numbers(field)


def _of_field(field: Field, depth: int) -> st.SearchStrategy[Any]:
    if field.type == MAP:
        key, value = fields_of(field.target)
        return st.dictionaries(_values(key, depth), _values(value, depth), max_size=2)
    if field.repeated and field.type in SCALARS:
        return st.lists(_values(field, depth), max_size=40)
    return st.lists(_values(field, depth), max_size=2) if field.repeated else _values(field, depth)


@st.composite
def _messages(draw: st.DrawFn, message_type: type[Any], depth: int = 2) -> Any:
    fields = [field for field in fields_of(message_type) if depth or field.type in SCALARS]
    if not fields:
        return message_type()
    # At most one member of each oneof.
    chosen = draw(
        st.lists(st.sampled_from(fields), max_size=5, unique_by=lambda row: row.group or row.name)
    )
    return message_type(**{field.name: draw(_of_field(field, depth)) for field in chosen})


@given(data=st.data())
def test_everything_comes_back_as_it_was(data: st.DataObject) -> None:
    """decode(encode(m)) == m, and the same member of each oneof is set."""
    codec = WireCodec()
    message = data.draw(_messages(Everything))

    back = codec.decode_message(Everything, codec.encode_message(message))

    assert message == back
    assert _chosen(message) == _chosen(back)


def _chosen(message: Everything) -> tuple[str, Any]:
    return betterproto.which_one_of(message, "choice")


@given(data=st.data())
@settings(max_examples=300)
def test_every_message_of_the_contracts_comes_back_as_it_was(data: st.DataObject) -> None:
    codec = WireCodec()
    message_type = CONTRACTS[data.draw(st.sampled_from(sorted(CONTRACTS)))]
    message = data.draw(_messages(message_type))

    assert message == codec.decode_message(message_type, codec.encode_message(message))


# # --- decoded messages --------------------------------------------------------------------------


def test_decoded_message_is_like_one_that_was_made(codec: WireCodec) -> None:
    made = ModelInferRequest(
        model_name="m",
        parameters={"p": InferParameter(bool_param=False)},
        inputs=[ModelInferRequestInferInputTensor(name="x", shape=[1, 2])],
    )

    decoded = codec.decode_message(ModelInferRequest, codec.encode_message(made))

    assert made == decoded
    assert made == copy.deepcopy(decoded)
    assert bytes(made) == bytes(decoded)
    assert "inputs=[ModelInferRequestInferInputTensor(name='x'" in repr(decoded)
    assert ("", []) == (decoded.id, decoded.outputs)
    assert ("bool_param", False) == betterproto.which_one_of(
        decoded.parameters["p"], "parameter_choice"
    )


def test_decoded_messages_share_nothing(codec: WireCodec) -> None:
    one, other = (codec.decode_message(ModelInferRequest, b"") for _ in range(2))

    one.inputs.append(ModelInferRequestInferInputTensor())
    one.parameters["p"] = InferParameter()

    assert ModelInferRequest() == other


def test_members_of_a_decoded_oneof_exclude_each_other(codec: WireCodec) -> None:
    one, other = (codec.decode_message(InferParameter, b"\x08\x01") for _ in range(2))
    one.string_param = "a"

    assert ("string_param", "a") == betterproto.which_one_of(one, "parameter_choice")
    assert ("bool_param", True) == betterproto.which_one_of(other, "parameter_choice")
    with pytest.raises(AttributeError):
        _ = one.bool_param


def test_absent_message_reads_as_its_default(codec: WireCodec) -> None:
    decoded = codec.decode_message(ModelInferRequestInferInputTensor, b"")

    assert not betterproto.serialized_on_wire(decoded.contents)
    assert [] == decoded.contents.fp32_contents


def test_present_message_is_marked(codec: WireCodec) -> None:
    decoded = codec.decode_message(ModelInferRequestInferInputTensor, b"\x2a\x00")

    assert betterproto.serialized_on_wire(decoded.contents)


# --- views -------------------------------------------------------------------------------------


def test_raw_contents_are_views_of_the_received_message(codec: WireCodec) -> None:
    """Tensor bytes are not copied from the message to the array."""
    data = codec.encode_message(ModelInferRequest(raw_input_contents=[b"first", b""]))

    first, empty = codec.decode_message(ModelInferRequest, data).raw_input_contents

    assert (data, data) == (memoryview(first).obj, memoryview(empty).obj)
    assert ([b"first", b""], True) == ([first, empty], memoryview(first).readonly)


def test_raw_contents_of_a_buffer_are_views_of_it(codec: WireCodec) -> None:
    encoded = codec.encode_message(ModelInferResponse(raw_output_contents=[bytes(64)]))
    received: Any = np.frombuffer(bytearray(encoded), np.uint8)

    (view,) = codec.decode_message(ModelInferResponse, received).raw_output_contents

    assert np.shares_memory(received, np.frombuffer(view, np.uint8))


def test_other_bytes_are_bytes(codec: WireCodec) -> None:
    message = everything(blob=b"a", blobs=[b"b"], by_text={"k": b"c"})

    decoded = codec.decode_message(Everything, memoryview(codec.encode_message(message)))

    assert {bytes} == {type(decoded.blob), type(decoded.blobs[0]), type(decoded.by_text["k"])}


def test_arrays_travel_as_they_are(codec: WireCodec) -> None:
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    raw: Any = [memoryview(array)]  # type: ignore[arg-type, unused-ignore]

    data = codec.encode_message(ModelInferResponse(raw_output_contents=raw))

    (view,) = codec.decode_message(ModelInferResponse, data).raw_output_contents
    assert np.array_equal(array, np.frombuffer(view, np.float32).reshape(10, 100))


# # --- the interface for grpclib -----------------------------------------------------------------


def test_malformed_request_is_internal_and_says_nothing_of_it(codec: WireCodec) -> None:
    """grpc/doc/statuscodes.md: an error parsing the request is INTERNAL."""
    secret = b"\x0a\x08password\xff"

    with pytest.raises(GRPCError) as caught:
        codec.decode(secret, ModelInferRequest)

    expected = "the request is not a valid ModelInferRequest message"
    assert (Status.INTERNAL, expected) == (caught.value.status, caught.value.message)
    assert (None, None) == (caught.value.__cause__, caught.value.__context__)


def test_request_with_too_many_fields_names_the_setting() -> None:
    with pytest.raises(GRPCError) as caught:
        WireCodec(max_fields=2).decode(b"\x1a\x00" * 3, ModelInferRequest)

    assert Status.RESOURCE_EXHAUSTED is caught.value.status
    assert "more than 2 fields (max_message_fields)" in str(caught.value.message)


def test_message_of_another_type_is_refused(codec: WireCodec) -> None:
    with pytest.raises(TypeError, match="expected ServerLiveResponse, got ServerLiveRequest"):
        codec.encode(ServerLiveRequest(), ServerLiveResponse)


def test_nan_survives(codec: WireCodec) -> None:
    decoded = codec.decode_message(Everything, codec.encode_message(everything(float32=math.nan)))

    assert math.isnan(decoded.float32)


@dataclass(eq=False, repr=False)
class Timed(betterproto.Message):
    """betterproto gives a datetime for a google.protobuf.Timestamp."""

    at: datetime = betterproto.message_field(1)  # noqa: RUF009


@dataclass(eq=False, repr=False)
class Wrapped(betterproto.Message):
    """betterproto gives an int for a google.protobuf.Int32Value."""

    number: int | None = betterproto.message_field(1, wraps=betterproto.TYPE_INT32)


@pytest.mark.parametrize("message_type", [Timed, Wrapped])
def test_types_of_no_contract_are_refused(
    codec: WireCodec, message_type: type[betterproto.Message]
) -> None:
    """They are refused every time, instead of decoding the message without the field."""
    for _ in range(2):
        with pytest.raises(TypeError, match="has a type unknown to the codec"):
            codec.decode_message(message_type, b"")
        with pytest.raises(TypeError, match="has a type unknown to the codec"):
            codec.encode_message(message_type())


WITHOUT_GOOGLE = """
import asyncio, socket, sys
sys.modules["google"] = None  # whoever imports it gets an ImportError

from grpclib.client import Channel
from grpclib.server import Server
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve_proto import inference as pb

class Service(pb.GrpcInferenceServiceBase):
    async def server_live(self, server_live_request):
        return pb.ServerLiveResponse(live=True)

async def main():
    server = Server([Service()], codec=WireCodec())
    listener = socket.create_server(("127.0.0.1", 0))
    await server.start(sock=listener)
    channel = Channel(*listener.getsockname(), codec=WireCodec())
    print(await pb.GrpcInferenceServiceStub(channel).server_live(pb.ServerLiveRequest()))
    channel.close()
    server.close()
    await server.wait_closed()

asyncio.run(main())
"""


def test_google_protobuf_is_not_needed() -> None:
    """It is a dependency of the tests only; grpclib would import it if it got no codec."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_GOOGLE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert "ServerLiveResponse(live=True)\n" == done.stdout
