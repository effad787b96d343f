"""Inference requests whose whole body is the model's only input (binary tensor extension)."""

from collections.abc import Sequence
from math import prod

import numpy as np

from xlaserve.errors import InvalidRequest, InvalidTensor
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.serving.inputs.image_files import is_image
from xlaserve.tensors import BYTES, Datatype, Shape, Tensor, TensorDataError, TensorSpec, from_bytes

_IMAGE_RANKS = range(3, 6)


def read_raw_request(info: ModelInfo, model: str, version: str, body: memoryview) -> InferRequest:
    """Use a body as the model's only input; all outputs are returned as binary.

    The shape is the model's; the number of bytes determines one variable dimension. The batch size
    is 1 if another dimension is variable. For BYTES, the body is the only element. A JPEG or PNG
    that does not fit the shape becomes one element, for models that take images. Raises
    InvalidRequest if the model does not have exactly one input, or InvalidTensor.
    """
    if len(info.inputs) != 1:
        raise InvalidRequest(
            f"model '{model}': a body without JSON (Inference-Header-Content-Length: 0) is only for"
            f" models with one input, this one has {len(info.inputs)}: send the inputs with JSON"
        )
    spec = info.inputs[0]
    try:
        datatype, data = _read(spec, info.max_batch_size > 0, body)
    except TensorDataError as error:
        raise InvalidTensor(model, "input", spec.name, error.expected, error.got) from error
    return InferRequest(
        model_name=model,
        model_version=version,
        inputs=(InferInput(spec.name, datatype, data),),
        parameters={"binary_data_output": True},
    )


def _read(spec: TensorSpec, batched: bool, body: memoryview) -> tuple[Datatype, Tensor]:
    if spec.datatype is BYTES:
        if any(size not in (-1, 1) for size in spec.shape):
            raise TensorDataError("a one-element input for a body without JSON", str(spec))
        return BYTES, _one_element([1] * len(spec.shape), body)
    try:
        return spec.datatype, from_bytes(spec.datatype, _shape(spec, batched, body), body)
    except TensorDataError:
        if len(spec.shape) in _IMAGE_RANKS and is_image(body):
            return BYTES, _one_element([1], body)
        raise


def _one_element(shape: Sequence[int], body: memoryview) -> Tensor:
    array = np.empty(1, dtype=np.object_)
    array[0] = bytes(body)
    return array.reshape(shape)


def _shape(spec: TensorSpec, batched: bool, body: memoryview) -> Shape:
    """Return the model's shape with sizes for its variable dimensions."""
    shape = list(spec.shape)
    if batched and shape.count(-1) > 1:
        shape[0] = 1
    variable = [axis for axis, size in enumerate(shape) if size == -1]
    if len(variable) > 1:
        raise TensorDataError(
            "an input of at most one variable dimension for a body without JSON", str(spec)
        )
    stride = spec.datatype.itemsize * prod(size for size in shape if size != -1)
    for axis in variable:
        shape[axis], surplus = divmod(len(body), stride) if stride else (0, len(body))
        if surplus:
            raise TensorDataError(f"a multiple of {stride} bytes for {spec}", f"{len(body)} bytes")
    return tuple(shape)
