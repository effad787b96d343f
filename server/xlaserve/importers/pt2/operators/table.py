"""The entry types of the operator table."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Operation: TypeAlias = Callable[..., Any]
"""Implements an operator. It is called with arguments by their schema names, and returns an array,
a number, or a tuple of these. Arguments that it does not have are rejected."""

Family: TypeAlias = Mapping[str, Operation]
"""Operators by name such as `add`, or by name and overload such as `pow.Scalar`, which takes
precedence."""
