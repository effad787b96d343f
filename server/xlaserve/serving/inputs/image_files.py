"""JPEG and PNG files: detected, bounded, and decoded from their essential parts alone."""

import io
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from xlaserve.serving.inputs.image_fit import STRETCHED, Fit, fitted
from xlaserve.serving.inputs.image_orientation import SIDEWAYS, TURNS, orientation_of
from xlaserve.tensors import Buffer, TensorDataError

LONGEST_SIDE = 65_535
"""Most pixels of a side: all that JPEG has, and a bound on the weights of a resize."""

_MOST_PARTS = 1 << 16
_MOST_SCANS = 100
"""A progressive JPEG has about ten; each costs a pass over the whole image, for a few bytes."""

_DRAFT = 3
"""The least factor between the sizes of a decoded JPEG and its target, so that it stays sharp."""

_JPEG_MAGIC = b"\xff\xd8\xff"
_JPEG_MARKER = re.compile(rb"\xff[\x01-\xfe]", re.DOTALL)
_JPEG_SCAN = 0xDA
_JPEG_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))
_JPEG_LEFT_OUT = frozenset((*range(0xE1, 0xEE), 0xEF, 0xFE))
"""Comments and application data, except JFIF (E0) and Adobe (EE), which define the colours."""

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNK = struct.Struct(">I4s")
_PNG_KEPT = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))

_MAGICS = (_JPEG_MAGIC, _PNG_MAGIC)
_OTHERS = (
    (b"GIF8", 0, "a GIF"),
    (b"WEBP", 8, "a WebP"),
    (b"BM", 0, "a BMP"),
    (b"II*\0", 0, "a TIFF"),
    (b"MM\0*", 0, "a TIFF"),
    (b"ftyp", 4, "an AVIF or HEIC"),
)
"""Kinds of images that are not read: how they begin, from which byte, and their name."""
_SHOWN_ERROR = 100


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of an image, before it is decoded."""

    max_bytes: int = 32 << 20
    """Largest file."""
    max_pixels: int = 1 << 24
    """Most pixels of one image, and of a tensor where the model does not bound it."""


DEFAULT_LIMITS = ImageLimits()


def is_image(data: Buffer) -> bool:
    """Tell whether bytes begin as a JPEG or a PNG does."""
    return bytes(memoryview(data)[: len(_PNG_MAGIC)]).startswith(_MAGICS)


@dataclass(frozen=True, slots=True)
class Picture:
    """An image file whose header is read; its pixels are not."""

    file: ImageFile
    orientation: int = 1
    """The orientation of its EXIF data; 1 is upright."""

    @property
    def width(self) -> int:
        """Return the pixels of a row."""
        return self.file.size[0]

    @property
    def height(self) -> int:
        """Return the number of rows."""
        return self.file.size[1]

    def seen(self, fit: Fit) -> tuple[int, int]:
        """Return width and height after the EXIF orientation."""
        return (self.height, self.width) if self._is_sideways(fit) else (self.width, self.height)

    def _is_sideways(self, fit: Fit) -> bool:
        return fit.is_oriented and self.orientation in SIDEWAYS

    def decode(self, mode: str, width: int, height: int, fit: Fit = STRETCHED) -> Image.Image:
        """Return the pixels in a mode of Pillow, resized. Blocks; to be called once.

        Raises TensorDataError where the file is broken.
        """
        turn = TURNS.get(self.orientation) if fit.is_oriented else None
        if self._is_sideways(fit):
            width, height = height, width
        with _refusing():
            if mode != "RGBA":
                # A transparent colour would only make the conversion complain.
                self.file.info.pop("transparency", None)
            across, down = fit.resized(self.width, self.height, width, height)
            drafted = self.file.draft(None, (across * _DRAFT, down * _DRAFT))
            right, bottom = drafted[1][2:] if drafted else self.file.size
            self.file.load()
            image = _converted(self.file, mode)
            size = (across, down)
            found = fitted(image, size, (width, height), (right, bottom), fit)
            return found if turn is None else found.transpose(turn)


def open_image(data: bytes, limits: ImageLimits) -> Picture:
    """Read the header of a JPEG or PNG, and nothing else, so that memory does not grow.

    Raises TensorDataError for anything else, and for what exceeds the limits.
    """
    if len(data) > limits.max_bytes:
        expected = f"an image of at most {limits.max_bytes} bytes (max_image_bytes)"
        raise TensorDataError(expected, f"{len(data)} bytes")
    for magic, bare, plugin in _KINDS:
        if data.startswith(magic):
            with _refusing():
                picture = Picture(plugin(io.BytesIO(bare(data))), orientation_of(data))
            _check_size(picture, limits)
            return picture
    raise TensorDataError("a JPEG or PNG image", _kind_of(data))


def _kind_of(data: bytes) -> str:
    if not data:
        return "no bytes"
    named = (name for magic, at, name in _OTHERS if data.startswith(magic, at))
    return next((f"{name}: convert it first" for name in named), "other data")


def _check_size(picture: Picture, limits: ImageLimits) -> None:
    got = f"{picture.width}x{picture.height} pixels"
    if picture.width * picture.height > limits.max_pixels:
        expected = f"an image of at most {limits.max_pixels} pixels (max_image_pixels)"
        raise TensorDataError(expected, got)
    if max(picture.width, picture.height) > LONGEST_SIDE:
        raise TensorDataError(f"an image with sides of at most {LONGEST_SIDE} pixels", got)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (MemoryError, TensorDataError):
        raise
    except Exception as error:
        # Pillow says nowhere what it raises for a broken file, and it raises nearly everything.
        text = str(error)[:_SHOWN_ERROR]
        raise TensorDataError("an image that can be decoded", f"a broken one: {text}") from error


# --- essential parts: metadata costs memory and time, and is where decoders have their faults ---


def _bare_png(data: bytes) -> bytes:
    view, position = memoryview(data), len(_PNG_MAGIC)
    parts = [view[:position]]
    for _ in range(_MOST_PARTS):
        if position + _PNG_CHUNK.size > len(data):
            return b"".join(parts)
        length, name = _PNG_CHUNK.unpack_from(data, position)
        end = position + _PNG_CHUNK.size + length + 4
        if name in _PNG_KEPT:
            parts.append(view[position:end])
        position = end
    raise TensorDataError(f"a PNG of at most {_MOST_PARTS} chunks", "more")


def _bare_jpeg(data: bytes) -> bytes:
    view, position = memoryview(data), 2
    parts = [view[:position]]
    for _ in range(_MOST_PARTS):
        marker = _JPEG_MARKER.search(data, position)
        if marker is None or marker.end() + 2 > len(data):
            raise TensorDataError("a whole JPEG", f"{len(data)} bytes without an image")
        code = data[marker.end() - 1]
        if code == _JPEG_SCAN:
            _check_scans(data, marker.start())
            return b"".join((*parts, view[marker.start() :]))
        position = marker.end()
        if code in _JPEG_WITHOUT_LENGTH:
            continue
        position += max(2, int.from_bytes(view[position : position + 2]))
        if code not in _JPEG_LEFT_OUT:
            parts.append(view[marker.start() : position])
    raise TensorDataError(f"a JPEG of at most {_MOST_PARTS} segments", "more")


def _check_scans(data: bytes, start: int) -> None:
    # Within compressed data FF is followed by 00, so that this finds scans only.
    scans = data.count(bytes((0xFF, _JPEG_SCAN)), start)
    if scans > _MOST_SCANS:
        raise TensorDataError(f"a JPEG of at most {_MOST_SCANS} scans", str(scans))


_KINDS: tuple[tuple[bytes, Callable[[bytes], bytes], Callable[[io.BytesIO], ImageFile]], ...] = (
    (_JPEG_MAGIC, _bare_jpeg, JpegImageFile),
    (_PNG_MAGIC, _bare_png, PngImageFile),
)
"""Kinds of files: magic bytes, what of a file is kept, and its reader.

The plugins are called without Image.open, whose warnings of large images are for all of the
process, and which looks into further formats that a JPEG may hold.
"""


# --- pixels ------------------------------------------------------------------------------------


def _converted(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I"):
        # Sixteen bits: Pillow would make white of all above 255.
        image = image.point(lambda level: level * (1 / 256)).convert("L")
    return image if image.mode == mode else image.convert(mode)
