"""The rows of the table of operators."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Operation: TypeAlias = Callable[..., Any]
"""Implements an operator: called with its arguments by schema name; returns an array, a number, or
a tuple of them. Unknown arguments are refused.
"""

Family: TypeAlias = Mapping[str, Operation]
"""Operators by name, as in `add`, or by name and overload, as in `pow.Scalar`, which goes first."""
