"""BYTES elements behind their lengths, a piece at a time.

No call here holds the interpreter's lock for longer than a piece takes: while a thread reads or
writes millions of elements, the event loop goes on.
"""

import struct
from collections.abc import Sequence
from itertools import repeat

import numpy as np

LENGTH = struct.Struct("<I")
"""Length prefix of each element, in bytes."""
PIECE_BYTES = 1 << 16
PIECE_ELEMENTS = 1 << 14


def cut(raw: bytes, most: int) -> tuple[list[bytes], int]:
    """Return the complete elements at the start of a piece, and their size in bytes."""
    # It runs once for each element: what is cut off is found behind the loop. A slice that leads
    # beyond the end is short, and its position stays beyond the end.
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
        pass  # the length of the next one is not whole
    if position > len(raw):
        elements.pop()
        position = start - LENGTH.size
    return elements, position


def packed(elements: Sequence[bytes]) -> bytes:
    """Return the elements of a piece, each with its length."""
    parts: list[bytes] = []
    for element in elements:
        parts += (LENGTH.pack(len(element)), element)
    return b"".join(parts)


def joined(pieces: Sequence[bytes]) -> bytes | memoryview:
    """Return the bytes of all pieces."""
    if len(pieces) == 1:
        return pieces[0]
    whole = np.empty(sum(map(len, pieces)), np.uint8).data
    position = 0
    for piece in pieces:
        whole[position : position + len(piece)] = piece
        position += len(piece)
    return whole
