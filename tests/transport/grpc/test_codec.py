"""The codec as grpclib and the handlers see it: whole messages, there and back."""

import copy
import math
import subprocess
import sys
from typing import Any

import betterproto
import numpy as np
import pytest
from grpclib import GRPCError
from grpclib.client import Channel
from grpclib.const import Status
from hypothesis import given, settings
from hypothesis import strategies as st
from support.protobuf import Everything, contract_messages, everything

from xlaserve.transport.grpc.codec import WireCodec
from xlaserve.transport.grpc.wire import ENUM, MAP, MESSAGE, SCALARS, Field, fields_of
from xlaserve_proto.inference import (
    InferParameter,
    ModelInferRequest,
    ModelInferRequestInferInputTensor,
    ModelInferResponse,
    RepositoryModelLoadRequest,
    ServerLiveRequest,
    ServerLiveResponse,
)

CONTRACTS = dict(contract_messages())


# --- there and back ----------------------------------------------------------------------------


def _numbers(field: Field) -> st.SearchStrategy[Any]:
    dtype = SCALARS[field.type].dtype
    if dtype.kind == "f":
        return st.floats(width=32 if dtype.itemsize == 4 else 64)
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
        return st.lists(_values(field, depth), max_size=60)
    return st.lists(_values(field, depth), max_size=2) if field.repeated else _values(field, depth)


def _messages(message_type: type[Any], depth: int = 2) -> st.SearchStrategy[Any]:
    fields = [field for field in fields_of(message_type) if depth or field.type in SCALARS]
    chosen = {field.name: _of_field(field, depth) for field in fields}
    return st.fixed_dictionaries({}, optional=chosen).map(lambda values: message_type(**values))


@given(message=_messages(Everything))
def test_everything_comes_back_as_it_was(message: Everything) -> None:
    """decode(encode(m)) == m, and the same member of the oneof is set."""
    codec = WireCodec()

    back = codec.decode_message(Everything, codec.encode_message(message))

    assert message == back
    assert repr(_chosen(message)) == repr(_chosen(back))


def _chosen(message: Everything) -> tuple[str, Any]:
    return betterproto.which_one_of(message, "choice")


@given(data=st.data())
@settings(max_examples=300)
def test_every_message_of_the_contracts_comes_back_as_it_was(data: st.DataObject) -> None:
    codec = WireCodec()
    message_type = CONTRACTS[data.draw(st.sampled_from(sorted(CONTRACTS)))]
    message = data.draw(_messages(message_type))

    assert message == codec.decode_message(message_type, codec.encode_message(message))
