"""Tolerances of answers, relative to the largest value and according to the datatype."""

from math import inf, sqrt
from typing import Any

import numpy as np

_ROUNDING = {"float64": 1e-12, "float32": 3e-4, "float16": 1e-3, "bfloat16": 8e-3}
"""Relative error of one matrix product. GPUs multiply FP32 as TF32 by default
(matmul_precision).
"""

_OF_LARGEST = 4
"""Ratio of the largest of many differences to a typical one."""


def allowed(dtype: Any, depth: int = 1) -> float:
    """Return the relative tolerance after `depth` successive products; 0 for integers."""
    name = np.dtype(dtype).name
    return _OF_LARGEST * sqrt(depth) * _ROUNDING.get(name, 0.0)


def far(found: Any, expected: Any) -> float:
    """Return the largest difference relative to the largest expected value.

    Infinities and NaN must be at the same positions on both sides.
    """
    one, other = (np.asarray(each).astype(np.float64) for each in (found, expected))
    if one.shape != other.shape:
        return inf
    is_finite = np.isfinite(other)
    if not np.array_equal(one[~is_finite], other[~is_finite], equal_nan=True):
        return inf
    size = float(np.max(np.abs(other[is_finite]), initial=0.0)) or 1.0
    difference = np.abs(one[is_finite] - other[is_finite])
    worst = float(np.max(difference, initial=0.0)) / size
    return worst if worst == worst else inf  # noqa: PLR0124, not a number


def off(found: Any, expected: Any, depth: int = 1) -> float:
    """Return the difference as a fraction of the tolerance; infinity for integers that differ."""
    at_most = allowed(np.asarray(expected).dtype, depth)
    worst = far(found, expected)
    return worst / at_most if at_most else (inf if worst else 0.0)
