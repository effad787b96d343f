"""Images that are cropped, padded and rotated to the size that a model expects."""

import io
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image

from xlaserve.serving.inputs.image_files import DEFAULT_LIMITS, Picture, open_image
from xlaserve.serving.inputs.image_fit import SAMPLINGS, Fit, Resize
from xlaserve.serving.inputs.image_orientation import orientation_of
from xlaserve.tensors import Tensor

BILINEAR = SAMPLINGS["bilinear"]
SIZES = [(640, 480), (480, 640), (300, 300), (1000, 260), (257, 999)]


def picture(image: Image.Image, format: str = "PNG", **options: object) -> Picture:
    data = io.BytesIO()
    image.save(data, format, **options)
    return open_image(data.getvalue(), DEFAULT_LIMITS)


def noise(width: int, height: int) -> Image.Image:
    """Make smooth noise, which every sampling filter changes a little."""
    random = np.random.default_rng(width * height)
    small = random.integers(0, 256, (9, 11, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def torchvision(image: Image.Image, shorter: int, side: int) -> Image.Image:
    """Resize the shorter side and crop the center, as torchvision's transforms do."""
    width, height = image.size
    if width <= height:
        size = (shorter, int(shorter * height / width))
    else:
        size = (int(shorter * width / height), shorter)
    whole = image.resize(size, BILINEAR)
    left, top = round((size[0] - side) / 2), round((size[1] - side) / 2)
    return whole.crop((left, top, left + side, top + side))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shorter", [224, 256])
def test_a_crop_is_that_of_torchvision(size: tuple[int, int], shorter: int) -> None:
    """Results differ by single levels at most: pixels outside the crop are never computed."""
    random = np.random.default_rng(7)
    image = Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), np.uint8))
    found = picture(image).decode("RGB", 224, 224, Fit(Resize.CROP, shorter))
    expected = torchvision(image, shorter, 224)

    assert (224, 224) == found.size
    assert np.abs(_levels(found) - _levels(expected)).max() <= 1


@pytest.mark.parametrize(("size", "inner"), [((60, 30), (40, 20)), ((30, 60), (20, 40))])
def test_a_frame_is_around_what_fits(size: tuple[int, int], inner: tuple[int, int]) -> None:
    white = Image.new("RGB", size, (255, 255, 255))
    found = _levels(picture(white).decode("RGB", 40, 40, Fit(Resize.PAD, pad=114)))[..., 0]
    rows, columns = np.nonzero(found == 255)

    assert {255, 114} == set(found.flat)
    assert inner == (int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1)
    assert (40 - inner[0]) // 2 == columns.min()
    assert (40 - inner[1]) // 2 == rows.min()


def test_sampling_is_as_asked() -> None:
    image = Image.fromarray(np.asarray([[0, 255], [255, 0]], np.uint8))
    nearest = picture(image).decode("L", 4, 4, Fit(sampling=SAMPLINGS["nearest"]))
    smooth = picture(image).decode("L", 4, 4, Fit())

    assert {0, 255} == set(_levels(nearest).flat)
    assert len(set(_levels(smooth).flat)) > 2


def test_a_long_image_is_not_made_whole_before_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resizing its shorter side to 224 would make 200 million pixels."""
    made: list[tuple[int, int]] = []
    resize = Image.Image.resize

    def note(image: Image.Image, size: tuple[int, int], *more: Any) -> Image.Image:
        made.append(size)
        return resize(image, size, *more)

    monkeypatch.setattr(Image.Image, "resize", note)
    ribbon = picture(Image.new("L", (60_000, 15), 7))
    found = ribbon.decode("L", 224, 224, Fit(Resize.CROP, 224))

    assert [(224, 224)] == made
    assert ({7}, (224, 224)) == (set(_levels(found).flat), found.size)


# --- orientation ---


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", ["<", ">"])
def test_a_jpeg_is_turned_as_its_exif_says(orientation: int, order: str) -> None:
    """As Pillow rotates it (EXIF 4.6.4); width and height are those of the rotated image."""
    image = noise(64, 32)
    data = io.BytesIO()
    image.save(data, "JPEG", quality=95, exif=_exif(orientation, order))
    turned = _transposed(data.getvalue())
    found = open_image(data.getvalue(), DEFAULT_LIMITS)
    fit = Fit(is_oriented=True)
    seen = found.seen(fit)

    assert turned.size == seen
    assert np.abs(_levels(found.decode("RGB", *seen, fit)) - _levels(turned)).max() <= 2


def test_what_is_to_be_ignored_is_not_turned() -> None:
    data = io.BytesIO()
    noise(64, 32).save(data, "JPEG", exif=_exif(6, "<"))
    found = open_image(data.getvalue(), DEFAULT_LIMITS)

    assert (64, 32) == found.seen(Fit())
    assert (64, 32) == found.decode("RGB", 64, 32, Fit()).size


JPEG = b"\xff\xd8\xff\xe1"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x89PNG\r\n\x1a\n",
        JPEG,
        JPEG + b"\x00\x02" * 5,
        JPEG + b"\xff\xff" + b"Exif\0\0",
        JPEG + b"\x00\x10Exif\0\0II*\0\xff\xff\xff\xff",
        JPEG + b"\x00\x14Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01",
        JPEG + b"\x00\x12Exif\0\0XX*\0\x08\0\0\0\0\0",
        JPEG + b"\x00\x08Exif\0\0",
    ],
)
def test_broken_exif_is_no_orientation(data: bytes) -> None:
    assert 1 == orientation_of(data)


def test_exif_behind_the_pixels_is_not_read() -> None:
    data = io.BytesIO()
    noise(8, 8).save(data, "JPEG")
    segment = _exif(6, "<")
    scan = data.getvalue().index(b"\xff\xda")
    length = int.from_bytes(data.getvalue()[scan + 2 : scan + 4]) + 2
    late = b"\xff\xe1" + (len(segment) + 2).to_bytes(2) + segment
    before, behind = data.getvalue()[:scan], data.getvalue()[scan : scan + length]

    assert 6 == orientation_of(before + late + behind)
    assert 1 == orientation_of(before + behind + late)


@pytest.mark.parametrize("number", [0, 9, 65535])
def test_a_number_that_is_no_orientation_is_upright(number: int) -> None:
    data = io.BytesIO()
    noise(8, 8).save(data, "JPEG", exif=_exif(number, "<"))

    assert 1 == orientation_of(data.getvalue())


def _exif(orientation: int, order: str) -> bytes:
    head = b"II*\0" if order == "<" else b"MM\0*"
    other = struct.pack(f"{order}HHII", 0x0100, 4, 1, 64)
    entry = struct.pack(f"{order}HHIHxx", 0x0112, 3, 1, orientation)
    return b"Exif\0\0" + head + struct.pack(f"{order}IH", 8, 2) + other + entry + bytes(4)


def _transposed(data: bytes) -> Image.Image:
    from PIL import ImageOps

    return ImageOps.exif_transpose(Image.open(io.BytesIO(data)))


def _levels(image: Image.Image) -> Tensor:
    return np.asarray(image).astype(np.int64)
