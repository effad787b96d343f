"""The entry types of the operator tables."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from xlaserve.importers.onnx.sequences import AnyValue

Operation: TypeAlias = Callable[..., AnyValue | Sequence[AnyValue]]
"""Called as `operation(node, *inputs)`, with None for an omitted input."""


@dataclass(frozen=True, slots=True)
class Operator:
    """The implementation of one operator."""

    operation: Operation
    static: frozenset[int] = frozenset()
    """Positions of inputs that must be known during tracing, such as shapes and axes."""
    preferred: frozenset[int] = frozenset()
    """Positions of inputs that are passed as host arrays if they are known, regardless of size."""
    takes_sequences: bool = False
    """Whether inputs may be sequences or optionals."""


Family: TypeAlias = Mapping[str, Operator]
"""Operators by name."""


def operator(operation: Operation, *static: int) -> Operator:
    """Return a table entry; `static` are positions of inputs that must be known."""
    return Operator(operation, frozenset(static))
