"""The rows of the table of operators."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from xlaserve.importers.onnx.sequences import AnyValue

Operation: TypeAlias = Callable[..., AnyValue | Sequence[AnyValue]]
"""Called as `operation(node, *inputs)`, with None for an input that is left out."""


@dataclass(frozen=True, slots=True)
class Operator:
    """The implementation of one operator."""

    operation: Operation
    static: frozenset[int] = frozenset()
    """The positions of inputs that must be known while the graph is traced: shapes, axes."""
    preferred: frozenset[int] = frozenset()
    """Inputs used as known values of any size, if known."""
    takes_sequences: bool = False
    """Whether it takes sequences and optionals; else it gets tensors only."""


Family: TypeAlias = Mapping[str, Operator]
"""Operators by name."""


def operator(operation: Operation, *static: int) -> Operator:
    """Return a row; `static` are the positions of inputs that must be known."""
    return Operator(operation, frozenset(static))
