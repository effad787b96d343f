"""How far apart two results of the same computation may be."""

from collections.abc import Mapping
from types import MappingProxyType

TOLERANCES: Mapping[str, float] = MappingProxyType(
    {"FP64": 1e-9, "FP32": 1e-4, "FP16": 2e-2, "BF16": 5e-2}
)
"""Keyed by datatype; others are exact. XLA may fuse otherwise, and has kernels for each size."""
