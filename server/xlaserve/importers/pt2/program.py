"""A PyTorch program as plain data: nodes, tensors, inputs and outputs by name."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np


@dataclass(frozen=True, slots=True)
class Read:
    """A reference to a computed value, a tensor or a number, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class MemoryFormat:
    """The memory layout of a tensor, which does not affect results."""

    number: int


@dataclass(frozen=True, slots=True)
class Device:
    """A device argument; it is ignored, as programs run on the device that serves them."""

    name: str


Known: TypeAlias = np.dtype[Any] | bool | int | float | str
"""An argument with a constant value."""

Term: TypeAlias = "Read | MemoryFormat | Device | Graph | Known | tuple[Term, ...] | None"
"""An argument of a node: a constant, or references to values."""

Names: TypeAlias = "str | tuple[Names, ...] | None"
"""The names of one result or of several; None for no result."""


@dataclass(frozen=True, slots=True)
class Described:
    """The dtype and sizes of a tensor that PyTorch recorded."""

    dtype: "np.dtype[Any]"
    sizes: tuple[int | str, ...]
    """Integers, or the text of a symbol or an expression."""


@dataclass(frozen=True, slots=True)
class Node:
    """One call of an operator."""

    target: str
    """Qualified name of the operator, such as `aten.add.Tensor`."""
    arguments: tuple[tuple[str, Term], ...]
    """Arguments by schema name; positional ones have an empty name."""
    results: Names
    name: str

    def __str__(self) -> str:
        """Return the node's description in error messages."""
        return f"node '{self.name}' ({self.target})"


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in topological order."""

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Term, ...]
    tensors: Mapping[str, Described]
    is_single: bool = False
    """Whether the graph returns its single output directly, instead of a list."""

    def reads(self) -> set[str]:
        """Return the names of all values that are read by nodes or returned."""
        terms = [term for node in self.nodes for _, term in node.arguments]
        return set(reads_of([*terms, *self.outputs]))


def reads_of(terms: Iterable[Term]) -> Iterator[str]:
    """Yield the names of the values that arguments refer to, except in subgraphs."""
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
        """Return the tensor's description in error messages."""
        return f"{self.kind} '{self.name}'"


@dataclass(frozen=True, slots=True)
class Program:
    """A whole program without its tensors."""

    graph: Graph
    stored: Mapping[str, Stored]
    """The module's tensors, by name of the graph input."""
    inputs: tuple[str, ...]
    """Graph inputs that the caller passes."""
    outputs: Mapping[str, Term]
    """Outputs by their name in the module's result."""
    ranges: Mapping[str, tuple[int, int | None]]
    """Minimum and maximum size of each symbol, inclusive; None for no maximum."""
    guards: tuple[str, ...]
    """Conditions on input sizes, as Python expressions."""
    torch_version: str
