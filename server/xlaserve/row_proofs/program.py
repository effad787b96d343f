"""Reads a computation at two batch sizes as one program with symbolic sizes.

Rules use this representation instead of MLIR.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from jax.extend.mlir import ir

from xlaserve.row_proofs import sizes
from xlaserve.row_proofs.findings import NoRule, Unfollowed
from xlaserve.row_proofs.sizes import Size, static

MAX_OPERATIONS = 100_000
MAX_DEPTH = 24
"""Maximum nesting depth of regions."""
MAX_VALUES_OF_ONE = 4_096
"""Maximum number of operands or results of one operation."""

Shape: TypeAlias = tuple[Size, ...]

_PLACE = re.compile(r'"((?:[^"\\]|\\.)+)":(\d+):\d+')
_HERE = str(Path(sys._getframe().f_code.co_filename).parent)
"""The folder of this package in the locations of programs; `__file__` may be in an archive."""
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


class Mismatch(Exception):
    """The computation differs in structure between the two batch sizes."""


class Tensor(NamedTuple):
    """Shape and element type of a value."""

    shape: Shape
    dtype: str
    """The name in MLIR, such as `f32` or `i1`."""


class Pair(NamedTuple):
    """The values of an attribute at the two batch sizes, if they differ."""

    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Region:
    """A block of operations with its own arguments."""

    arguments: tuple[int, ...]
    operations: tuple[Operation, ...]
    returned: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. Values are identified by numbers."""

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    types: tuple[Tensor, ...]
    """Types of the results."""
    operand_types: tuple[Tensor, ...]
    attributes: Mapping[str, Any]
    """MLIR attributes; a Pair if they differ between the batch sizes."""
    regions: tuple[Region, ...]
    rows: tuple[int, int]
    source: Any
    """The MLIR operation at the first batch size."""

    def sizes(self, name: str) -> Shape | None:
        """Return an integer attribute as sizes; None if it is missing."""
        found = self.attributes.get(name)
        if found is None:
            return None
        if not isinstance(found, Pair):
            return tuple(static(int(size)) for size in integers(found))
        first, second = integers(found.first), integers(found.second)
        fits = [sizes.fitted(*both, self.rows) for both in zip(first, second, strict=True)]
        if None in fits:
            raise NoRule("uses the batch size in a way that could not be analysed")
        return tuple(fit for fit in fits if fit is not None)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return an integer attribute independent of the batch size; () if it is missing."""
        return tuple(size.fixed for size in self.sizes(name) or ())

    def integer(self, name: str) -> int:
        """Return an attribute that is a single integer."""
        (found,) = self.integers(name)
        return found

    def text(self, name: str) -> str:
        """Return an attribute in MLIR's text form."""
        found = self.attributes.get(name, "")
        if isinstance(found, Pair):
            raise NoRule("uses the batch size in an unsupported way")
        return str(found)

    def location(self) -> str:
        """Return the author's source line as `file.py:12`; empty if it is unknown."""
        return author_line(str(self.source.location))


@dataclass(frozen=True, slots=True)
class Program:
    """The served function, from parameters and inputs to outputs."""

    body: Region
    types: Mapping[int, Tensor]
    """Types of the function's arguments."""
    operations: int
    modules: tuple[Any, Any]
    """Keeps the MLIR modules alive, because `Operation.source` refers to them."""


def integers(attribute: Any) -> list[int]:
    """Return the integers of an attribute of any kind."""
    if isinstance(attribute, ir.IntegerAttr):
        return [attribute.value]
    if isinstance(attribute, ir.DenseIntElementsAttr) and attribute.is_splat:
        # Iterating over a splat yields only one element.
        whole: Any = attribute
        number = int(ir.IntegerAttr(attribute.get_splat_value()).value)
        return [number] * math.prod(whole.type.shape)
    return [int(one) for one in attribute]


def author_line(location: str) -> str:
    """Return the innermost source line in a location that is outside installed packages."""
    innermost = ""
    for path, line in _PLACE.findall(location):
        if path.startswith(_HERE):
            # The next frames are callers of the analysis, not of the model.
            break
        place = f"{Path(path).name}:{line}"
        if not _INSTALLED.search(path):
            return place
        innermost = innermost or place
    return innermost


def read(first: Any, second: Any, rows: tuple[int, int]) -> Program:
    """Read a computation from its modules at two batch sizes; raises Mismatch or Unfollowed."""
    return _Reader(rows).program(first, second)


class _Reader:
    def __init__(self, rows: tuple[int, int]) -> None:
        self._rows = rows
        self._numbers: dict[Any, int] = {}
        self._partners: dict[Any, Any] = {}
        self._types: dict[tuple[Any, Any], Tensor] = {}
        self._of_value: dict[int, Tensor] = {}
        self._count = 0

    def program(self, first: Any, second: Any) -> Program:
        mains = [_main(module) for module in (first, second)]
        body = self._region(mains[0].regions[0], mains[1].regions[0], 0)
        types = {number: self._of_value[number] for number in body.arguments}
        return Program(body, types, self._count, (first, second))

    def _region(self, first: Any, second: Any, depth: int) -> Region:
        if depth > MAX_DEPTH:
            raise Unfollowed("has regions nested too deeply")
        if len(first.blocks) != 1 or len(second.blocks) != 1:
            raise Unfollowed("has a region with several blocks")
        block, other = first.blocks[0], second.blocks[0]
        arguments = self._values(block.arguments, other.arguments)
        operations = []
        left, right = list(block.operations), list(other.operations)
        if len(left) != len(right) or not left:
            raise Mismatch
        for one, two in zip(left[:-1], right[:-1], strict=True):
            operations.append(self._operation(one.operation, two.operation, depth))
        end, other_end = left[-1].operation, right[-1].operation
        if end.name not in _ENDS or other_end.name != end.name:
            raise Unfollowed("has a block with an unexpected terminator")
        return Region(arguments, tuple(operations), self._operands(end, other_end)[0])

    def _operation(self, first: Any, second: Any, depth: int) -> Operation:
        self._count += 1
        if self._count > MAX_OPERATIONS:
            raise Unfollowed(f"has more than {MAX_OPERATIONS} operations")
        if first.name != second.name or len(first.regions) != len(second.regions):
            raise Mismatch
        operands, operand_types = self._operands(first, second)
        regions = tuple(
            self._region(one, two, depth + 1)
            for one, two in zip(first.regions, second.regions, strict=True)
        )
        results = self._values(first.results, second.results)
        return Operation(
            first.name,
            operands,
            results,
            tuple(self._of_value[number] for number in results),
            operand_types,
            _attributes(first, second),
            regions,
            self._rows,
            first,
        )

    def _operands(self, first: Any, second: Any) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
        left, right = list(first.operands), list(second.operands)
        if len(left) != len(right):
            raise Mismatch
        for one, two in zip(left, right, strict=True):
            if self._partners.get(one) != two:
                raise Mismatch
        numbers = tuple(self._numbers[one] for one in left)
        return numbers, tuple(self._of_value[number] for number in numbers)

    def _values(self, first: Any, second: Any) -> tuple[int, ...]:
        left, right = list(first), list(second)
        if len(left) != len(right):
            raise Mismatch
        if len(left) > MAX_VALUES_OF_ONE:
            raise Unfollowed("has an operation with too many values")
        for one, two in zip(left, right, strict=True):
            number = self._numbers[one] = len(self._numbers)
            self._partners[one] = two
            self._of_value[number] = self._type(one.type, two.type)
        return tuple(self._numbers[one] for one in left)

    def _type(self, first: Any, second: Any) -> Tensor:
        found = self._types.get((first, second))
        if found is None:
            found = self._types[first, second] = self._tensor(first, second)
        return found

    def _tensor(self, first: Any, second: Any) -> Tensor:
        if not isinstance(first, ir.RankedTensorType) or not isinstance(
            second, ir.RankedTensorType
        ):
            return Tensor((), str(first))
        if not first.has_static_shape or not second.has_static_shape:
            raise Unfollowed("has shapes that remain dynamic for a fixed batch size")
        left, right = first.shape, second.shape
        dtype = str(first.element_type)
        if len(left) != len(right) or dtype != str(second.element_type):
            raise Mismatch
        fits = [sizes.fitted(*both, self._rows) for both in zip(left, right, strict=True)]
        if None in fits:
            raise Unfollowed("has a dimension that is not a constant multiple of the batch size")
        return Tensor(tuple(fit for fit in fits if fit is not None), dtype)


_ENDS = frozenset({"stablehlo.return", "func.return"})


def _main(module: Any) -> Any:
    functions = [one.operation for one in module.body.operations]
    if len(functions) != 1 or functions[0].name != "func.func":
        raise Unfollowed("has functions that are not inlined")
    return functions[0]


_SIZED = frozenset(
    {
        "start_indices",
        "limit_indices",
        "strides",
        "edge_padding_low",
        "edge_padding_high",
        "interior_padding",
        "slice_sizes",
        "feature_group_count",
        "batch_group_count",
        "window_dimensions",
        "window_strides",
        "padding",
        "fft_length",
        "k",
        "value",
    }
)
"""Attributes that may differ between the batch sizes, because rules read them as sizes."""


def _attributes(first: Any, second: Any) -> dict[str, Any]:
    left = {key: attribute(first, key) for key in _names(first)}
    names = _names(second)
    if len(names) != len(left):
        raise Mismatch
    for key in names:
        one, two = left.get(key), attribute(second, key)
        if one == two:
            continue
        if one is None:
            raise Mismatch
        if key not in _SIZED:
            if str(one) == str(two):
                continue
            raise Mismatch
        left[key] = Pair(one, two)
    return left


def attribute(operation: Any, key: str) -> Any:
    """Return an attribute of an MLIR operation, or the operation's text if it cannot be read."""
    try:
        return operation.attributes[key]
    except TypeError:
        # The Python bindings have no class for complex constants.
        return operation.get_asm(use_local_scope=True)


def _names(operation: Any) -> list[str]:
    return [getattr(one, "name", one) for one in operation.attributes]
