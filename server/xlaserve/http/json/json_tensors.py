"""Tensor data as JSON: nested or flat lists (V2 protocol, Tensor Data)."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from xlaserve.http.json.json_numbers import read_numbers, write_with_numbers
from xlaserve.http.json.json_text import WHITESPACE, blank_strings, count_octets
from xlaserve.http.json.nesting import irregular, list_lengths
from xlaserve.tensors import (
    BYTES,
    DATATYPES,
    MAX_DIMENSIONS,
    Buffer,
    Datatype,
    Elements,
    Shape,
    Tensor,
    TensorDataError,
    describe,
    element_count,
    from_elements,
)
from xlaserve.tensors.byte_elements import PIECE_ELEMENTS

_READ_BYTES = 1 << 18
_WRITTEN_ELEMENTS = 1 << 14
"""Large tensors are read and written in pieces, so that their Python objects need little memory and
stay in the CPU cache."""

_FIRST_IS_EMPTY = re.compile(rb"[\[\s]*\]")
_NOT_FINITE = re.compile(rb"-?Infinity|NaN")
_QUOTED_NOT_FINITE = re.compile(rb'"(-?Infinity|NaN)"')
_ANY = msgspec.json.Decoder()
_SHORT_BYTES = 1 << 12
_LARGEST = {name: float(np.finfo(DATATYPES[name].dtype).max) for name in ("FP32", "FP64")}
_FLOATS = msgspec.json.Decoder(list[float])
_ENCODER = msgspec.json.Encoder()


# --- Reading -----------------------------------------------------------------------------------


def read_elements(datatype: Datatype, shape: Shape, text: bytes) -> Tensor:
    """Build an array of this shape from a JSON value that is known to be well-formed.

    Lists may be nested in any regular way; only the number of elements must match the shape. It is
    checked before any element is read, so that no more memory is allocated than the shape needs. A
    number with a fraction or an exponent, such as `1.0`, is not an integer, nor is a number a BOOL.
    Raises TensorDataError, with the same texts as for typed contents over gRPC.
    """
    if datatype.contents is None:
        raise TensorDataError(
            f"binary data (binary_data_size), the only encoding of {datatype}", "data in JSON"
        )
    if len(text) <= _SHORT_BYTES and datatype.name in _LARGEST:
        with suppress(msgspec.DecodeError):
            few = few_floats(datatype.name, shape, _FLOATS.decode(text))
            if few is not None:
                return few
    structure = blank_strings(text) if datatype is BYTES else text
    _refuse_others(datatype, structure)
    expected = element_count(shape)
    count = _count(structure, shape)
    if count != expected:
        raise TensorDataError(
            f"{expected} elements for {describe(datatype, shape)}", f"{count} elements"
        )
    if not count:
        return from_elements(datatype, shape, ())
    if datatype is BYTES:
        return from_elements(datatype, shape, _decode(datatype, _strings(text, structure)))
    return _numbers(datatype, shape, text.replace(b"[", b"").replace(b"]", b""))


def list_sizes(datatype: Datatype, text: bytes) -> Shape:
    """Return the lengths of the nested lists of a JSON value, outermost first.

    Raises TensorDataError if lists on the same level differ in length.
    """
    structure = blank_strings(text) if datatype is BYTES else text
    sizes = list_lengths(structure)[::-1]
    if _FIRST_IS_EMPTY.match(structure):
        sizes[-1] = 0
    return tuple(sizes)


def few_floats(datatype: str, shape: Shape, elements: list[float]) -> Tensor | None:
    """Build an array from a few valid numbers; return None for anything else."""
    limit = _LARGEST.get(datatype)
    if limit is None or not elements or len(shape) > MAX_DIMENSIONS:
        return None
    if len(elements) != prod(shape) or (shape and min(shape) < 0):
        return None
    if not -limit <= min(elements) <= max(elements) <= limit:
        return None
    return np.array(elements, DATATYPES[datatype].dtype).reshape(shape)


def _refuse_others(datatype: Datatype, structure: bytes) -> None:
    """Refuse strings among numbers, and objects, whose brackets and commas would be counted."""
    if (at := structure.find(b'"')) >= 0:
        token = _QUOTED_NOT_FINITE.match(structure, at)
        if token is not None and datatype.dtype.kind == "f":
            raise TensorDataError(
                f"finite elements of {datatype} in JSON; send others as binary data"
                " (binary_data_size)",
                token[1].decode(),
            )
        raise TensorDataError(f"elements of {datatype}", "str" if token is None else "float")
    if b"{" in structure:
        raise TensorDataError(f"elements of {datatype}", "dict")


def _count(structure: bytes, shape: Shape) -> int:
    if b"[" not in structure:
        if shape:
            raise TensorDataError("data in a list", "no list")
        return 1
    if _FIRST_IS_EMPTY.match(structure):
        list_lengths(structure)
        if structure.translate(None, b"[]," + WHITESPACE):
            raise irregular()
        return 0
    if structure.find(b"[", structure.index(b"[") + 1) < 0:
        return count_octets(structure, b",") + 1
    return prod(list_lengths(structure))


def _numbers(datatype: Datatype, shape: Shape, text: bytes) -> Tensor:
    """Build an array from comma-separated numbers."""
    if len(text) <= _READ_BYTES:
        return from_elements(datatype, shape, _decode(datatype, text))
    array = np.empty(element_count(shape), dtype=datatype.dtype)
    start = filled = 0
    while start < len(text):
        end = text.find(b",", start + _READ_BYTES)
        end = len(text) if end < 0 else end
        elements = _decode(datatype, text[start:end])
        piece = from_elements(datatype, (len(elements),), elements)
        array[filled : filled + len(elements)] = piece
        start, filled = end + 1, filled + len(elements)
    if filled != len(array):
        # An empty list was at the boundary of two pieces.
        raise irregular()
    return from_elements(datatype, shape, array)


def _strings(text: bytes, structure: bytes) -> bytes:
    """Remove brackets outside of strings."""
    octets = np.frombuffer(structure, dtype=np.uint8)
    kept = (octets != ord("[")) & (octets != ord("]"))
    flat: bytes = np.frombuffer(text, dtype=np.uint8)[kept].tobytes()
    return flat


def _decode(datatype: Datatype, items: bytes) -> Elements:
    text = b"[" + items + b"]"
    numbers = read_numbers(datatype, text)
    if numbers is not None:
        return numbers
    if datatype.dtype.kind == "f":
        # On an error, parse again for the same message with every datatype.
        with suppress(msgspec.DecodeError):
            return np.array(_FLOATS.decode(text), dtype=np.float64)
    return _decode_any(datatype, text)


def _decode_any(datatype: Datatype, text: bytes) -> list[object]:
    try:
        elements: list[object] = _ANY.decode(text)
    except UnicodeDecodeError:
        raise TensorDataError(
            "text in UTF-8; send other bytes as binary data (binary_data_size)",
            "bytes that are not UTF-8",
        ) from None
    except msgspec.ValidationError:
        raise TensorDataError(f"{datatype}", "a number out of range") from None
    except msgspec.DecodeError:
        # The text was well-formed with its brackets, so the cause is an empty list.
        raise irregular() from None
    return elements


def quote_not_finite(text: bytes) -> bytes | None:
    """Turn text with NaN, Infinity or -Infinity outside of strings into valid JSON.

    The first such token becomes a string, so that the tensor's reader refuses it by name; the
    others become zeros. Returns None if there are none.
    """
    structure = blank_strings(text)
    token = _NOT_FINITE.search(structure)
    if token is None:
        return None
    zeros = structure.replace(b"NaN", b"0  ").replace(b"Infinity", b"0       ")
    before, after, written = (
        np.frombuffer(octets, dtype=np.uint8) for octets in (structure, zeros, text)
    )
    finite = np.where(before == after, written, after).tobytes()
    return text[: token.start()] + b'"' + token[0] + b'"' + finite[token.end() :]


# --- Writing -----------------------------------------------------------------------------------


class NotInJson(ValueError):
    """A value that JSON cannot represent; the text names it."""


class NotUtf8(ValueError):
    """Bytes that are not valid UTF-8, and therefore not valid JSON text."""


class JsonRules(NamedTuple):
    """Rules for values that JSON cannot represent; the defaults are Triton's."""

    strict: bool = False
    """Whether to refuse NaN and infinities. Otherwise they are written as NaN, Infinity and
    -Infinity, which Python's json, RapidJSON and Triton's clients read."""
    surrogates: bool = False
    """Whether bytes that are not UTF-8 are written as Python's surrogates (`surrogateescape`).
    Otherwise they are refused: most parsers refuse such text or lose bytes."""


DEFAULT_RULES = JsonRules()


def _most_characters(datatype: Datatype) -> int:
    """Return the maximum number of characters of a number, including a comma."""
    dtype = datatype.dtype
    if dtype.kind == "f":
        # Shortest digits that identify the number, sign, decimal point, and three-digit exponent.
        return np.finfo(dtype).precision + 10
    if dtype.kind == "b":
        return len("false,")
    return len(f"{np.iinfo(dtype).min or np.iinfo(dtype).max},")


MOST_CHARACTERS: Mapping[str, int] = MappingProxyType(
    {
        name: _most_characters(row)
        for name, row in DATATYPES.items()
        if row.contents is not None and row is not BYTES
    }
)
"""Maximum characters of a number in JSON, for each datatype that JSON can represent."""
QUOTED_CHARACTERS = len('"",')
ESCAPED_CHARACTERS = len("\\u0000")
"""Maximum number of characters for one escaped byte."""
_ESCAPED = bytes((*range(0x20), *b'"\\'))
_ESCAPED_BY_PYTHON = _ESCAPED + bytes(range(0x80, 0x100))
"""Bytes that Python's json escapes: with surrogates, it writes ASCII."""


def escaped_octets(array: Tensor, rules: JsonRules) -> int:
    """Return how many bytes of the texts may take more than one byte in JSON."""
    escaped = _ESCAPED_BY_PYTHON if rules.surrogates else _ESCAPED
    flat, count = array.reshape(-1), 0
    # In pieces: converting the whole array to a list would hold the GIL too long.
    for start in range(0, len(flat), PIECE_ELEMENTS):
        for element in flat[start : start + PIECE_ELEMENTS].tolist():
            text = _octets(element)
            count += len(text) - len(text.translate(None, escaped))
    return count


def _octets(element: str | bytes) -> bytes:
    return element.encode(errors="surrogatepass") if isinstance(element, str) else bytes(element)


def write_elements(
    datatype: Datatype, tensor: Tensor, rules: JsonRules = DEFAULT_RULES
) -> list[Buffer]:
    """Serialize the elements as one flat JSON list, in row-major order and in parts.

    Numbers round-trip. Raises NotInJson and NotUtf8 for values that the rules forbid, and
    TensorDataError for FP16 and BF16, which have no JSON form, as they have no typed contents in
    gRPC.
    """
    if datatype.contents is None:
        expected = f"a request for binary_data, the only encoding of {datatype}"
        raise TensorDataError(expected, "no binary_data")
    write = partial(_write, datatype, rules)
    flat = tensor.ravel()
    if len(flat) <= _WRITTEN_ELEMENTS:
        return [write(flat)]
    starts = range(0, len(flat), _WRITTEN_ELEMENTS)
    pieces = [write(flat[start : start + _WRITTEN_ELEMENTS]) for start in starts]
    for piece in pieces[:-1]:
        piece[-1:] = b","
    return [pieces[0], *(memoryview(piece)[1:] for piece in pieces[1:])]


def _write(datatype: Datatype, rules: JsonRules, piece: Tensor) -> bytearray:
    if datatype is BYTES:
        return _write_texts(rules, piece)
    written = bytearray(write_with_numbers(piece))
    if datatype.dtype.kind == "f" and b"null" in written:
        if rules.strict:
            raise NotInJson("NaN or Infinity")
        return _with_not_finite(written, piece)
    return written


def _with_not_finite(written: bytearray, piece: Tensor) -> bytearray:
    """Replace each null by Python's literal for NaN or infinity.

    Other numbers keep the digits of their datatype, which are fewer than Python's.
    """
    odd = piece[~np.isfinite(piece)].tolist()
    before, *rest = written.split(b"null")
    literals = (write_as_python(one) for one in odd)
    return before + b"".join(chain.from_iterable(zip(literals, rest, strict=True)))


def _write_texts(rules: JsonRules, piece: Tensor) -> bytearray:
    written = bytearray()
    try:
        _ENCODER.encode_into(list(map(_text, piece)), written)
    except UnicodeError:
        if not rules.surrogates:
            raise NotUtf8 from None
        return bytearray(write_as_python([escaped_text(element) for element in piece]))
    return written


def write_as_python(value: object) -> bytes:
    """Serialize with the JSON extensions of Python's json: NaN and infinities."""
    return json.dumps(value, separators=(",", ":")).encode()


def _text(element: str | bytes) -> str:
    return element if isinstance(element, str) else bytes(element).decode()


def text_of(element: str | bytes) -> str:
    """Return an element as text; raises UnicodeError if it is not valid Unicode."""
    if isinstance(element, str):
        element.encode()
        return element
    return bytes(element).decode()


def escaped_text(element: str | bytes) -> str:
    """Return text with a surrogate for each byte that is not UTF-8."""
    return element if isinstance(element, str) else bytes(element).decode(errors="surrogateescape")
