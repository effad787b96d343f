"""Large arrays of numbers, cut out of a JSON document before it is parsed.

A parser that meets an array of megabytes holds the interpreter's lock until it is through, and the
event loop waits for it. Here the arrays are found by the strings around them, a marker takes the
place of each, and they are read in pieces. This only accepts: `None` says that a document is not
plainly so, and its reader in one piece has the last word.

Why what is accepted is JSON. A marker is a string that nobody can know beforehand. Where an array
was cut out within a string, the marker ends that string, and no document is left. An array
counts only where its marker is the value that is read. Of an array itself it is checked that

1. its brackets and commas alone are nested in a regular way;
2. the octet after `[` and the one before `]` belong to a number or are such a bracket;
3. with blanks for the brackets it is a list of numbers, as many as (1) says.

A list without lists in it needs (3) alone. Else, by (3), there is one number between two commas
that follow each other. By (2) each innermost list begins and ends with a number. So those of an
innermost list are as many as its commas say, and none is left for the places outside of them.
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
"""Minimum distance of two strings for an array to be cut out."""

_PIECE_BYTES = 128 << 10
"""Bytes parsed with the interpreter's lock held: a fifth of a millisecond."""

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
    """A document without its large arrays."""

    document: bytes
    """With a string in place of each."""
    arrays: dict[bytes, memoryview]
    """Keyed by the text of that string, quotes and all; taken out when they are read."""

    def read(
        self, datatype: Datatype, shape: Shape | None, marker: bytes, max_levels: int
    ) -> Tensor | None:
        """Read a marker's array, like `read_array`."""
        return read_array(datatype, shape, self.arrays.pop(marker), max_levels)


def cut_arrays(text: memoryview) -> Cut | None:
    """Cut potentially large arrays out of a document; None if it has none."""
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
    """Build an array of this shape, or of the one that the lists have, from JSON.

    None where it is not plainly a list of this many numbers, that fit, in so few levels of lists.
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
    """Return the start of a long run without quotes after the first quote."""
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
    """Return the bounds of the array after a key, if any; the end may be too far."""
    head = _ARRAY.match(bytes(text[start : min(end, start + _HEAD_BYTES)]))
    if head is None:
        return None
    first = start + head.end()
    # What closes objects and lists around it is short; so is what follows up to the next key.
    tail_start = max(first, end - _HEAD_BYTES)
    tail = bytes(text[tail_start:end])
    closing = tail.find(b"}")
    tail = tail.rstrip().removesuffix(b",").rstrip() if closing < 0 else tail[:closing].rstrip()
    return slice(first, tail_start + len(tail)) if tail.endswith(b"]") else None


def _nesting(array: memoryview) -> Sequence[int] | None:
    """Return how long the lists of each level are; None where (1) or (2) does not hold."""
    flat = _flat_length(array)
    return _nested_lengths(array) if flat is None else (flat,)


def _flat_length(array: memoryview) -> int | None:
    """Return the number of elements of a flat list; None for any other."""
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
        behind = octets[1:][octets[:-1] == _OPENING]
        ahead = octets[:-1][octets[1:] == _CLOSING]
        if not (_BEHIND_OPENING[behind].all() and _BEFORE_CLOSING[ahead].all()):
            return None
        skeleton += piece[1:].translate(None, UNSTRUCTURED)
        before = piece[-1:]
    try:
        return list_lengths(bytes(skeleton))
    except TensorDataError:
        return None


def _numbers(datatype: Datatype, shape: Shape, array: memoryview, *, flat: bool) -> Tensor | None:
    """Build an array from a list of numbers, piece by piece; None where (3) does not hold."""
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
    """Return the first comma after a piece, or the end."""
    at = start + _PIECE_BYTES
    while at < len(array):
        comma = bytes(array[at : at + _HEAD_BYTES]).find(b",")
        if comma >= 0:
            return at + comma
        at += _HEAD_BYTES
    return len(array)
