"""Values during tracing that are not plain tensors: sequences, optionals, padded rows.

The lengths of sequences and optionals are known; the number of a Counted's rows is bounded.
"""

from dataclasses import dataclass
from typing import TypeAlias

import jax

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.values import Value

MAX_ITEMS = 4_096
"""Limit on the tensors in a sequence, because a small file could ask for any number."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequenced:
    """A sequence of tensors."""

    items: tuple[Value, ...]

    def __post_init__(self) -> None:
        if len(self.items) > MAX_ITEMS:
            raise InvalidModel(
                f"a sequence has {len(self.items)} tensors, expected at most {MAX_ITEMS}"
            )


@dataclass(frozen=True, slots=True)
class Absent:
    """An optional without an element; one with an element is represented by the element."""


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """A tensor with a data-dependent number of rows (see `counted.py`)."""

    rows: jax.Array
    """The padded tensor; rows beyond the count are padding."""
    count: jax.Array
    """Number of rows, an INT64 scalar."""
    axis: int
    """The axis of the rows."""


AnyValue: TypeAlias = Value | Sequenced | Absent | Counted

NO_TENSORS = (Sequenced, Absent, Counted)
"""Classes of values other than plain tensors."""


def tensor_of(value: AnyValue, subject: str) -> Value:
    """Return the value if it is a tensor; otherwise raise InvalidModel with the subject."""
    if isinstance(value, Sequenced):
        raise InvalidModel(
            f"{subject} is a sequence of {len(value.items)} tensors, expected a tensor"
        )
    if isinstance(value, Absent):
        raise InvalidModel(f"{subject} is an optional without an element")
    if isinstance(value, Counted):
        raise InvalidModel(
            f"{subject} has a data-dependent number of rows and would be used with its padding;"
            " end the graph before it"
        )
    return value
