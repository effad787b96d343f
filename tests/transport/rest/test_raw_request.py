import numpy as np
import pytest

from xlaserve.errors import InvalidRequest, InvalidTensor
from xlaserve.http.v2.infer_request import read_infer_request
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.inference import InferRequest
from xlaserve.tensors import BYTES, DATATYPES, Shape, TensorSpec

FP32, UINT8 = DATATYPES["FP32"], DATATYPES["UINT8"]
JPEG = b"\xff\xd8\xff" + bytes(97)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(93)


def read(
    shape: Shape, body: bytes, datatype: str = "FP32", *, max_batch_size: int = 0
) -> InferRequest:
    specs = (TensorSpec("x", DATATYPES[datatype], shape),)
    info = ModelInfo("test", specs, (), max_batch_size)
    return read_infer_request(info, "m", "1", memoryview(body), 0, max_depth=100)


def test_the_body_is_the_tensor() -> None:
    """All outputs are returned as binary (binary tensor data extension, raw binary request)."""
    request = read((2, 2), np.array([1, 2, 3, 4], "<f4").tobytes())

    assert ("m", "1", "", ()) == (
        request.model_name,
        request.model_version,
        request.id,
        request.outputs,
    )
    assert {"binary_data_output": True} == request.parameters
    (tensor,) = request.inputs
    assert ("x", FP32, {}) == (tensor.name, tensor.datatype, tensor.parameters)
    assert [[1.0, 2.0], [3.0, 4.0]] == tensor.data.tolist()


@pytest.mark.parametrize(
    ("shape", "max_batch_size", "size", "found"),
    [
        ((), 0, 4, ()),
        ((2, 0), 0, 0, (2, 0)),
        ((2, -1), 0, 24, (2, 3)),
        ((-1, 2), 0, 24, (3, 2)),
        ((-1, 2), 4, 24, (3, 2)),
        ((-1, 2), 4, 0, (0, 2)),
        ((-1, 2, -1), 4, 24, (1, 2, 3)),
        ((-1, -1), 4, 24, (1, 6)),
        ((-1,), 4, 24, (6,)),
    ],
)
def test_one_variable_dimension_is_found_from_the_bytes(
    shape: Shape, max_batch_size: int, size: int, found: Shape
) -> None:
    """The batch counts as 1 if another dimension is variable; otherwise it is the one found."""
    request = read(shape, bytes(size), max_batch_size=max_batch_size)

    assert found == request.inputs[0].data.shape


@pytest.mark.parametrize(
    ("shape", "max_batch_size", "size", "message"),
    [
        ((2, 2), 0, 15, "expected 16 bytes for FP32[2,2], got 15 bytes"),
        ((2, 2), 0, 0, "expected 16 bytes for FP32[2,2], got 0 bytes"),
        ((-1, 2), 0, 15, "expected a multiple of 8 bytes for FP32[-1,2], got 15 bytes"),
        ((-1, 0), 0, 15, "expected a multiple of 0 bytes for FP32[-1,0], got 15 bytes"),
        ((-1, -1), 0, 16, "expected an input of at most one variable dimension"),
        ((-1, -1, -1), 4, 16, "expected an input of at most one variable dimension"),
    ],
)
def test_bytes_that_make_no_tensor_are_refused(
    shape: Shape, max_batch_size: int, size: int, message: str
) -> None:
    with pytest.raises(InvalidTensor) as caught:
        read(shape, bytes(size), max_batch_size=max_batch_size)

    assert str(caught.value).startswith(f"model 'm', input 'x': {message}")


@pytest.mark.parametrize(
    ("shape", "found"), [((1,), (1,)), ((-1,), (1,)), ((-1, 1), (1, 1)), ((-1, -1), (1, 1))]
)
@pytest.mark.parametrize("body", [b"", b"text", b"\x04\0\0\0text", JPEG])
def test_for_bytes_the_body_is_the_one_element(shape: Shape, found: Shape, body: bytes) -> None:
    """Its bytes are not read as a length prefix."""
    (tensor,) = read(shape, body, "BYTES").inputs

    assert BYTES is tensor.datatype
    assert found == tensor.data.shape
    assert body == tensor.data.item()


def test_bytes_of_more_elements_need_json() -> None:
    with pytest.raises(InvalidTensor, match=r"expected a one-element input .*BYTES\[-1,2\]"):
        read((-1, 2), b"text", "BYTES", max_batch_size=4)


@pytest.mark.parametrize("image", [JPEG, PNG])
@pytest.mark.parametrize("shape", [(8, 8, 3), (-1, 8, 8, 3), (-1, -1, 8, 8, 3), (-1, -1, -1, 3)])
def test_images_for_models_that_take_images_become_one_element(image: bytes, shape: Shape) -> None:
    """The core decodes them."""
    (tensor,) = read(shape, image, "UINT8", max_batch_size=4).inputs

    assert BYTES is tensor.datatype
    assert [image] == tensor.data.tolist()


def test_what_fits_as_it_is_is_no_image() -> None:
    (tensor,) = read((2, 10, 5), JPEG, "UINT8").inputs

    assert UINT8 is tensor.datatype
    assert (2, 10, 5) == tensor.data.shape


def test_images_for_other_models_are_bytes_like_any() -> None:
    with pytest.raises(InvalidTensor, match="expected 64 bytes for UINT8.8,8., got 100 bytes"):
        read((8, 8), JPEG, "UINT8")


@pytest.mark.parametrize("count", [0, 2])
def test_the_model_has_one_input(count: int) -> None:
    info = ModelInfo("test", (TensorSpec("x", FP32, (1,)),) * count, (), 0)

    with pytest.raises(
        InvalidRequest, match=f"'m': a body without JSON.* with one input, this one has {count}"
    ):
        read_infer_request(info, "m", "", memoryview(bytes(4)), 0, max_depth=100)
