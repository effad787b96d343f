"""The rows of the table of operators."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Operation: TypeAlias = Callable[..., Any]
"""Called with the arguments of an operator by the names of its schema; returns an array, a number,
or a tuple of them. An argument that it does not have is refused."""

Family: TypeAlias = Mapping[str, Operation]
"""Operators by name, as in `add`, or by name and overload, as in `pow.Scalar`, which goes first."""
