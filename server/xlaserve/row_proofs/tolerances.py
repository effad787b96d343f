"""How much two results of the same computation may differ."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from xlaserve.tensors import DATATYPES

TOLERANCES: Mapping[str, float] = MappingProxyType(
    {row.name: row.tolerance for row in DATATYPES.values() if row.tolerance}
)
"""Relative tolerance by datatype; others must be equal. XLA may fuse differently and uses other
kernels for each batch size."""

_NARROW: Sequence[tuple[str, float]] = (
    (r"f[468]E\w+", 0.25),
    (r"u?i8|u?i4|u?i2", 0.1),
    (r"bf16", TOLERANCES["BF16"]),
    (r"f16", TOLERANCES["FP16"]),
    (r"f32", TOLERANCES["FP32"]),
)
"""Patterns of MLIR types, least precise first, with their tolerances. Quantization to 8-bit
integers loses less precision than 8-bit floats."""


def of_module(text: str) -> float:
    """Return the tolerance of the least precise type used in a StableHLO module."""
    for name, tolerance in _NARROW:
        if re.search(rf"(?<![A-Za-z0-9])(?:[0-9?]+x)*(?:{name})>", text):
            return tolerance
    return TOLERANCES["FP64"]
