"""The datatypes of ONNX by their numbers, as numpy has them."""

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
"""TensorProto.DataType, by number."""

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
"""Those that a tensor of the V2 protocol can have; text and numbers below 8 bits are not."""


def dtype_of(number: int) -> "np.dtype[Any]":
    """Return the dtype of a TensorProto.DataType; raises InvalidModel for one that is not here."""
    name = _NAMES[number] if 0 <= number < len(_NAMES) else str(number)
    if name not in _DTYPES:
        raise InvalidModel(f"datatype {name}: expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
