"""Encoded images as the tensors that a model takes (OVMS, binary inputs)."""

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
"""Image bytes that need no check of the memory budget."""
_PIXEL_BYTES = 12
"""Bytes while an image is decoded: four as Pillow keeps it, as often in its mode, and as bytes."""


def unpack_bytes_or_image(shape: Sequence[int], data: Buffer) -> Tensor:
    """Split BYTES data as `unpack_bytes` does; one bare JPEG or PNG is also one element.

    Clients of OVMS send a single image without its length.
    Raises TensorDataError as `unpack_bytes` does.
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
    """Return the inputs of a request that hold images to decode, or None.

    Raises InvalidTensor where the model's input takes no images, InvalidParameter where a parameter
    of its configuration for images makes no sense.
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
    """Give the elements the leading dimensions of the model's input, None if they do not fit."""
    leading = spec.shape[: RANKS[len(spec.shape)]]
    if elements.shape == (1,):
        elements = elements.reshape((1,) * len(leading))
    fits = elements.size and replace(spec, shape=leading).accepts(elements.shape)
    return elements if fits else None


class EncodedImages:
    """The images of one request, validated first and then decoded."""

    def __init__(self, request: InferRequest, images: "Mapping[str, _Images]") -> None:
        self._request = request
        self._images = images
        self.is_wanted: Callable[[], bool] = lambda: True
        """Whether somebody waits for them: what a client has left is not decoded to its end."""

    def promised(self) -> InferRequest:
        """Return the request with tensors of what will be decoded, which take no memory.

        With it everything else about a request is checked before an image is opened.
        """
        inputs = tuple(
            self._images[tensor.name].promised(tensor)
            if tensor.datatype is BYTES and tensor.name in self._images
            else tensor
            for tensor in self._request.inputs
        )
        return structs.replace(self._request, inputs=inputs)

    def decode(self) -> dict[str, Tensor]:
        """Decode every image. Blocks, for a thread; the request was checked as promised.

        Raises InvalidTensor that names the input and the element, or OutOfMemory.
        """
        return {name: images.decode(self.is_wanted) for name, images in self._images.items()}

    def decode_within(self, most: int) -> dict[str, Tensor] | int:
        """Decode every image as `decode` does, if that takes no more than this many bytes.

        Else return how many it takes, and decode nothing.
        """
        size = sum(images.decoded_bytes() for images in self._images.values())
        return size if size > most else self.decode()


@dataclass(frozen=True, slots=True)
class _Images:
    model: str
    form: Form
    elements: Tensor
    limits: ImageLimits

    def promised(self, tensor: InferInput) -> InferInput:
        """Return the input with a tensor of the shape to come; sizes not known yet are 1."""
        spec = self.form.spec
        shape = self._shape(max(1, self.form.height), max(1, self.form.width))
        nothing = np.broadcast_to(np.zeros((), spec.datatype.dtype), shape)
        return structs.replace(tensor, datatype=spec.datatype, data=nothing)

    def decoded_bytes(self) -> int:
        """Return what the tensor takes, and the largest image while it is decoded.

        Only the headers of the images are read. Images that differ in size are refused later.
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
        """Decode images into one tensor while they are wanted; open sizes must agree."""
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
            raise TensorDataError(expected, f"{self.elements.size} of {width}x{height} pixels")
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
