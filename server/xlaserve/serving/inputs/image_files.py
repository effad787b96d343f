"""JPEG and PNG files: detection, limits, and decoding without metadata."""

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
"""Maximum length of a side in pixels: the maximum of JPEG, which also bounds the weights of a
resize."""

_MOST_PARTS = 1 << 16
_MOST_SCANS = 100
"""Maximum number of scans in a progressive JPEG, which usually has about ten: each costs a pass
over the image for only a few bytes."""

_DRAFT = 3
"""Minimum ratio of a JPEG's reduced decoding size to the target, which keeps the result sharp."""

_JPEG_MAGIC = b"\xff\xd8\xff"
_JPEG_MARKER = re.compile(rb"\xff[\x01-\xfe]", re.DOTALL)
_JPEG_SCAN = 0xDA
_JPEG_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))
_JPEG_LEFT_OUT = frozenset((*range(0xE1, 0xEE), 0xEF, 0xFE))
"""Removed segments: comments and application data except JFIF (E0) and Adobe (EE), which define
colors.
"""

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
    """Limits of images, enforced before decoding."""

    max_bytes: int = 32 << 20
    """Maximum size of a file."""
    max_pixels: int = 1 << 24
    """Maximum pixels of one image, and of an input tensor that the model does not bound."""


DEFAULT_LIMITS = ImageLimits()


def is_image(data: Buffer) -> bool:
    """Tell whether data starts like a JPEG or PNG file."""
    return bytes(memoryview(data)[: len(_PNG_MAGIC)]).startswith(_MAGICS)


@dataclass(frozen=True, slots=True)
class Picture:
    """An image whose header has been read, but not its pixels."""

    file: ImageFile
    orientation: int = 1
    """EXIF orientation; 1 is upright."""

    @property
    def width(self) -> int:
        """Return the width in pixels, before orientation."""
        return self.file.size[0]

    @property
    def height(self) -> int:
        """Return the height in pixels, before orientation."""
        return self.file.size[1]

    def seen(self, fit: Fit) -> tuple[int, int]:
        """Return width and height, after applying the EXIF orientation if `fit` does."""
        return (self.height, self.width) if self._is_sideways(fit) else (self.width, self.height)

    def _is_sideways(self, fit: Fit) -> bool:
        return fit.is_oriented and self.orientation in SIDEWAYS

    def decode(self, mode: str, width: int, height: int, fit: Fit = STRETCHED) -> Image.Image:
        """Decode, resize and return the image in a Pillow mode. Blocks; may be called once.

        Raises TensorDataError if the file is broken.
        """
        turn = TURNS.get(self.orientation) if fit.is_oriented else None
        if self._is_sideways(fit):
            width, height = height, width
        with _refusing():
            if mode != "RGBA":
                # A transparent color would only cause a warning in the conversion.
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
    """Open a JPEG or PNG file, reading only its header.

    Raises TensorDataError for other data, and for images that exceed the limits.
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
        # Pillow does not document its errors for broken files, and raises almost anything.
        text = str(error)[:_SHOWN_ERROR]
        raise TensorDataError("an image that can be decoded", f"a broken one: {text}") from error


# --- essential parts: metadata costs memory and time, and triggers decoder bugs ---


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
            raise TensorDataError("a complete JPEG", f"{len(data)} bytes without an image")
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
    # In compressed data FF is always followed by 00, so this only counts scans.
    scans = data.count(bytes((0xFF, _JPEG_SCAN)), start)
    if scans > _MOST_SCANS:
        raise TensorDataError(f"a JPEG of at most {_MOST_SCANS} scans", str(scans))


_KINDS: tuple[tuple[bytes, Callable[[bytes], bytes], Callable[[io.BytesIO], ImageFile]], ...] = (
    (_JPEG_MAGIC, _bare_jpeg, JpegImageFile),
    (_PNG_MAGIC, _bare_png, PngImageFile),
)
"""File formats: magic bytes, the function that removes metadata, and the reader.

The plugins are called directly: Image.open emits process-wide warnings about large images, and
tries further formats embedded in a JPEG.
"""


# --- pixels ------------------------------------------------------------------------------------


def _converted(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit pixels: Pillow's conversion would turn all values above 255 into white.
        image = image.point(lambda level: level * (1 / 256)).convert("L")
    return image if image.mode == mode else image.convert(mode)
