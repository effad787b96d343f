"""Encoded images as model inputs (OVMS binary inputs)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from msgspec import structs

from xlaserve.errors import InvalidTensor, OutOfMemory
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.serving.inputs.image_files import ImageLimits, Picture, is_image, open_image
from xlaserve.serving.inputs.image_form import MODES, RANKS, Form, form_of
from xlaserve.tensors import (
    BYTES,
    Buffer,
    Shape,
    Tensor,
    TensorDataError,
    TensorSpec,
    element_count,
    unpack_bytes,
)

AT_NO_COST_BYTES = 4 << 20
"""Decoded size up to which images are decoded before their memory is charged."""
_PIXEL_BYTES = 12
"""Memory per pixel while decoding: 4 bytes each for Pillow's image, its conversion, and the
result.
"""


def unpack_bytes_or_image(shape: Sequence[int], data: Buffer) -> Tensor:
    """Parse BYTES data like `unpack_bytes`; accept a bare JPEG or PNG as a single element.

    OVMS clients send a single image without a length prefix. Raises TensorDataError like
    `unpack_bytes`.
    """
    try:
        return unpack_bytes(shape, data)
    except TensorDataError:
        if element_count(shape) != 1 or not is_image(data):
            raise
    element = np.empty(1, dtype=np.object_)
    element[0] = bytes(data)
    return element.reshape(shape)


def find_images(
    request: InferRequest, info: ModelInfo, config: ModelConfig, limits: ImageLimits
) -> "EncodedImages | None":
    """Return the encoded images in a request, or None if there are none.

    Raises InvalidTensor if the model's input cannot take images, and InvalidParameter if an image
    parameter of its configuration is invalid.
    """
    for tensor in request.inputs:
        if tensor.datatype is BYTES:
            found = dict(_find(request, info, config, limits))
            return EncodedImages(request, found) if found else None
    return None


def _find(
    request: InferRequest, info: ModelInfo, config: ModelConfig, limits: ImageLimits
) -> "Iterator[tuple[str, _Images]]":
    specs = {spec.name: spec for spec in info.inputs if _may_be_image(spec)}
    for tensor in request.inputs:
        spec = specs.get(tensor.name)
        if spec is not None and tensor.datatype is BYTES:
            elements = _fit(spec, tensor.data)
            if elements is not None:
                form = form_of(request.model_name, info, spec, config)
                yield tensor.name, _Images(request.model_name, form, elements, limits)


def _may_be_image(spec: TensorSpec) -> bool:
    return spec.datatype.is_number and len(spec.shape) in RANKS


def _fit(spec: TensorSpec, elements: Tensor) -> "Tensor | None":
    """Reshape the elements to the input's leading dimensions; None if they do not fit."""
    leading = spec.shape[: RANKS[len(spec.shape)]]
    if elements.shape == (1,):
        elements = elements.reshape((1,) * len(leading))
    fits = elements.size and replace(spec, shape=leading).accepts(elements.shape)
    return elements if fits else None


class EncodedImages:
    """The encoded images of one request: validated first, then decoded."""

    def __init__(self, request: InferRequest, images: "Mapping[str, _Images]") -> None:
        self._request = request
        self._images = images
        self.is_wanted: Callable[[], bool] = lambda: True
        """Tells whether the call still waits; if not, decoding stops."""

    def promised(self) -> InferRequest:
        """Return the request with placeholders of the decoded shapes, which take no memory.

        It allows validating the rest of a request before an image is opened.
        """
        inputs = tuple(
            self._images[tensor.name].promised(tensor)
            if tensor.datatype is BYTES and tensor.name in self._images
            else tensor
            for tensor in self._request.inputs
        )
        return structs.replace(self._request, inputs=inputs)

    def decode(self) -> dict[str, Tensor]:
        """Decode all images. Blocks, so call it on a thread, after validating `promised()`.

        Raises InvalidTensor, which names the input and the element, or OutOfMemory.
        """
        return {name: images.decode(self.is_wanted) for name, images in self._images.items()}

    def decode_within(self, most: int) -> dict[str, Tensor] | int:
        """Decode all images if they need at most `most` bytes; else return that number."""
        size = sum(images.decoded_bytes() for images in self._images.values())
        return size if size > most else self.decode()


@dataclass(frozen=True, slots=True)
class _Images:
    model: str
    form: Form
    elements: Tensor
    limits: ImageLimits

    def promised(self, tensor: InferInput) -> InferInput:
        """Return the input with a placeholder of the decoded shape; unknown dimensions are 1."""
        spec = self.form.spec
        shape = self._shape(max(1, self.form.height), max(1, self.form.width))
        nothing = np.broadcast_to(np.zeros((), spec.datatype.dtype), shape)
        return structs.replace(tensor, datatype=spec.datatype, data=nothing)

    def decoded_bytes(self) -> int:
        """Return the bytes of the tensor plus the memory for decoding the largest image.

        Reads only the headers; images of different sizes are refused later.
        """
        tensor = largest = 0
        for index, element in np.ndenumerate(self.elements):
            with self._naming(index):
                picture = open_image(element, self.limits)
                height, width = self._target(picture)
                tensor = tensor or prod(self._shape(height, width))
                pixels = max(picture.width * picture.height, width * height)
                largest = max(largest, pixels)
        return tensor * self.form.spec.datatype.itemsize + largest * _PIXEL_BYTES

    def decode(self, is_wanted: Callable[[], bool]) -> Tensor:
        """Decode the images into one tensor while `is_wanted`; dynamic dimensions must be equal."""
        tensor: Tensor | None = None
        first = (0, 0)
        for index, element in np.ndenumerate(self.elements):
            if tensor is not None and not is_wanted():
                break
            with self._naming(index):
                picture = open_image(element, self.limits)
                height, width = self._target(picture)
                if tensor is None:
                    tensor = np.empty(self._shape(height, width), self.form.spec.datatype.dtype)
                    first = (height, width)
                if first != (height, width):
                    expected = f"an image of {first[1]}x{first[0]} pixels like the first"
                    raise TensorDataError(expected, f"{width}x{height} pixels")
                mode = MODES[self.form.channels]
                image = picture.decode(mode, width, height, self.form.fit)
                self.form.fill(tensor[index], np.asarray(image))
        assert tensor is not None, "an empty tensor has no images"
        return tensor

    def _target(self, picture: Picture) -> tuple[int, int]:
        form = self.form
        across, down = picture.seen(form.fit)
        height = down if form.height < 0 else form.height
        width = across if form.width < 0 else form.width
        pixels = self.elements.size * height * width
        if not form.bounded and pixels > self.limits.max_pixels:
            expected = f"a tensor of at most {self.limits.max_pixels} pixels (max_image_pixels)"
            raise TensorDataError(
                expected, f"{self.elements.size} images of {width}x{height} pixels"
            )
        return height, width

    def _shape(self, height: int, width: int) -> Shape:
        return (*self.elements.shape, *self.form.shape(height, width))

    @contextmanager
    def _naming(self, index: Shape) -> Iterator[None]:
        name = self.form.spec.name
        try:
            yield
        except TensorDataError as error:
            element = ",".join(map(str, index))
            expected = f"{error.expected} as element {element}"
            raise InvalidTensor(self.model, "input", name, expected, error.got) from error
        except MemoryError as error:
            raise OutOfMemory(self.model, f"decoding the images of input '{name}'") from error
