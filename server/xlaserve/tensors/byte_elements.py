"""Encodes and decodes length-prefixed BYTES elements, one piece at a time.

Each call holds the GIL only for the duration of one piece, so that the event loop stays responsive
while another thread processes millions of elements.
"""

import struct
from collections.abc import Sequence
from itertools import repeat

import numpy as np

LENGTH = struct.Struct("<I")
"""Length prefix of an element."""
PIECE_BYTES = 1 << 16
PIECE_ELEMENTS = 1 << 14


def cut(raw: bytes, most: int) -> tuple[list[bytes], int]:
    """Return the complete elements at the start of a piece, and their total size in bytes."""
    # Hot loop: it runs once per element, so truncation is detected after the loop. A slice beyond
    # the end is short, and leaves the position beyond the end.
    elements: list[bytes] = []
    start = position = 0
    unpack, append = LENGTH.unpack_from, elements.append
    try:
        for _ in repeat(None, most):
            (size,) = unpack(raw, position)
            start = position + LENGTH.size
            position = start + size
            append(raw[start:position])
    except struct.error:
        pass  # the next length prefix is incomplete
    if position > len(raw):
        elements.pop()
        position = start - LENGTH.size
    return elements, position


def packed(elements: Sequence[bytes]) -> bytes:
    """Return the elements of a piece, each with its length prefix."""
    parts: list[bytes] = []
    for element in elements:
        parts += (LENGTH.pack(len(element)), element)
    return b"".join(parts)


def joined(pieces: Sequence[bytes]) -> bytes | memoryview:
    """Return the concatenated pieces."""
    if len(pieces) == 1:
        return pieces[0]
    whole = np.empty(sum(map(len, pieces)), np.uint8).data
    position = 0
    for piece in pieces:
        whole[position : position + len(piece)] = piece
        position += len(piece)
    return whole
