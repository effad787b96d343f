"""A model's image format: size, channels and scaling from its configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xlaserve.errors import InvalidParameter, InvalidTensor
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.inputs.image_fit import SAMPLINGS, Fit, Resize
from xlaserve.tensors import Tensor, TensorSpec

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow mode by the number of channels."""

RANKS = {3: 1, 4: 1, 5: 2}
"""Leading dimensions that count images, by the rank of a model's input."""

_ORDERS = ("RGB", "BGR")
_BGR = (2, 1, 0, 3)
_ORIENTATIONS = ("exif", "ignore")
_CHANNELS_FIRST, _CHANNELS_LAST = "FORMAT_NCHW", "FORMAT_NHWC"

_LEVELS = 256
_EXACT = 2**53
_MOST_SIDE = 16384
_GREY = 114
"""Gray border that object detectors are trained with."""


@dataclass(frozen=True, slots=True)
class Form:
    """How images are converted to one input of a model."""

    spec: TensorSpec
    channels: int
    height: int
    """Height in pixels; -1 for the image's own, also in `width`."""
    width: int
    channels_first: bool
    """Whether images have the layout [C,H,W]; otherwise [H,W,C], or [H,W] in gray."""
    bounded: bool
    """Whether the model's shape bounds the size of a tensor."""
    order: Sequence[int]
    """Index of the image's channel for each channel of the input."""
    levels: Sequence[Tensor]
    """Lookup tables from pixel values 0..255 to input values, by channel; one if all are equal."""
    fit: Fit

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Return the shape of one image in the tensor."""
        if self.channels_first:
            return (self.channels, height, width)
        dimensions = len(self.spec.shape) - RANKS[len(self.spec.shape)]
        return (height, width, self.channels)[:dimensions]

    def fill(self, image: Tensor, pixels: Tensor) -> None:
        """Convert 8-bit pixels, [H,W] or [H,W,C], and write them to `image`."""
        if len(self.levels) == 1 and not self.channels_first:
            if self.order != tuple(range(self.channels)):
                pixels = pixels[..., list(self.order)]
            np.take(self.levels[0], pixels.reshape(image.shape), out=image, mode="clip")
            return
        pixels = pixels.reshape(*pixels.shape[:2], self.channels)
        planes = image if self.channels_first else np.moveaxis(image, -1, 0)
        for channel, source in enumerate(self.order):
            levels = self.levels[channel % len(self.levels)]
            planes[channel] = np.take(levels, pixels[..., source], mode="clip")


def form_of(model: str, info: ModelInfo, spec: TensorSpec, config: ModelConfig) -> Form:
    """Return the image form of an input.

    Raises InvalidTensor if the input cannot take images, and InvalidParameter if a parameter of the
    configuration is invalid.
    """
    sizes = spec.shape[RANKS[len(spec.shape)] :]
    channels_first = _is_channels_first(sizes, _format(spec, config))
    channels, height, width = _split(sizes, channels_first=channels_first)
    if channels not in MODES:
        expected = "a model with [N,H,W,C] or [N,C,H,W] input and 1, 3 or 4 channels for images"
        layout = _format(spec, config)
        raise InvalidTensor(model, "input", spec.name, expected, f"one of {spec} {layout}".rstrip())
    read = _Parameters(model, config.parameters)
    free = spec.shape[1:] if info.max_batch_size else spec.shape
    order = read.one_of("image_channel_order", _ORDERS)
    return Form(
        spec,
        channels,
        height,
        width,
        channels_first,
        bounded=-1 not in free,
        order=_BGR[:channels] if order == "BGR" and channels > 1 else tuple(range(channels)),
        levels=_levels(read, spec, channels),
        fit=_fit(read, height, width),
    )


def _format(spec: TensorSpec, config: ModelConfig) -> str:
    inputs = config.message.input if config.message else ()
    return next((str(one.format.name) for one in inputs if one.name == spec.name), "")


def _is_channels_first(sizes: Sequence[int], layout: str) -> bool:
    """Tell whether channels come first, by the configuration, or else by the dimensions."""
    if len(sizes) < len("CHW") or layout == _CHANNELS_LAST:
        return False
    return layout == _CHANNELS_FIRST or (sizes[-1] not in MODES and sizes[0] in MODES)


def _split(sizes: Sequence[int], *, channels_first: bool) -> tuple[int, int, int]:
    if channels_first:
        channels, height, width = sizes
    else:
        height, width, channels = (*sizes, 1)[: len("HWC")]
    return channels, height, width


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Image parameters of a configuration; errors name the parameter and the model."""

    model: str
    given: Mapping[str, str]

    def one_of(self, name: str, known: Sequence[str]) -> str:
        """Return the keyword of a parameter; the first known one is the default."""
        word = self.given.get(name, known[0])
        if word not in known:
            raise self.bad(name, " or ".join(known), word)
        return word

    def numbers(self, name: str, default: float, channels: int) -> list[float]:
        """Return one number per channel; a single number applies to all."""
        text = self.given.get(name, str(default))
        try:
            found = [float(part) for part in text.split(",")]
        except ValueError:
            raise self.bad(name, "a number", text) from None
        if len(found) not in (1, channels):
            known = "1 number" if channels == 1 else f"1 number or {channels}"
            raise self.bad(name, known, text)
        return found * (channels // len(found))

    def integer(self, name: str, default: int, most: int) -> int:
        """Return an integer parameter between 0 and `most`."""
        text = self.given.get(name, str(default)).strip()
        if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) <= most):
            raise self.bad(name, f"a number from 0 to {most}", text)
        return int(text)

    def bad(self, name: str, expected: str, got: str) -> InvalidParameter:
        """Create the error for an invalid parameter."""
        value = f"{got!r} in the configuration of model '{self.model}'"
        return InvalidParameter(name, expected, value)


def _fit(read: _Parameters, height: int, width: int) -> Fit:
    resize = Resize(read.one_of("image_resize", [one.value for one in Resize]))
    if resize is not Resize.STRETCH and min(height, width) < 0:
        expected = "stretch, since the model's height or width is dynamic"
        raise read.bad("image_resize", expected, resize.value)
    least = max(height, width, 0)
    shorter = read.integer("image_resize_to", least, _MOST_SIDE)
    if resize is Resize.CROP and shorter < least:
        raise read.bad("image_resize_to", f"at least {least}, the larger side", str(shorter))
    return Fit(
        resize,
        shorter,
        SAMPLINGS[read.one_of("image_sampling", list(SAMPLINGS))],
        read.integer("image_pad", _GREY, _LEVELS - 1),
        is_oriented=read.one_of("image_orientation", _ORIENTATIONS) == "exif",
    )


def _levels(read: _Parameters, spec: TensorSpec, channels: int) -> Sequence[Tensor]:
    """Return lookup tables of (level * scale - mean) / std."""
    scales = read.numbers("image_scale", 1.0, channels)
    means = read.numbers("image_mean", 0.0, channels)
    deviations = read.numbers("image_std", 1.0, channels)
    numbers = list(zip(scales, means, deviations, strict=True))
    tables = {one: _table(read, spec, *one) for one in dict.fromkeys(numbers)}
    return [tables[one] for one in (numbers if len(tables) > 1 else numbers[:1])]


def _table(
    read: _Parameters, spec: TensorSpec, scale: float, mean: float, deviation: float
) -> Tensor:
    dtype = spec.datatype.dtype
    with np.errstate(all="ignore"):
        values = (np.arange(_LEVELS) * scale - mean) / deviation
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            values = np.clip(np.rint(values), max(limits.min, -_EXACT), min(limits.max, _EXACT))
        levels = values.astype(dtype)
    if not (np.isfinite(scale) and np.isfinite(levels.astype(np.float64)).all()):
        name, value = _culprit(read, mean, deviation)
        raise read.bad(name, f"a number that keeps pixels finite in {spec.datatype}", value)
    return levels


def _culprit(read: _Parameters, mean: float, deviation: float) -> tuple[str, str]:
    """Return the name and value of the parameter that makes pixels infinite."""
    name = "image_scale"
    if not np.isfinite(mean):
        name = "image_mean"
    elif not np.isfinite(deviation) or not deviation:
        name = "image_std"
    return name, read.given.get(name, "")
