"""A PyTorch program as plain data: nodes, tensors, inputs and outputs by name."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np


@dataclass(frozen=True, slots=True)
class Read:
    """The value of that name, a tensor or a number that is computed."""

    name: str


@dataclass(frozen=True, slots=True)
class MemoryFormat:
    """The order of a tensor in memory, which changes no number."""

    number: int


@dataclass(frozen=True, slots=True)
class Device:
    """The device of the export; a program runs on whichever device serves it."""

    name: str


Known: TypeAlias = np.dtype[Any] | bool | int | float | str
"""An argument that the export fixed."""

Term: TypeAlias = "Read | MemoryFormat | Device | Graph | Known | tuple[Term, ...] | None"
"""An argument of a node: known, or read from the values."""

Names: TypeAlias = "str | tuple[Names, ...] | None"
"""The names of one result or of several; None for no result."""


@dataclass(frozen=True, slots=True)
class Described:
    """The dtype and the sizes that PyTorch saw a tensor have."""

    dtype: "np.dtype[Any]"
    sizes: tuple[int | str, ...]
    """A text for a symbol or an expression."""


@dataclass(frozen=True, slots=True)
class Node:
    """One call of an operator."""

    target: str
    """Qualified name of the operator, such as `aten.add.Tensor`."""
    arguments: tuple[tuple[str, Term], ...]
    """Arguments with their names in the operator's schema; positional ones have an empty name."""
    results: Names
    name: str

    def __str__(self) -> str:
        """Return what an error calls it."""
        return f"node '{self.name}' ({self.target})"


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in an order in which they can be computed."""

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Term, ...]
    tensors: Mapping[str, Described]
    is_single: bool = False
    """Whether it gives its one output itself, and no list of it."""

    def reads(self) -> set[str]:
        """Return the names of all values that a node reads, or that are outputs."""
        terms = [term for node in self.nodes for _, term in node.arguments]
        return set(reads_of([*terms, *self.outputs]))


def reads_of(terms: Iterable[Term]) -> Iterator[str]:
    """Yield the names of values that arguments read, but for those within graphs."""
    for term in terms:
        if isinstance(term, Read):
            yield term.name
        elif isinstance(term, tuple):
            yield from reads_of(term)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the module: parameter, buffer or constant."""

    kind: str
    name: str

    def __str__(self) -> str:
        """Return what an error calls it."""
        return f"{self.kind} '{self.name}'"


@dataclass(frozen=True, slots=True)
class Program:
    """A whole program without its tensors."""

    graph: Graph
    stored: Mapping[str, Stored]
    """Tensors of the module, by the inputs of the graph that they are."""
    inputs: tuple[str, ...]
    """Inputs of the graph that callers give."""
    outputs: Mapping[str, Term]
    """Outputs of callers, by the names that the module's result gives."""
    ranges: Mapping[str, tuple[int, int | None]]
    """The sizes that symbols may have, both included."""
    guards: tuple[str, ...]
    """Conditions on the sizes of inputs, in Python."""
    torch_version: str
