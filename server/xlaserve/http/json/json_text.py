"""Checks of unparsed JSON text: strings, nesting depth, and number of elements."""

import re

import numpy as np
import numpy.typing as npt

from xlaserve.errors import InvalidBody
from xlaserve.tensors import Buffer

WHITESPACE = b" \t\r\n"

MOST_MEMBERS = 20_000
"""Maximum members of all objects of a body. Parsers hold the GIL until they finish: half a million
members blocked other requests for seconds. Other limits cover arrays and long strings."""

MOST_ELEMENTS = 300_000
"""Maximum elements of all arrays and objects, for bodies that are parsed into Python objects."""
MOST_ARRAYS = 20_000
"""Maximum number of arrays in a body that is parsed into Python objects: parsing an array takes as
long as parsing about 20 numbers."""

_DATA = re.compile(rb'"(?:d|\\u0064)(?:a|\\u0061)(?:t|\\u0074)(?:a|\\u0061)"')
"""The key `data`, with any of its letters escaped."""
_DATA_MARK = b"\x01"
"""Replaces that key: a byte that cannot occur in JSON."""
_LEVEL_OF_DATA = 3
"""Nesting level of the inputs, the objects in an array of the request that contain `data`."""

_QUOTE = ord('"')
_COLON = ord(":")
_COMMA = ord(",")
_BRACKET = ord("[")
_FILLER = ord("_")
_MARKS = b'[]{}"'
_CHUNK = 1 << 16
"""Bytes processed at a time, so that intermediate results stay in the CPU cache."""

_FEW = 1 << 12

_UNMARKED = bytes(octet for octet in range(256) if octet not in _MARKS)
_NO_MEMBERS = bytes(octet for octet in range(256) if octet not in b'":')
_NO_ELEMENTS = bytes(octet for octet in range(256) if octet not in b'",[')
_NO_TENSORS = bytes(octet for octet in range(256) if octet not in b'",:[]{}' + _DATA_MARK)
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_STEPS.flags.writeable = False


def check_depth(text: Buffer, limit: int) -> None:
    """Raise InvalidBody if arrays and objects nest deeper than the limit (max_json_depth).

    Exact up to the first syntax error of a text, which is as far as a parser gets. Brackets are
    counted first: in most texts they are too few to exceed the limit.
    """
    if count_octets(text, b"[{") > limit and _deepest(bytes(text), limit) > limit:
        raise InvalidBody(f"the JSON is nested more than {limit} levels deep (max_json_depth)")


def check_members(text: Buffer) -> None:
    """Raise InvalidBody if the objects have more than MOST_MEMBERS members in total.

    Exact for valid JSON. Colons are counted first: in most texts they are too few, even including
    those in strings.
    """
    if len(text) <= MOST_MEMBERS or count_octets(text, b":") <= MOST_MEMBERS:
        return
    members = _members(bytes(text))
    if members > MOST_MEMBERS:
        raise InvalidBody(
            f"expected at most {MOST_MEMBERS} members in all JSON objects together, got {members}"
        )


def check_elements(text: Buffer) -> None:
    """Raise InvalidBody if there are more than MOST_ELEMENTS elements or MOST_ARRAYS arrays.

    For text that a parser turns into an object per element while it holds the GIL. The counts are
    exact for valid JSON. As a shortcut, commas and brackets are first counted including those in
    strings: most texts have few enough even so.
    """
    if _may_have_too_many(text):
        _check_counts(_unquoted(bytes(text), _NO_ELEMENTS))


def check_elements_around_data(text: Buffer) -> None:
    """Raise InvalidBody like `check_elements`, but ignore the data of a request's inputs.

    The data are the arrays named `data` of objects in an array of the request (V2 protocol). Their
    reader creates no object per element. The parser skips other arrays at that position.
    """
    if _may_have_too_many(text):
        plain = _unquoted(_DATA.sub(_DATA_MARK, bytes(text)), _NO_TENSORS)
        _check_counts(_without_data(plain))


def _may_have_too_many(text: Buffer) -> bool:
    return len(text) > MOST_ARRAYS and (
        count_octets(text, b",") >= MOST_ELEMENTS or count_octets(text, b"[") > MOST_ARRAYS
    )


def _check_counts(plain: npt.NDArray[np.uint8]) -> None:
    """Check the number of elements and arrays in JSON whose strings were removed."""
    elements = int(np.count_nonzero(plain == _COMMA)) + 1
    arrays = int(np.count_nonzero(plain == _BRACKET))
    for most, what, found in (
        (MOST_ELEMENTS, "elements of all arrays and objects", elements),
        (MOST_ARRAYS, "arrays", arrays),
    ):
        if found > most:
            raise InvalidBody(f"expected at most {most} {what} in the JSON, got {found}")


def _without_data(plain: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the text without the `data` of inputs."""
    steps = _STEPS[plain]
    # 32 bits suffice: texts that nest too deeply were refused before.
    levels = np.cumsum(steps, dtype=np.int32)
    starts = np.flatnonzero((plain == _BRACKET) & (levels == _LEVEL_OF_DATA + 1))
    starts = starts[starts >= 2]
    starts = starts[(plain[starts - 1] == _COLON) & (plain[starts - 2] == ord(_DATA_MARK))]
    # Keep only objects in an array of the request, not those in another object.
    around = np.flatnonzero((steps == 1) & (levels == _LEVEL_OF_DATA - 1))
    last = np.searchsorted(around, starts) - 1
    starts = starts[last >= 0]
    starts = starts[plain[around[last[last >= 0]]] == _BRACKET]
    ends = np.flatnonzero((steps == -1) & (levels == _LEVEL_OF_DATA))
    following = np.searchsorted(ends, starts)
    kept = np.ones(len(plain), dtype=np.bool_)
    for start, index in zip(starts.tolist(), following.tolist(), strict=True):
        kept[start : int(ends[index]) + 1 if index < len(ends) else None] = False
    found: npt.NDArray[np.uint8] = plain[kept]
    return found


def _members(text: bytes) -> int:
    return int(np.count_nonzero(_unquoted(text, _NO_MEMBERS) == _COLON))


def _unquoted(text: bytes, others: bytes) -> npt.NDArray[np.uint8]:
    """Return the bytes outside of strings that are not among `others`, without quotes."""
    marks = np.frombuffer(_marks(_without_escapes(text), others), dtype=np.uint8)
    is_quote = marks == _QUOTE
    found: npt.NDArray[np.uint8] = marks[~(np.logical_xor.accumulate(is_quote) | is_quote)]
    return found


def count_octets(text: Buffer, octets: bytes) -> int:
    """Count the occurrences of several bytes."""
    if len(text) < _FEW:
        copy = bytes(text)
        return sum(map(copy.count, octets))
    counted = 0
    for start in range(0, len(text), _CHUNK):
        chunk = np.frombuffer(text[start : start + _CHUNK], dtype=np.uint8)
        counted += sum(int(np.count_nonzero(chunk == octet)) for octet in octets)
    return counted


def _deepest(text: bytes, enough: int) -> int:
    """Return the maximum depth, or the first one found above `enough`."""
    marks = memoryview(_marks(_without_escapes(text)))
    depth = deepest = 0
    quoted = np.False_
    for start in range(0, len(marks), _CHUNK):
        chunk = np.frombuffer(marks[start : start + _CHUNK], dtype=np.uint8)
        quoting = np.logical_xor.accumulate(chunk == _QUOTE) ^ quoted
        levels = depth + np.cumsum(np.where(quoting, 0, _STEPS[chunk]), dtype=np.int64)
        deepest = max(deepest, int(levels.max()))
        if deepest > enough:
            break
        depth, quoted = int(levels[-1]), quoting[-1]
    return deepest


def _marks(text: bytes, others: bytes = _UNMARKED) -> bytes:
    # In pieces, so that other threads need not wait for the whole text.
    starts = range(0, len(text), _CHUNK)
    return b"".join(text[start : start + _CHUNK].translate(None, others) for start in starts)


def blank_strings(text: bytes) -> bytes:
    """Return the text with all strings, including their quotes, replaced by underscores."""
    if b'"' not in text:
        return text
    octets = np.frombuffer(_without_escapes(text), dtype=np.uint8)
    quotes = octets == _QUOTE
    blank = np.logical_xor.accumulate(quotes) | quotes
    return np.where(blank, np.uint8(_FILLER), octets).tobytes()


def _without_escapes(text: bytes) -> bytes:
    # From the left, so that in `\\"` the backslashes form a pair and the quote is real.
    if b"\\" not in text:
        return text
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
