"""Maps ONNX datatype numbers to numpy dtypes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from xlaserve.errors import InvalidModel

_NAMES = (
    *("UNDEFINED", "FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "STRING", "BOOL"),
    *("FLOAT16", "DOUBLE", "UINT32", "UINT64", "COMPLEX64", "COMPLEX128", "BFLOAT16"),
    *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "UINT4", "INT4"),
    *("FLOAT4E2M1", "FLOAT8E8M0", "UINT2", "INT2"),
)
"""TensorProto.DataType names, by number."""

STRING = _NAMES.index("STRING")

_DTYPES: Mapping[str, "np.dtype[Any]"] = MappingProxyType(
    {
        "FLOAT": np.dtype(np.float32),
        "UINT8": np.dtype(np.uint8),
        "INT8": np.dtype(np.int8),
        "UINT16": np.dtype(np.uint16),
        "INT16": np.dtype(np.int16),
        "INT32": np.dtype(np.int32),
        "INT64": np.dtype(np.int64),
        "BOOL": np.dtype(np.bool_),
        "FLOAT16": np.dtype(np.float16),
        "DOUBLE": np.dtype(np.float64),
        "UINT32": np.dtype(np.uint32),
        "UINT64": np.dtype(np.uint64),
        "BFLOAT16": np.dtype(ml_dtypes.bfloat16),
    }
)
"""Dtypes that the V2 protocol supports, by ONNX name; without text and types below 8 bits."""


_NARROW: Mapping[str, tuple["np.dtype[Any]", "np.dtype[Any]"]] = MappingProxyType(
    {
        name: (np.dtype(narrow), np.dtype(edge))
        for name, narrow, edge in (
            ("FLOAT8E4M3FN", ml_dtypes.float8_e4m3fn, np.float16),
            ("FLOAT8E4M3FNUZ", ml_dtypes.float8_e4m3fnuz, np.float16),
            ("FLOAT8E5M2", ml_dtypes.float8_e5m2, np.float16),
            ("FLOAT8E5M2FNUZ", ml_dtypes.float8_e5m2fnuz, np.float16),
            ("FLOAT4E2M1", ml_dtypes.float4_e2m1fn, np.float16),
            ("FLOAT8E8M0", ml_dtypes.float8_e8m0fnu, np.float32),
            ("UINT4", ml_dtypes.uint4, np.uint8),
            ("INT4", ml_dtypes.int4, np.int8),
            ("UINT2", ml_dtypes.uint2, np.uint8),
            ("INT2", ml_dtypes.int2, np.int8),
        )
    }
)
"""Integers below 8 bits and 8-bit floats, which the V2 protocol lacks; each with the narrowest V2
datatype that holds all its values."""

_EDGES: Mapping["np.dtype[Any]", "np.dtype[Any]"] = MappingProxyType(dict(_NARROW.values()))


def any_dtype_of(number: int) -> "np.dtype[Any]":
    """Return the dtype of an inner value, given its TensorProto.DataType.

    Raises InvalidModel for text and complex numbers.
    """
    name = name_of(number)
    return _NARROW[name][0] if name in _NARROW else dtype_of(number)


def is_narrow(dtype: "np.dtype[Any]") -> bool:
    """Tell whether a dtype has no V2 datatype."""
    return dtype in _EDGES


def edge_of(dtype: "np.dtype[Any]") -> "np.dtype[Any]":
    """Return the dtype that clients use for a dtype; a wider one if it has no V2 datatype."""
    return _EDGES.get(dtype, dtype)


def name_of(number: int) -> str:
    """Return ONNX's name of a TensorProto.DataType, or the number if it is unknown."""
    return _NAMES[number] if 0 <= number < len(_NAMES) else str(number)


def dtype_of(number: int) -> "np.dtype[Any]":
    """Return the dtype of a TensorProto.DataType; raises InvalidModel if unsupported."""
    name = name_of(number)
    if name not in _DTYPES:
        raise InvalidModel(f"datatype {name}: expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
