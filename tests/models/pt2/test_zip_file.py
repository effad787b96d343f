"""Strict reading of zip files: ambiguous or inconsistent ones are refused."""

import io
import struct
import zipfile
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2.zip_file import ZipFile

LIMIT = 1 << 20
_CENTRAL, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"


def zipped(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", compression) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = compression
            archive.writestr(info, data)
    return written.getvalue()


ONE = zipped({"m/a": b"alpha"})


def patched(data: bytes, header: bytes, offset: int, form: str, value: int) -> bytes:
    """Change a field in the first header of a kind."""
    made = bytearray(data)
    struct.pack_into(form, made, data.index(header) + offset, value)
    return bytes(made)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_entries_are_read(compression: int) -> None:
    files = {"m/a": b"alpha" * 100, "m/b": b"", "m/.c": b"gamma"}

    found = ZipFile(zipped(files, compression))

    assert files == {name: bytes(found.read(name, LIMIT)) for name in found.entries}


def test_what_is_stored_is_a_view_of_the_file() -> None:
    assert ZipFile(ONE).read("m/a", LIMIT).obj is ONE


def _two_of_a_name() -> bytes:
    two = zipped({"m/a": b"1", "m/b": b"2"})
    return two.replace(b"m/b", b"m/a")


def _bomb() -> bytes:
    """Declare that 20 bytes inflate to a gigabyte."""
    made = zipped({"m/a": bytes(1000)}, zipfile.ZIP_DEFLATED)
    return patched(made, _CENTRAL, 24, "<L", 1 << 30)


def _inflates_to_more() -> bytes:
    made = zipped({"m/a": bytes(1000)}, zipfile.ZIP_DEFLATED)
    return patched(made, _CENTRAL, 24, "<L", 500)


def _overlapping() -> bytes:
    """Let the second entry start where the first one does."""
    two = bytearray(zipped({"m/a": b"1", "m/b": b"2"}))
    second = two.rindex(_CENTRAL)
    struct.pack_into("<L", two, second + 42, 0)
    return bytes(two)


def _entry_in_directory() -> bytes:
    made = patched(ONE, _CENTRAL, 20, "<L", 500)
    return patched(made, _CENTRAL, 24, "<L", 500)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: b"", "not a .pt2 file, which is a zip archive: it has no central directory"),
        (
            lambda: b"\x80\x02pickle",
            "not a .pt2 file, which is a zip archive: it has no central directory",
        ),
        (lambda: ONE[:-1], "not a .pt2 file, which is a zip archive: it has no central directory"),
        (lambda: ONE + b"x", "bytes after its end"),
        (lambda: b"before" + ONE, "the zip file's central directory is not at the recorded offset"),
        (lambda: zipped({"m/../../a": b""}), "the zip file has an entry outside its root: '"),
        (lambda: zipped({"/a": b""}), "the zip file has an entry outside its root: '"),
        (lambda: zipped({"m/a\\b": b""}), "the zip file has an entry outside its root: '"),
        (lambda: zipped({"m//a": b""}), "the zip file has an entry outside its root: '"),
        (_two_of_a_name, "two entries 'm/a'"),
        (_overlapping, "overlaps another one"),
        (_entry_in_directory, "after the central directory began"),
        (_bomb, "cannot be 1073741824 uncompressed"),
        (lambda: patched(ONE, _CENTRAL, 24, "<L", 9), "5 bytes that cannot be 9"),
        (lambda: patched(ONE, _CENTRAL, 8, "<H", 1), "is encrypted"),
        (lambda: patched(ONE, _CENTRAL, 10, "<H", 12), "method 12"),
        (
            lambda: patched(ONE, _LOCAL, 8, "<H", 8),
            "has a different name or method in its local header",
        ),
        (
            lambda: ONE.replace(b"m/a", b"m/b", 1),
            "has a different name or method in its local header",
        ),
        (lambda: patched(ONE, _CENTRAL, 42, "<L", 3), "has no header at its offset"),
        (lambda: patched(ONE, b"PK\x05\x06", 4, "<H", 1), "one of several parts"),
        (
            lambda: patched(patched(ONE, b"PK\x05\x06", 8, "<H", 2), b"PK\x05\x06", 10, "<H", 2),
            "1 entries, but its end record says 2",
        ),
        (lambda: ONE.replace(b"m/a", b"\xff/a"), "has a name that is truncated or not UTF-8"),
    ],
)
def test_what_is_ambiguous_is_refused(make: Callable[[], bytes], text: str) -> None:
    with pytest.raises(InvalidModel, match=text):
        ZipFile(make())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (ONE.replace(b"alpha", b"alphb"), "CRC-32"),
        (_inflates_to_more(), "does not have its recorded 500 bytes"),
    ],
)
def test_an_entry_that_lies_is_refused_when_it_is_read(data: bytes, text: str) -> None:
    found = ZipFile(data)

    with pytest.raises(InvalidModel, match=text):
        found.read("m/a", LIMIT)


def test_an_entry_above_the_limit_is_not_read() -> None:
    with pytest.raises(InvalidModel, match="5 bytes, more than the 4 allowed"):
        ZipFile(ONE).read("m/a", 4)


def wide(size: int = 5) -> bytes:
    """Write `ONE` in zip64 format, as PyTorch does for large files."""
    name, data = b"m/a", b"alpha"
    crc = zlib.crc32(data)
    local = struct.pack("<4s5H3L2H", _LOCAL, 45, 0, 0, 0, 0, crc, 5, 5, 3, 0) + name + data
    extra = struct.pack("<2H3Q", 1, 24, size, 5, 0)
    most = 0xFFFFFFFF
    central = struct.pack(
        "<4s6H3L5H2L",
        _CENTRAL,
        45,
        45,
        0,
        0,
        0,
        0,
        crc,
        most,
        most,
        3,
        len(extra),
        0,
        0,
        0,
        0,
        most,
    )
    central += name + extra
    start = len(local)
    end = start + len(central)
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, len(central), start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(central), most, 0)
    return local + central + record + locator + last


def test_sizes_of_64_bits_are_read() -> None:
    assert b"alpha" == bytes(ZipFile(wide()).read("m/a", LIMIT))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (wide(6), "5 bytes that cannot be 6"),
        (
            patched(wide(), b"PK\x05\x06", 12, "<L", 7),
            "the two end records of the zip file differ",
        ),
        (patched(wide(), b"PK\x06\x07", 8, "<Q", 2**63), "64-bit"),
        (
            patched(wide(), b"PK\x06\x06", 4, "<Q", 43),
            "between its central directory and end record",
        ),
        (patched(wide(), b"PK\x01\x02", 30, "<H", 8), "damaged|64-bit"),
    ],
)
def test_a_lie_in_64_bits_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(InvalidModel, match=text):
        ZipFile(data)


@settings(max_examples=200)
@given(st.data())
def test_no_changed_byte_gives_other_data(data: st.DataObject) -> None:
    """Whichever bytes change, the entries are the same or the file is refused."""
    whole = data.draw(st.sampled_from([ONE, wide(), zipped({"m/a": b"alpha"}, 8)]))
    made = bytearray(whole)
    for place in data.draw(st.lists(st.integers(0, len(made) - 1), min_size=1, max_size=4)):
        made[place] = data.draw(st.integers(0, 255))
    try:
        found = ZipFile(bytes(made))
        read = [bytes(found.read(name, LIMIT)) for name in found.entries]
    except InvalidModel:
        return
    assert read in ([b"alpha"], [])
