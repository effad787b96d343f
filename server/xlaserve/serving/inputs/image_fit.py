"""Resizing of images to a model's input: stretch, crop or pad."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from PIL import Image


class Resize(Enum):
    """Methods of resizing an image to a model's input."""

    STRETCH = "stretch"
    """Scale height and width independently."""
    CROP = "crop"
    """Resize the shorter side to a length, then crop the middle."""
    PAD = "pad"
    """Scale until it fits, and add a border."""


SAMPLINGS: Mapping[str, Image.Resampling] = MappingProxyType(
    {
        "bilinear": Image.Resampling.BILINEAR,
        "nearest": Image.Resampling.NEAREST,
        "box": Image.Resampling.BOX,
        "hamming": Image.Resampling.HAMMING,
        "bicubic": Image.Resampling.BICUBIC,
        "lanczos": Image.Resampling.LANCZOS,
    }
)
"""Resampling filters by name."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How an image is resized to a model's input."""

    resize: Resize = Resize.STRETCH
    shorter: int = 0
    """Length of the shorter side before cropping."""
    sampling: Image.Resampling = Image.Resampling.BILINEAR
    pad: int = 0
    """Pixel value of the border."""
    is_oriented: bool = False
    """Whether the EXIF orientation is applied."""

    def resized(self, across: int, down: int, width: int, height: int) -> tuple[int, int]:
        """Return width and height after scaling, before cropping or padding."""
        if self.resize is Resize.CROP:
            if across <= down:
                return self.shorter, int(self.shorter * down / across)
            return int(self.shorter * across / down), self.shorter
        if self.resize is Resize.PAD:
            factor = min(width / across, height / down)
            return max(1, round(across * factor)), max(1, round(down * factor))
        return width, height


STRETCHED = Fit()


def fitted(
    image: Image.Image,
    size: tuple[int, int],
    wanted: tuple[int, int],
    end: tuple[float, float],
    fit: Fit,
) -> Image.Image:
    """Scale the part of an image before `end` to `size`, then crop or pad it to `wanted`."""
    if fit.resize is Resize.CROP:
        return _cropped(image, size, wanted, end, fit.sampling)
    found = _resized(image, size, end, fit.sampling)
    if size == wanted:
        return found
    framed = Image.new(image.mode, wanted, (fit.pad,) * len(image.getbands()))
    framed.paste(found, ((wanted[0] - size[0]) // 2, (wanted[1] - size[1]) // 2))
    return framed


def _cropped(
    image: Image.Image,
    size: tuple[int, int],
    wanted: tuple[int, int],
    end: tuple[float, float],
    sampling: Image.Resampling,
) -> Image.Image:
    """Return the middle of the scaled image without computing the rest.

    Pillow includes the surroundings of a box, so edge pixels are as in the whole scaled image.
    """
    box = []
    for whole, part, length in zip(size, wanted, end, strict=True):
        start = round((whole - part) / 2)
        box.append((start * length / whole, (start + part) * length / whole))
    (left, right), (top, bottom) = box
    return image.resize(wanted, sampling, (left, top, right, bottom))


def _resized(
    image: Image.Image,
    size: tuple[int, int],
    end: tuple[float, float],
    sampling: Image.Resampling,
) -> Image.Image:
    """Scale the part of an image before `end` to `size`."""
    (width, height), (right, bottom) = size, end
    if image.width * height < width * image.height:
        # Pillow before 13 scales rows first, which makes narrow, high images very large: scale
        # columns here.
        box = (0, 0, image.width, bottom)
        image, bottom = image.resize((image.width, height), sampling, box), height
    if (image.width, image.height, right, bottom) == (width, height, width, height):
        return image
    return image.resize((width, height), sampling, (0, 0, right, bottom))
