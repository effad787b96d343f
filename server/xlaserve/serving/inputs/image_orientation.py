"""The EXIF orientation of JPEG files."""

import struct

from PIL import Image

_MAGIC = b"\xff\xd8\xff"
_SCAN = 0xDA
_MOST_SEGMENTS = 1 << 16
_EXIF_MARKER = 0xE1
_EXIF_MAGIC = b"Exif\0\0"
_EXIF_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_ORIENTATION_TAG = 0x0112
_SHORT = 3
_MOST_TAGS = 200
_EXIF_HEADER = 8
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transpositions by EXIF orientation (EXIF 4.6.4)."""
SIDEWAYS = frozenset((5, 6, 7, 8))


def orientation_of(data: bytes) -> int:
    """Return the EXIF orientation of a JPEG, or 1 if it has no valid one.

    Only considers segments before the first scan, and the first EXIF directory.
    """
    position = 2
    if not data.startswith(_MAGIC):
        return 1
    for _ in range(_MOST_SEGMENTS):
        if data[position : position + 1] != b"\xff" or position + 4 > len(data):
            return 1
        code = data[position + 1]
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4])
        if code == _SCAN:
            return 1
        if code == _EXIF_MARKER and data.startswith(_EXIF_MAGIC, position + 4):
            return _first_directory(data[position + 4 + len(_EXIF_MAGIC) : end])
        position = end
    return 1


def _first_directory(exif: bytes) -> int:
    order = _EXIF_ORDERS.get(exif[:4])
    if order is None or len(exif) < _EXIF_HEADER:
        return 1
    (start,) = struct.unpack_from(f"{order}I", exif, 4)
    if start + 2 > len(exif):
        return 1
    (count,) = struct.unpack_from(f"{order}H", exif, start)
    entry = struct.Struct(f"{order}HHIH2x")
    for index in range(min(count, _MOST_TAGS)):
        at = start + 2 + index * entry.size
        if at + entry.size > len(exif):
            return 1
        tag, kind, values, found = entry.unpack_from(exif, at)
        if (tag, kind, values) == (_ORIENTATION_TAG, _SHORT, 1):
            return found if found in TURNS else 1
    return 1
