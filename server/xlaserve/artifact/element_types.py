"""MLIR's name of each dtype of JAX, and the bytes of one element."""

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
"""Names other than abbreviations of the dtypes'."""

_NOTHING = "float0"
"""The dtype of an integer's derivative, without elements."""

_SMALL_FLOAT = re.compile(r"float(\d+)_(\w+)")


def name_of(dtype: str) -> str:
    """Return MLIR's name of a dtype: `f32`, `ui8`, `f8E4M3FN`."""
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
"""Bytes of an element in memory, by MLIR's type name; at least one."""
