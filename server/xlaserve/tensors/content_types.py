"""Conversions of tensors by MLServer's `content_type`.

    decode(tensor, "str") -> ["cat", "dog"]         encode(["cat", "dog"], "str") -> BYTES[2,1]

Strings, binary values and times are lists with one value per element, in row-major order; they are
encoded as one element per row, as in MLServer.
"""

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np

from xlaserve.tensors import Tensor, TensorDataError, encoded_elements

DATA_FRAME = "pd"
"""Content type of a whole request: each tensor is a column of a `pandas.DataFrame`."""

_SHOWN_CHARACTERS = 40
_OF_ELEMENTS: Sequence[tuple[type, str]] = ((str, "str"), (bytes, "base64"), (datetime, "datetime"))
"""Content types of lists, by the type of their elements."""


@dataclass(frozen=True, slots=True)
class ContentType:
    """The codec of one content type."""

    decode: Callable[[Tensor], object]
    """Decodes a tensor."""
    encode: Callable[[Any], Tensor]
    """Encodes elements as a tensor."""


def decode(tensor: Tensor, content_type: str) -> Any:
    """Decode a tensor according to its content type.

    Raises TensorDataError, which names the expected and the given value.
    """
    return _row(content_type).decode(tensor)


def encode(value: object, content_type: str) -> Tensor:
    """Encode a value as a tensor; the inverse of `decode`. Raises TensorDataError."""
    return _row(content_type).encode(value)


def of_value(value: object) -> str:
    """Return MLServer's default content type for a value.

    The default is `np` for values other than dicts and lists of strings, binary values or times.
    """
    if isinstance(value, dict):
        return "hg_json"
    if isinstance(value, list | tuple):
        for kind, content_type in _OF_ELEMENTS:
            if all(isinstance(element, kind) for element in value):
                return content_type
    return "np"


def decode_all(
    tensors: Mapping[str, Tensor],
    content_types: Mapping[str, str] = MappingProxyType({}),
    of_request: str = "",
) -> Any:
    """Decode a request's tensors by name; returns a DataFrame for `pd`.

    A tensor without a content type uses the request's, or is returned as an array. Raises
    TensorDataError, which names the tensor.
    """
    default = "np" if of_request in ("", DATA_FRAME) else of_request
    found = {}
    for name, tensor in tensors.items():
        try:
            found[name] = decode(tensor, content_types.get(name, default))
        except TensorDataError as error:
            raise TensorDataError(f"'{name}': {error.expected}", error.got) from error
    return data_frame(found) if of_request == DATA_FRAME else found


def encode_all(
    value: Any, content_types: Mapping[str, str] = MappingProxyType({}), of_request: str = ""
) -> dict[str, Tensor]:
    """Encode a mapping or a DataFrame to tensors by name; the inverse of `decode_all`."""
    columns = columns_of(value) if of_request == DATA_FRAME else dict(value)
    default = "np" if of_request in ("", DATA_FRAME) else of_request
    return {
        name: encode(column, content_types.get(name, default)) for name, column in columns.items()
    }


def _row(content_type: str) -> ContentType:
    row = CONTENT_TYPES.get(content_type)
    if row is None:
        got = repr(content_type[:_SHOWN_CHARACTERS])
        raise TensorDataError(f"a content_type of {', '.join(CONTENT_TYPES)}", got)
    return row


# --- BYTES codecs ---


def _each(expected: str, read: Callable[[bytes], object]) -> Callable[[Tensor], list[object]]:
    def decode(tensor: Tensor) -> list[object]:
        return [_one(expected, read, element) for element in _elements(tensor)]

    return decode


def _one(expected: str, read: Callable[[bytes], object], element: bytes) -> object:
    try:
        return read(element)
    except (ValueError, binascii.Error, RecursionError):
        raise TensorDataError(expected, repr(element[:_SHOWN_CHARACTERS])) from None


def _elements(tensor: Tensor) -> list[bytes]:
    if not tensor.dtype.hasobject:
        raise TensorDataError("a tensor of BYTES", str(tensor.dtype))
    return encoded_elements(tensor)


def _rows(expected: str, write: Callable[[Any], bytes]) -> Callable[[Any], Tensor]:
    def encode(values: Any) -> Tensor:
        if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
            raise TensorDataError(f"a list of {expected}", type(values).__name__)
        written = []
        for value in values:
            try:
                written.append(write(value))
            except (TypeError, ValueError, AttributeError):
                raise TensorDataError(expected, type(value).__name__) from None
        return _column(written)

    return encode


def _column(elements: Sequence[bytes]) -> Tensor:
    return np.fromiter(elements, np.object_, len(elements)).reshape(-1, 1)


def _written_text(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return str.encode(value, "utf-8")


def _written_time(value: Any) -> bytes:
    text: str = value if isinstance(value, str) else value.isoformat()
    return text.encode("ascii")


def _read_object(tensor: Tensor) -> object:
    elements = _elements(tensor)
    if len(elements) != 1:
        raise TensorDataError("one element, a document of JSON", f"{len(elements)} elements")
    return _one("a document of JSON", json.loads, elements[0])


def _write_object(value: object) -> Tensor:
    try:
        # A single document without a batch: MLServer's shape is [1].
        return _column([json.dumps(value).encode()]).reshape(-1)
    except (TypeError, ValueError):
        raise TensorDataError("JSON-serializable elements", type(value).__name__) from None


CONTENT_TYPES: Mapping[str, ContentType] = MappingProxyType(
    {
        "np": ContentType(lambda tensor: tensor, np.asarray),
        "str": ContentType(
            _each("a text in UTF-8", lambda element: element.decode()),
            _rows("texts", _written_text),
        ),
        "base64": ContentType(
            _each("base64", lambda element: base64.b64decode(element, validate=True)),
            _rows("binaries", base64.b64encode),
        ),
        "datetime": ContentType(
            _each("an ISO 8601 time", lambda e: datetime.fromisoformat(e.decode("ascii"))),
            _rows("times", _written_time),
        ),
        "hg_json": ContentType(_read_object, _write_object),
    }
)
"""Codecs by content type. `pd` applies to whole requests, so it is not included."""


# --- data frames ---


def data_frame(columns: Mapping[str, object]) -> Any:
    """Return a `pandas.DataFrame` of decoded tensors; raises TensorDataError without pandas."""
    # A column has one value per row; tensors with more dimensions become columns of arrays.
    return _pandas().DataFrame({name: list(column) for name, column in _flat(columns).items()})  # type: ignore[call-overload]


def _flat(columns: Mapping[str, object]) -> dict[str, object]:
    return {
        name: column[:, 0]
        if isinstance(column, np.ndarray) and column.ndim == 2 and column.shape[1] == 1
        else column
        for name, column in columns.items()
    }


def columns_of(frame: Any) -> dict[str, Tensor]:
    """Return a tensor for each column of a `pandas.DataFrame`; raises TensorDataError."""
    if not hasattr(frame, "columns"):
        raise TensorDataError("a pandas.DataFrame", type(frame).__name__)
    found = {}
    for name in frame.columns:
        array = frame[name].to_numpy()
        if array.dtype.hasobject:
            array = np.array([_written_text(value) for value in array], np.object_)
        found[str(name)] = array.reshape(-1, 1)
    return found


def _pandas() -> Any:
    try:
        return import_module("pandas")
    except ImportError:
        raise TensorDataError("pandas, which content_type pd needs", "no pandas") from None
