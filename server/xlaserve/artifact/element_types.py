"""Maps JAX dtypes to MLIR type names and element sizes."""

import re
from collections.abc import Mapping
from types import MappingProxyType

import ml_dtypes
import numpy as np

from xlaserve.artifact.wrapper import DTYPES

_NAMES = MappingProxyType(
    {
        "bool": "i1",
        "bfloat16": "bf16",
        "complex64": "complex<f32>",
        "complex128": "complex<f64>",
    }
)
"""MLIR names that do not follow from the dtype's name."""

_NOTHING = "float0"
"""The dtype of a derivative with respect to an integer; its elements have no size."""

_SMALL_FLOAT = re.compile(r"float(\d+)_(\w+)")


def name_of(dtype: str) -> str:
    """Return the MLIR name of a dtype: `f32`, `ui8`, `f8E4M3FN`."""
    if dtype in _NAMES:
        return _NAMES[dtype]
    if small := _SMALL_FLOAT.fullmatch(dtype):
        return f"f{small[1]}{small[2].upper()}"
    return dtype.replace("uint", "ui").replace("int", "i").replace("float", "f")


ITEMSIZES: Mapping[str, int] = MappingProxyType(
    {
        name_of(one): np.dtype(getattr(ml_dtypes, one, one)).itemsize
        for one in DTYPES
        if one != _NOTHING
    }
)
"""Size of an element in memory in bytes, by MLIR type name; at least one."""
