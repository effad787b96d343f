"""Values that are no plain tensors while a graph is traced.

The lengths of sequences and optionals are known; the rows of a counted tensor have a bound.
"""

from dataclasses import dataclass
from typing import TypeAlias

import jax

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.values import Value

MAX_ITEMS = 4_096
"""Most tensors of a sequence: a small file could ask for any number."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequenced:
    """A sequence of tensors."""

    items: tuple[Value, ...]

    def __post_init__(self) -> None:
        if len(self.items) > MAX_ITEMS:
            raise InvalidModel(f"a sequence has {len(self.items)} tensors, at most {MAX_ITEMS} may")


@dataclass(frozen=True, slots=True)
class Absent:
    """An optional without an element. One that has an element is that element."""


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """A tensor whose number of rows depends on the data (`counted.py`)."""

    rows: jax.Array
    """Static capacity; rows beyond the count are padding."""
    count: jax.Array
    """INT64 without dimensions."""
    axis: int
    """The dimension that the rows are counted along."""


AnyValue: TypeAlias = Value | Sequenced | Absent | Counted

NO_TENSORS = (Sequenced, Absent, Counted)
"""Classes of values other than plain tensors."""


def tensor_of(value: AnyValue, subject: str) -> Value:
    """Return a tensor; raises InvalidModel, naming the subject, for another value."""
    if isinstance(value, Sequenced):
        raise InvalidModel(f"{subject} is a sequence of {len(value.items)} tensors, no tensor")
    if isinstance(value, Absent):
        raise InvalidModel(f"{subject} is an optional without an element")
    if isinstance(value, Counted):
        raise InvalidModel(
            f"{subject} has a number of rows that depends on the data, and would be taken with its "
            "padding; end the graph before it"
        )
    return value
