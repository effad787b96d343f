"""Conversions between the datatypes of Triton and numpy, and the encoding of BYTES tensors."""

from typing import Any

import numpy as np

from xlaserve.tensors import (
    BY_CONFIG_NAME,
    BYTES,
    DATATYPES,
    TensorDataError,
    datatype_of,
    pack_bytes,
    unpack_bytes,
)

_BY_NUMBER = {row.config_number: row.config_name for row in DATATYPES.values()}
_OF_STRINGS = {
    name: np.bool_ if name == "TYPE_BOOL" else row.dtype.type
    for name, row in BY_CONFIG_NAME.items()
}
TRITON_STRING_TO_NUMPY = _OF_STRINGS


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return the numpy dtype for a configuration's datatype such as `TYPE_FP32`."""
    return _OF_STRINGS[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return the numpy dtype for a datatype number, or None if the number is unknown."""
    return _OF_STRINGS.get(_BY_NUMBER.get(data_type, ""))


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the datatype number for a numpy dtype, or None if there is none."""
    if np.dtype(data_type).kind in "SU":
        return BYTES.config_number
    row = datatype_of(data_type)
    return None if row is None else row.config_number


def serialize_byte_tensor(input_tensor: Any) -> Any:
    """Encode a tensor of strings, each preceded by its length.

    As in Triton, an empty tensor gives an empty tuple, and one without strings gives None.
    """
    if not input_tensor.size:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    texts = [e if isinstance(e, bytes) else str(e) for e in input_tensor.ravel().tolist()]
    return bytes(pack_bytes(np.array(texts, np.object_)))


def deserialize_bytes_tensor(encoded_tensor: Any) -> Any:
    """Decode strings into a one-dimensional array; raises ValueError."""
    raw = bytes(encoded_tensor)
    count = position = 0
    while position < len(raw):
        position += 4 + int.from_bytes(raw[position : position + 4], "little")
        count += 1
    try:
        return unpack_bytes((count,), raw)
    except TensorDataError as error:
        raise ValueError(str(error)) from None
