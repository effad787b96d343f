"""How far apart two results of the same computation may be."""

from collections.abc import Mapping
from types import MappingProxyType

from xlaserve.tensors import DATATYPES

TOLERANCES: Mapping[str, float] = MappingProxyType(
    {row.name: row.tolerance for row in DATATYPES.values() if row.tolerance}
)
"""Keyed by datatype; others are exact. XLA may fuse otherwise, and has kernels for each size."""
