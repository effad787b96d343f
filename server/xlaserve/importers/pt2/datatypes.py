"""Maps the datatype and layout numbers of torch.export to numpy dtypes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from xlaserve.errors import InvalidModel

_DTYPES: Mapping[int, "np.dtype[Any]"] = MappingProxyType(
    {
        1: np.dtype(np.uint8),
        2: np.dtype(np.int8),
        3: np.dtype(np.int16),
        4: np.dtype(np.int32),
        5: np.dtype(np.int64),
        6: np.dtype(np.float16),
        7: np.dtype(np.float32),
        8: np.dtype(np.float64),
        12: np.dtype(np.bool_),
        13: np.dtype(ml_dtypes.bfloat16),
        28: np.dtype(np.uint16),
        34: np.dtype(np.uint32),
        35: np.dtype(np.uint64),
    }
)
"""Dtypes of the V2 protocol, by torch.export's ScalarType."""

_OTHERS = MappingProxyType(
    {
        9: "complex half",
        10: "complex float",
        11: "complex double",
        29: "float8_e4m3fn",
        30: "float8_e5m2",
        31: "float8_e4m3fnuz",
        32: "float8_e5m2fnuz",
        33: "float8_e8m0fnu",
    }
)

STRIDED = 7
"""The layout of ordinary tensors, which are neither sparse nor MKL-DNN's."""


def dtype_of(number: int) -> "np.dtype[Any]":
    """Return the dtype of a ScalarType; raises InvalidModel if unsupported."""
    found = _DTYPES.get(number)
    if found is None:
        name = _OTHERS.get(number, str(number))
        raise InvalidModel(
            f"datatype {name}: expected one of {', '.join(str(d) for d in _DTYPES.values())}"
        )
    return found
