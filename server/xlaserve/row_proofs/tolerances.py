"""How far apart two results of the same computation may be."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from xlaserve.tensors import DATATYPES

TOLERANCES: Mapping[str, float] = MappingProxyType(
    {row.name: row.tolerance for row in DATATYPES.values() if row.tolerance}
)
"""Keyed by datatype; others are exact. XLA may fuse otherwise, and has kernels for each size."""

_NARROW: Sequence[tuple[str, float]] = (
    (r"f[468]E\w+", 0.25),
    (r"u?i8|u?i4|u?i2", 0.1),
    (r"bf16", TOLERANCES["BF16"]),
    (r"f16", TOLERANCES["FP16"]),
    (r"f32", TOLERANCES["FP32"]),
)
"""Types of MLIR, the narrowest first. What is quantized to an integer of eight bits on its way is
rounded to less than a float of as many."""


def of_module(text: str) -> float:
    """Return the tolerance of the narrowest type that a module of StableHLO computes in."""
    for name, tolerance in _NARROW:
        if re.search(rf"(?<![A-Za-z0-9])(?:[0-9?]+x)*(?:{name})>", text):
            return tolerance
    return TOLERANCES["FP64"]
