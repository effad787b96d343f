"""Converts tensors between protobuf messages (raw or typed contents) and numpy."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from xlaserve.errors import InvalidRequest, InvalidTensor
from xlaserve.grpc.infer.parameters import read_parameters, write_parameters
from xlaserve.grpc.infer.typed_answers import Form
from xlaserve.serving.inference import (
    InferInput,
    InferOutput,
    InferRequest,
    PlacedOutput,
    RequestedOutput,
    SharedInput,
)
from xlaserve.serving.inputs.images import unpack_bytes_or_image
from xlaserve.tensors import (
    BYTES,
    Datatype,
    Parameter,
    Tensor,
    TensorDataError,
    datatype_named,
    from_bytes,
    from_elements,
    to_bytes,
)
from xlaserve_proto import inference as pb

SHARED_MEMORY = "shared_memory_region"
"""Input parameter that names the region with its elements (shared memory extension)."""

_NO_PARAMETERS: Mapping[str, Mapping[str, Parameter]] = MappingProxyType({})

CONTENTS_FIELDS = tuple(pb.InferTensorContents.__dataclass_fields__)


def read_request(message: pb.ModelInferRequest) -> InferRequest:
    """Convert a message to a request; raise as `read_inputs` and `read_parameters` do."""
    return InferRequest(
        model_name=message.model_name,
        model_version=message.model_version,
        id=message.id,
        inputs=read_inputs(message),
        outputs=tuple(
            RequestedOutput(output.name, read_parameters(output.parameters))
            for output in message.outputs
        ),
        parameters=read_parameters(message.parameters),
        typed=is_typed(message),
    )


def is_typed(message: pb.ModelInferRequest) -> bool:
    """Tell whether no input is raw or in shared memory; the response may then be typed too."""
    return not (message.raw_input_contents or any(map(is_shared, message.inputs)))


def read_inputs(request: pb.ModelInferRequest) -> tuple[InferInput, ...]:
    """Return the inputs of a request as arrays, which are views of the message if possible.

    Raw contents belong to the inputs in order (V2 protocol, ModelInferRequest). Raises
    InvalidTensor if contents do not match an input's datatype and shape, or if raw and typed
    contents are mixed; InvalidRequest if the number of raw contents is wrong.
    """
    raw = request.raw_input_contents
    shared = list(map(is_shared, request.inputs))
    expected = shared.count(False)
    if raw and len(raw) != expected:
        raise InvalidRequest(
            f"model '{request.model_name}': expected {expected} raw_input_contents, "
            f"one for each input, got {len(raw)}"
        )
    buffers: Iterator[Any] = iter(raw)
    return tuple(
        _shared_input(request.model_name, tensor)
        if is_in_memory
        else _read_input(request.model_name, tensor, next(buffers, None))
        for tensor, is_in_memory in zip(request.inputs, shared, strict=True)
    )


def is_shared(tensor: pb.ModelInferRequestInferInputTensor) -> bool:
    """Tell whether the elements of an input are in shared memory (shared memory extension)."""
    return SHARED_MEMORY in tensor.parameters


def _shared_input(model: str, tensor: pb.ModelInferRequestInferInputTensor) -> SharedInput:
    """Return an input without elements, to be read from shared memory."""
    datatype = datatype_named(tensor.datatype)
    filled = _filled(_contents(tensor))
    if filled:
        expected = f"no contents field together with {SHARED_MEMORY}"
        raise InvalidTensor(model, "input", tensor.name, expected, ", ".join(filled))
    nothing = np.empty(0, datatype.dtype)
    given = read_parameters(tensor.parameters)
    return SharedInput(tensor.name, datatype, nothing, given, tuple(tensor.shape))


def _read_input(
    model: str, tensor: pb.ModelInferRequestInferInputTensor, raw: "memoryview | bytes | None"
) -> InferInput:
    datatype = datatype_named(tensor.datatype)
    try:
        data = (
            _from_contents(datatype, tensor.shape, _contents(tensor))
            if raw is None
            else _from_raw(datatype, tensor.shape, _contents(tensor), raw)
        )
    except TensorDataError as error:
        raise InvalidTensor(model, "input", tensor.name, error.expected, error.got) from error
    return InferInput(tensor.name, datatype, data, read_parameters(tensor.parameters))


def _contents(tensor: pb.ModelInferRequestInferInputTensor) -> pb.InferTensorContents | None:
    # Accessing an absent field would create an empty message, at ten times the cost of the rest.
    return tensor.contents if "contents" in vars(tensor) else None


def _from_raw(
    datatype: Datatype,
    shape: Sequence[int],
    contents: pb.InferTensorContents | None,
    raw: "memoryview | bytes",
) -> Tensor:
    filled = _filled(contents)
    if filled:
        raise TensorDataError(
            "no contents field together with raw_input_contents", ", ".join(filled)
        )
    if datatype is BYTES:
        return unpack_bytes_or_image(shape, raw)
    return from_bytes(datatype, shape, raw)


def _from_contents(
    datatype: Datatype, shape: Sequence[int], contents: pb.InferTensorContents | None
) -> Tensor:
    if datatype.contents is None:
        raise TensorDataError(f"raw_input_contents, the only encoding of {datatype}", "none")
    wrong = [name for name in _filled(contents) if name != datatype.contents]
    if wrong:
        raise TensorDataError(f"{datatype.contents} for {datatype}", ", ".join(wrong))
    elements = () if contents is None else getattr(contents, datatype.contents)
    return from_elements(datatype, shape, elements)


def _filled(contents: pb.InferTensorContents | None) -> list[str]:
    if contents is None:
        return []
    return [name for name in CONTENTS_FIELDS if getattr(contents, name)]


def write_outputs(
    outputs: Sequence[InferOutput],
    form: Form | None = None,
    parameters: Mapping[str, Mapping[str, Parameter]] = _NO_PARAMETERS,
) -> tuple[list[pb.ModelInferResponseInferOutputTensor], list[Any]]:
    """Return the messages of outputs, and their raw contents, if any, in the same order.

    Without `form`, outputs are raw: that is fast, and nearly every client can read it. Clients
    match raw contents with outputs by order, so outputs in shared memory have empty ones, as with
    Triton. `parameters` maps names of outputs to their parameters.
    """
    described = [_described(output) for output in outputs]
    for tensor in described:
        if tensor.name in parameters:
            tensor.parameters = write_parameters(parameters[tensor.name])
    if form is not None:
        for tensor, contents in zip(described, form.contents, strict=True):
            if contents is not None:
                tensor.contents = contents
        if not form.raw:
            return described, []
    return described, [
        b"" if isinstance(output, PlacedOutput) else to_bytes(output.datatype, output.data)
        for output in outputs
    ]


def _described(output: InferOutput) -> pb.ModelInferResponseInferOutputTensor:
    return pb.ModelInferResponseInferOutputTensor(
        name=output.name, datatype=output.datatype.name, shape=list(output.data.shape)
    )
