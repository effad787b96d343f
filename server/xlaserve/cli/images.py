"""A picture from a file, as the tensor that a model takes."""

from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from xlaserve.errors import InvalidRequest
from xlaserve.tensors import Tensor, TensorSpec

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_WHITE = 255.0


def read_image(path: Path, spec: TensorSpec) -> Tensor:
    """Read a picture as one row of `spec`: [-1,H,W], [-1,H,W,C] or [-1,C,H,W].

    It is resized to the model's height and width; floating point inputs get 0 to 1.
    """
    height, width, channels, first = _layout(spec)
    try:
        with Image.open(path) as image:
            picture = image.convert(_MODES[channels])
    except (OSError, UnidentifiedImageError) as error:
        raise InvalidRequest(f"'{path}' is not a picture that can be read: {error}") from error
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.BOX)
    pixels = np.asarray(picture)
    if first:
        pixels = np.moveaxis(pixels.reshape(height, width, channels), -1, 0)
    elif len(spec.shape) == 4:
        pixels = pixels.reshape(height, width, channels)
    scaled = pixels / _WHITE if spec.datatype.dtype.kind in "fV" else pixels
    return np.ascontiguousarray(scaled[np.newaxis].astype(spec.datatype.dtype))


def _layout(spec: TensorSpec) -> tuple[int, int, int, bool]:
    """Return height, width, channels, and whether the channels come first."""
    sizes = spec.shape[1:]
    if len(sizes) == 2 and -1 not in sizes:
        return sizes[0], sizes[1], 1, False
    if len(sizes) == 3 and -1 not in sizes:
        if sizes[2] in _MODES:
            return sizes[0], sizes[1], sizes[2], False
        if sizes[0] in _MODES:
            return sizes[1], sizes[2], sizes[0], True
    raise InvalidRequest(
        f"input '{spec.name}': expected a shape of one picture like [-1,8,8] or [-1,224,224,3], "
        f"got {spec}"
    )
