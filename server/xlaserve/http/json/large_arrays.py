"""Large arrays of numbers, cut out of a JSON document before it is parsed.

A parser holds the GIL while it reads an array of megabytes, and blocks the event loop. This module
therefore finds large arrays between strings, replaces each by a marker, and reads them in pieces.
It only accepts: `None` means that a document is not regular enough, and the ordinary parser
decides.

Why accepted documents are valid JSON: a marker is a string that a client cannot predict. If an
array is cut out of a string, the marker ends that string, and the document becomes invalid. An
array counts only if its marker is the value that the reader finds. The array itself is checked as
follows:

1. its brackets and commas alone are nested regularly;
2. the byte after each `[` and before each `]` belongs to a number or is another such bracket;
3. with its brackets replaced by blanks, it is a list of as many numbers as (1) implies.

For a flat list, (3) is sufficient. Otherwise, by (3), there is exactly one number between
consecutive commas, and by (2) each innermost list begins and ends with a number. Each innermost
list therefore has as many numbers as its commas imply, and no number is outside of the innermost
lists.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xlaserve.http.json.json_numbers import read_numbers
from xlaserve.http.json.nesting import UNSTRUCTURED, list_lengths
from xlaserve.tensors import (
    MAX_DIMENSIONS,
    Datatype,
    Shape,
    Tensor,
    TensorDataError,
    element_count,
    from_elements,
)

LARGE_BYTES = 64 << 10
"""Minimum length of text without quotes that is searched for an array."""

_PIECE_BYTES = 128 << 10
"""Bytes parsed at a time while holding the GIL: a fifth of a millisecond."""

_OPENING, _CLOSING, _COMMA, _QUOTE = b'[],"'
_ARRAY = re.compile(rb"\s*:\s*(?=\[)")
_TO_BLANKS = bytes.maketrans(b"[]", b"  ")
_IN_NUMBERS = np.zeros(256, dtype=np.bool_)
_IN_NUMBERS[list(b"0123456789+-.eE")] = True
_BEHIND_OPENING = _IN_NUMBERS.copy()
_BEHIND_OPENING[_OPENING] = True
_BEFORE_CLOSING = _IN_NUMBERS.copy()
_BEFORE_CLOSING[_CLOSING] = True
_HEAD_BYTES = 1 << 10
_MARKER_BYTES = 16


@dataclass(slots=True)
class Cut:
    """A document whose large arrays were replaced by markers."""

    document: bytes
    """The document with a marker string in place of each array."""
    arrays: dict[bytes, memoryview]
    """The arrays by marker, including its quotes; reading an array removes it."""

    def read(
        self, datatype: Datatype, shape: Shape | None, marker: bytes, max_levels: int
    ) -> Tensor | None:
        """Read the array of a marker like `read_array`, and remove it."""
        return read_array(datatype, shape, self.arrays.pop(marker), max_levels)


def cut_arrays(text: memoryview) -> Cut | None:
    """Cut potentially large arrays out of a document; return None if there are none."""
    nonce = secrets.token_hex(_MARKER_BYTES).encode()
    parts: list[bytes | memoryview] = []
    arrays: dict[bytes, memoryview] = {}
    copied = 0
    for start, end in _without_strings(text):
        array = _array(text, start, end)
        if array is not None:
            marker = b'"%s%d"' % (nonce, len(arrays))
            parts += [text[copied : array.start], marker]
            arrays[marker] = text[array]
            copied = array.stop
    if not arrays:
        return None
    return Cut(b"".join([*parts, text[copied:]]), arrays)


def read_array(
    datatype: Datatype, shape: Shape | None, array: memoryview, max_levels: int
) -> Tensor | None:
    """Build an array from JSON, with the given shape or, if it is None, the shape of the lists.

    Returns None unless it is a regular list of the right number of valid numbers, nested at most
    `max_levels` deep.
    """
    lengths = _nesting(array)
    if lengths is None or len(lengths) > min(max_levels, MAX_DIMENSIONS):
        return None
    own = tuple(reversed(lengths))
    try:
        if shape is not None and element_count(shape) != element_count(own):
            return None
        return _numbers(datatype, own if shape is None else shape, array, flat=len(own) == 1)
    except TensorDataError:
        return None


def _without_strings(text: memoryview) -> list[tuple[int, int]]:
    """Return the bounds of long runs without quotes, after the first quote."""
    found: list[tuple[int, int]] = []
    last = -1
    for start in range(0, len(text), _PIECE_BYTES):
        octets = np.frombuffer(text[start : start + _PIECE_BYTES], dtype=np.uint8)
        quotes = np.flatnonzero(octets == _QUOTE)
        if not len(quotes):
            continue
        first = start + int(quotes[0])
        if last >= 0 and first - last > LARGE_BYTES:
            found.append((last + 1, first))
        between = np.diff(quotes)
        for index in np.flatnonzero(between > LARGE_BYTES):
            found.append((start + int(quotes[index]) + 1, start + int(quotes[index + 1])))
        last = start + int(quotes[-1])
    if last >= 0 and len(text) - last > LARGE_BYTES:
        found.append((last + 1, len(text)))
    return found


def _array(text: memoryview, start: int, end: int) -> slice | None:
    """Return the bounds of the array after a key, or None; the end may be too far."""
    head = _ARRAY.match(bytes(text[start : min(end, start + _HEAD_BYTES)]))
    if head is None:
        return None
    first = start + head.end()
    # Closing brackets after the array are few, and so is the text up to the next key.
    tail_start = max(first, end - _HEAD_BYTES)
    tail = bytes(text[tail_start:end])
    closing = tail.find(b"}")
    tail = tail.rstrip().removesuffix(b",").rstrip() if closing < 0 else tail[:closing].rstrip()
    return slice(first, tail_start + len(tail)) if tail.endswith(b"]") else None


def _nesting(array: memoryview) -> Sequence[int] | None:
    """Return the list lengths of each level, innermost first; None if (1) or (2) is violated."""
    flat = _flat_length(array)
    return _nested_lengths(array) if flat is None else (flat,)


def _flat_length(array: memoryview) -> int | None:
    """Return the number of elements of a flat list, or None for any other."""
    commas = 0
    inner = array[1:-1]
    for start in range(0, len(inner), _PIECE_BYTES):
        octets = np.frombuffer(inner[start : start + _PIECE_BYTES], dtype=np.uint8)
        if (octets == _OPENING).any() or (octets == _CLOSING).any():
            return None
        commas += int(np.count_nonzero(octets == _COMMA))
    return commas + 1


def _nested_lengths(array: memoryview) -> Sequence[int] | None:
    skeleton = bytearray()
    before = b"["
    for start in range(0, len(array), _PIECE_BYTES):
        piece = before + bytes(array[start : start + _PIECE_BYTES])
        octets = np.frombuffer(piece, dtype=np.uint8)
        following = octets[1:][octets[:-1] == _OPENING]
        ahead = octets[:-1][octets[1:] == _CLOSING]
        if not (_BEHIND_OPENING[following].all() and _BEFORE_CLOSING[ahead].all()):
            return None
        skeleton += piece[1:].translate(None, UNSTRUCTURED)
        before = piece[-1:]
    try:
        return list_lengths(bytes(skeleton))
    except TensorDataError:
        return None


def _numbers(datatype: Datatype, shape: Shape, array: memoryview, *, flat: bool) -> Tensor | None:
    """Build an array from a list of numbers in pieces; return None if (3) is violated."""
    numbers = np.empty(element_count(shape), dtype=datatype.dtype)
    inner = array[1:-1]
    start = filled = 0
    while start < len(inner):
        end = _end_of_piece(inner, start)
        text = bytes(inner[start:end])
        elements = read_numbers(datatype, b"[%b]" % (text if flat else text.translate(_TO_BLANKS)))
        if elements is None:
            return None
        piece = from_elements(datatype, (len(elements),), elements)
        numbers[filled : filled + len(elements)] = piece
        start, filled = end + 1, filled + len(elements)
    return from_elements(datatype, shape, numbers) if filled == len(numbers) else None


def _end_of_piece(array: memoryview, start: int) -> int:
    """Return the position of the first comma after a piece, or the end."""
    at = start + _PIECE_BYTES
    while at < len(array):
        comma = bytes(array[at : at + _HEAD_BYTES]).find(b",")
        if comma >= 0:
            return at + comma
        at += _HEAD_BYTES
    return len(array)
