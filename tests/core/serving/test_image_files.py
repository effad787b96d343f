"""Decoding of images, and refusals before any expensive work."""

import io
import resource
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from xlaserve.serving.inputs.image_files import LONGEST_SIDE, ImageLimits, is_image, open_image
from xlaserve.tensors import Tensor, TensorDataError

MEGABYTE = 1 << 20
PNG = b"\x89PNG\r\n\x1a\n"
RED, GREEN = (255, 0, 0), (0, 255, 0)


def gradient(width: int = 40, height: int = 30, mode: str = "RGB") -> Image.Image:
    rows = np.linspace(0, 255, height)[:, None, None]
    columns = np.linspace(0, 255, width)[None, :, None]
    pixels = np.broadcast_to((rows + columns) / 2, (height, width, 3)).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def waves(width: int, height: int) -> Image.Image:
    rows, columns = np.sin(np.arange(height) / 9)[:, None], np.sin(np.arange(width) / 8)
    return Image.fromarray((rows * columns * 127 + 128).astype(np.uint8)).convert("RGB")


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def header(width: int, height: int, bits: int = 8, colour: int = 0) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))


def pixel_data(raw: bytes) -> bytes:
    return chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")


def grey_png(width: int, height: int) -> bytes:
    return PNG + header(width, height) + pixel_data(bytes(height * (width + 1)))


def with_chunks(*chunks: bytes) -> bytes:
    """Build a PNG of one pixel, with further chunks before and after it."""
    extra = b"".join(chunks)
    return PNG + header(1, 1) + extra + chunk(b"IDAT", zlib.compress(b"\0\7")) + extra


def decoded(data: bytes, mode: str = "RGB", size: tuple[int, int] | None = None) -> Tensor:
    picture = open_image(data, ImageLimits())
    return np.asarray(picture.decode(mode, *(size or (picture.width, picture.height))))


def shortly(value: object) -> str:
    """Return a short test id: the first bytes of a file, or the text of a value."""
    return (ascii(value[:12]) if isinstance(value, bytes) else str(value))[:40]


@contextmanager
def allowing(more_bytes: int) -> Iterator[None]:
    """Limit the process to this many more bytes; allocations beyond them raise MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# --- pixels ---


def one_pixel(mode: str, value: object) -> Image.Image:
    image = Image.new(mode, (1, 1))
    image.putpixel((0, 0), value)  # type: ignore[arg-type]
    return image


def palette(*transparency: int) -> bytes:
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, *GREEN])
    image.putpixel((1, 0), 1)
    return encoded(image, "PNG", **({"transparency": bytes(transparency)} if transparency else {}))


@pytest.mark.parametrize(
    ("data", "mode", "expected"),
    [
        (encoded(one_pixel("L", 7), "PNG"), "RGB", [7, 7, 7]),
        (encoded(one_pixel("L", 7), "PNG"), "RGBA", [7, 7, 7, 255]),
        (encoded(one_pixel("RGB", RED), "PNG"), "L", 76),
        (encoded(one_pixel("RGBA", (1, 2, 3, 4)), "PNG"), "RGB", [1, 2, 3]),
        (encoded(one_pixel("RGBA", (1, 2, 3, 4)), "PNG"), "RGBA", [1, 2, 3, 4]),
        (encoded(one_pixel("LA", (9, 0)), "PNG"), "L", 9),
        (encoded(one_pixel("1", 1), "PNG"), "L", 255),
        (encoded(one_pixel("I;16", 0x1234), "PNG"), "L", 0x12),
        (encoded(one_pixel("I;16", 0xFFFF), "PNG"), "RGB", [255, 255, 255]),
        (PNG + header(1, 1, 16, 2) + pixel_data(b"\0\1\xff\2\xff\3\xff"), "RGB", [1, 2, 3]),
        (encoded(one_pixel("CMYK", (0, 255, 255, 0)), "JPEG"), "RGB", [255, 0, 0]),
        (encoded(one_pixel("L", 7), "JPEG"), "L", 7),
    ],
    ids=shortly,
)
def test_every_kind_becomes_eight_bits_of_the_mode(
    data: bytes, mode: str, expected: object
) -> None:
    assert np.asarray(expected).tolist() == pytest.approx(decoded(data, mode)[0, 0], abs=2)


@pytest.mark.parametrize("transparency", [(), (0, 255), (10, 20)])
def test_a_palette_becomes_its_colours(transparency: tuple[int, ...]) -> None:
    """Transparency counts only in modes that have it, and raises no warning."""
    data = palette(*transparency)
    alpha = transparency or (255, 255)

    assert [[RED, GREEN]] == [[tuple(pixel) for pixel in decoded(data)[0]]]
    assert list(alpha) == decoded(data, "RGBA")[0, :, 3].tolist()


def test_transparent_colours_are_alpha_and_nothing_else() -> None:
    data = encoded(one_pixel("RGB", RED), "PNG", transparency=RED)

    assert [*RED] == decoded(data)[0, 0].tolist()
    assert 0 == decoded(data, "RGBA")[0, 0, 3]


def test_the_first_frame_of_an_animation_counts() -> None:
    frames = [one_pixel("RGB", RED), one_pixel("RGB", GREEN)]
    data = encoded(frames[0], "PNG", save_all=True, append_images=frames[1:])

    assert b"acTL" in data
    assert [*RED] == decoded(data)[0, 0].tolist()


def test_an_image_is_resized() -> None:
    image = Image.new("L", (8, 4))
    image.paste(255, (4, 0, 8, 4))

    found = decoded(encoded(image, "PNG"), "L", (2, 6)).astype(int)

    assert (6, 2) == found.shape
    assert (found[:, 0] < 50).all()
    assert (found[:, 1] > 200).all()


@pytest.mark.parametrize("size", [(32, 24), (50, 20), (13, 77)])
@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_a_large_jpeg_that_is_decoded_smaller_looks_the_same(
    size: tuple[int, int], options: dict[str, bool]
) -> None:
    """Pillow's draft mode saves most of the time, and must not change the result."""
    data = encoded(waves(643, 481), "JPEG", quality=95, **options)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.resize(size, Image.Resampling.BILINEAR), int)

    differences = np.abs(expected - decoded(data, size=size))

    assert differences.max() <= 5
    assert differences.mean() < 1


def test_the_order_of_resizing_is_not_seen() -> None:
    """Columns are resized first where that takes less memory."""
    narrow = gradient(10, 400)
    expected = np.asarray(narrow.resize((50, 40), Image.Resampling.BILINEAR), int)

    assert np.abs(expected - decoded(encoded(narrow, "PNG"), size=(50, 40))).max() <= 2


# --- refusals ---

ANIMATED = {"save_all": True, "append_images": [gradient(mode="L")]}
JPEG_DATA = encoded(gradient(), "JPEG")
PROGRESSIVE = encoded(gradient(), "JPEG", progressive=True)
PNG_DATA = encoded(gradient(), "PNG")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "a JPEG or PNG image, got no bytes"),
        (b"hello", "a JPEG or PNG image, got other data"),
        (encoded(gradient(), "GIF"), "a JPEG or PNG image, got a GIF: convert it first"),
        (encoded(gradient(), "GIF", **ANIMATED), "got a GIF"),
        (encoded(gradient(), "WEBP"), "got a WebP"),
        (encoded(gradient(), "WEBP", **ANIMATED), "got a WebP"),
        (encoded(gradient(), "BMP"), "got a BMP"),
        (encoded(gradient(), "TIFF"), "got a TIFF"),
        (b"MM\0*" + bytes(99), "got a TIFF"),
        (b"\0\0\0\x20ftypavif" + bytes(99), "got an AVIF or HEIC"),
        (JPEG_DATA[:3], "a complete JPEG"),
        (JPEG_DATA[:100], "a complete JPEG"),
        (JPEG_DATA[:-100], "broken"),
        (PROGRESSIVE[:-100], "broken"),
        (b"\xff\xd8\xff\xd9", "a complete JPEG"),
        (b"\xff\xd8" + b"\xff" * 1000, "a complete JPEG"),
        (PNG, "broken"),
        (PNG_DATA[:30], "broken"),
        (PNG_DATA[: len(PNG_DATA) // 2], "broken"),
        (PNG_DATA.replace(b"IHDR", b"IHDX"), "broken"),
        (PNG + header(0, 5) + pixel_data(b""), "broken"),
        (PNG + header(5, 5) + pixel_data(b"\0\0"), "broken"),
        (PNG + header(5, 5, colour=9) + pixel_data(bytes(30)), "broken"),
        (PNG + header(65535, 65535) + pixel_data(bytes(1000)), "got 65535x65535 pixels"),
        (PNG + header(2**31 - 1, 2**31 - 1) + pixel_data(b""), "max_image_pixels"),
        (JPEG_DATA.replace(struct.pack(">HH", 30, 40), b"\xff\xff" * 2), "got 65535x65535 pixels"),
        (grey_png(LONGEST_SIDE + 1, 1), "sides of at most 65535 pixels, got 65536x1"),
        (with_chunks(*[chunk(b"IDAT", b"")] * 40_000), "at most 65536 chunks"),
        (b"\xff\xd8" + b"\xff\xe0\0\2" * 70_000, "at most 65536 segments"),
    ],
    ids=shortly,
)
def test_what_is_no_image_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(TensorDataError, match=text):
        decoded(data)


def test_limits_count_bytes_and_pixels() -> None:
    """An image exactly at a limit is accepted."""
    size = len(PNG_DATA)
    open_image(PNG_DATA, ImageLimits(size, 1200))

    with pytest.raises(TensorDataError, match=rf"most {size - 1} bytes \(max_image_bytes\), got"):
        open_image(PNG_DATA, ImageLimits(size - 1, 1200))
    with pytest.raises(TensorDataError, match=r"1199 pixels \(max_image_pixels\), got 40x30"):
        open_image(PNG_DATA, ImageLimits(size, 1199))


def test_a_huge_png_is_refused_without_memory() -> None:
    """A PNG of a few kilobytes that says 65535x65535 would take 4 GB."""
    data = PNG + header(65535, 65535) + pixel_data(bytes(MEGABYTE))
    before = psutil.Process().memory_info().rss
    with allowing(64 * MEGABYTE), pytest.raises(TensorDataError, match="max_image_pixels"):
        decoded(data)

    assert psutil.Process().memory_info().rss - before < 64 * MEGABYTE


BOMB = zlib.compress(bytes(MEGABYTE), 9)
TEXT = zlib.compress("\U0001f600".encode() + b"a" * (MEGABYTE - 4), 9)


@pytest.mark.parametrize(
    "bomb",
    [
        chunk(b"zTXt", b"key\0\0" + BOMB),
        chunk(b"iCCP", b"key\0\0" + BOMB),
        chunk(b"iTXt", b"key\0\1\0\0\0" + TEXT),
        chunk(b"eXIf", bytes(MEGABYTE // 4)),
    ],
    ids=shortly,
)
def test_metadata_is_not_unpacked(bomb: bytes) -> None:
    data = with_chunks(*[bomb] * 60)
    with allowing(len(data) // 2 + 16 * MEGABYTE):
        assert [[7]] == decoded(data, "L").tolist()


def test_a_narrow_image_is_not_made_wide_first() -> None:
    """4096x40000 pixels between two steps would take 160 MB, or four times that in color."""
    data = grey_png(400, 40_000)
    with allowing(128 * MEGABYTE):
        assert (8, 4096) == decoded(data, "L", (4096, 8)).shape


def test_a_jpeg_of_many_scans_is_refused() -> None:
    """Each scan costs a pass over the image, for thirty bytes of input."""
    scan = PROGRESSIVE[PROGRESSIVE.rindex(b"\xff\xda") : -2]
    decoded(PROGRESSIVE[:-2] + scan * 50 + b"\xff\xd9")

    with pytest.raises(TensorDataError, match="at most 100 scans, got 1010"):
        decoded(PROGRESSIVE[:-2] + scan * 1000 + b"\xff\xd9")


@pytest.mark.parametrize(
    "data",
    [
        with_chunks(chunk(b"acTL", struct.pack(">II", 0, 0))),
        with_chunks(chunk(b"tRNS", b"\0\7")),
        with_chunks(b"\0\0\0\1teXt?oops"),
        JPEG_DATA[:2] + b"\xff\xe1\0\x0eExif\0\0MM\0\x2a\0\0" + JPEG_DATA[2:],
        JPEG_DATA[:2] + b"\xff\xe2\0\x0eMPF\0MM\0\x2a\0\0\0\4" + JPEG_DATA[2:],
        JPEG_DATA[:2] + b"\xff\xfe\0\5abc\xff\xff\xff" + JPEG_DATA[2:],
        JPEG_DATA[:20] + b"junk" + JPEG_DATA[20:],
    ],
    ids=shortly,
)
def test_broken_metadata_is_passed_over(data: bytes) -> None:
    """No warning is raised, which would be an error here."""
    assert decoded(data).shape in {(1, 1, 3), (30, 40, 3)}


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_a_profile_of_megabytes_is_passed_over(format: str) -> None:
    """Pillow itself refuses the PNG, whose profile it unpacks."""
    data = encoded(gradient(), format, icc_profile=bytes(3 * MEGABYTE), quality=95)
    plain = encoded(gradient(), format, quality=95)

    with allowing(len(data) + 16 * MEGABYTE):
        assert np.array_equal(decoded(plain), decoded(data))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_keeps_what_tells_its_colours(mode: str) -> None:
    data = encoded(gradient(mode=mode), "JPEG")
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB"))

    assert np.array_equal(expected, decoded(data))


@pytest.mark.parametrize(
    ("data", "expected"),
    [(JPEG_DATA, True), (PNG, True), (b"\xff\xd8", False), (b"GIF89a", False), (b"", False)],
    ids=shortly,
)
def test_images_are_told_by_how_they_begin(data: bytes, expected: bool) -> None:
    assert expected is is_image(data)
    assert expected is is_image(memoryview(data))


FILES = (JPEG_DATA, PROGRESSIVE, PNG_DATA, palette(0, 128), encoded(gradient(mode="I;16"), "PNG"))


@settings(max_examples=500)
@given(
    file=st.sampled_from(FILES),
    changes=st.lists(st.tuples(st.integers(0, 5000), st.binary(max_size=4)), max_size=5),
    end=st.integers(0, 5000),
    mode=st.sampled_from(["L", "RGB", "RGBA"]),
)
@example(file=PNG_DATA, changes=[(18, b"\xff\xff")], end=5000, mode="RGB")
def test_a_changed_file_is_an_image_or_is_refused(
    file: bytes, changes: list[tuple[int, bytes]], end: int, mode: str
) -> None:
    data = bytearray(file[:end])
    for position, change in changes:
        place = position % (len(data) or 1)
        data[place : place + len(change)] = change
    try:
        found = decoded(bytes(data), mode, (6, 5))
    except TensorDataError:
        return

    assert ((5, 6), np.uint8) == (found.shape[:2], found.dtype)
