"""How images become as large as a model wants them: stretched, cut or framed."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from PIL import Image


class Resize(Enum):
    """Methods of resizing an image to a model's input."""

    STRETCH = "stretch"
    """Height and width by themselves."""
    CROP = "crop"
    """Resize the shorter side to a length, then crop the middle."""
    PAD = "pad"
    """Until it fits, with a border around it."""


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
"""Ways to calculate the pixels of a resized image, by name."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How an image is resized to a model's input."""

    resize: Resize = Resize.STRETCH
    shorter: int = 0
    """Pixels of the shorter side before a crop."""
    sampling: Image.Resampling = Image.Resampling.BILINEAR
    pad: int = 0
    """Level of the border."""
    is_oriented: bool = False
    """Whether it is turned as its EXIF data says."""

    def resized(self, across: int, down: int, width: int, height: int) -> tuple[int, int]:
        """Return the width and height that an image has before it is cut, or gets a border."""
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
    """Resize what precedes `end` to `size`, and crop or pad it."""
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
    """Return the middle of the resized image; nothing else of it is calculated.

    Pillow weighs in what lies around a box, so that its edge is that of the whole image.
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
    """Resize what precedes `end`."""
    (width, height), (right, bottom) = size, end
    if image.width * height < width * image.height:
        # Pillow before 13 resizes the rows first, which makes a narrow, high image very large.
        box = (0, 0, image.width, bottom)
        image, bottom = image.resize((image.width, height), sampling, box), height
    if (image.width, image.height, right, bottom) == (width, height, width, height):
        return image
    return image.resize((width, height), sampling, (0, 0, right, bottom))
