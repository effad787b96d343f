"""Checks that arithmetic on the batch size gives the same result at every size.

The analysis sees a computation at two batch sizes. They represent all others if every number
derived from the batch size is `k * b + c`, which two values determine, and every comparison has the
same result at all sizes. `max(b - 40, 0)` or `b // 4` would go unnoticed. The input here is the
module before refinement, which would fold such arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from xlaserve.row_proofs.constants import MAX_ELEMENTS, Constant, folded
from xlaserve.row_proofs.findings import Finding, Unfollowed
from xlaserve.row_proofs.program import attribute, author_line
from xlaserve.row_proofs.rules import elementwise
from xlaserve.row_proofs.rules.constant import literal
from xlaserve.row_proofs.sizes import BATCH, Size, static

MAX_STEPS = 400_000
"""Maximum number of operations examined; functions count once per call."""
MAX_CALLS = 48
"""Maximum nesting depth of calls and regions."""


class _Data:
    """A value that depends on data, so that refinement cannot fold it."""


class _Opaque:
    """An unknown constant, independent of the batch size."""


class _Measured:
    """The size of a computed value, or a shape that contains such a size.

    It is not known to be `k * b + c`, and may only be used to make constants of that shape.
    """


class _Like:
    """A constant with the shape of a computed value.

    It may only be combined elementwise with data of that shape; anything unknown about the shape is
    then unknown about the data, too.
    """


class _Spread:
    """Unequal sizes broadcast to a dynamic shape: the bounds of index vectors.

    Each is still `k * b + c`, and may only be combined with data.
    """


_DATA, _OPAQUE, _MEASURED, _LIKE, _SPREAD = _Data(), _Opaque(), _Measured(), _Like(), _Spread()

_SHAPES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "stablehlo.dynamic_broadcast_in_dim": (1,),
        "stablehlo.dynamic_reshape": (1,),
        "stablehlo.dynamic_iota": (0,),
        "stablehlo.real_dynamic_slice": (1, 2, 3),
        "stablehlo.dynamic_pad": (2, 3, 4),
        "stablehlo.dynamic_gather": (2,),
        "stablehlo.dynamic_conv": (2,),
    }
)
"""Positions of operands that are shapes or bounds. The analysis sees the resulting shapes."""

_OF_SHAPES = frozenset({"stablehlo.reshape", "stablehlo.concatenate", "stablehlo.convert"})
"""Operations that assemble a shape from sizes."""

_UNMOVED = frozenset({"stablehlo.optimization_barrier"})


def question(module: Any, batched: Collection[int], output: int | None = None) -> Finding | None:
    """Return the first operation whose result two batch sizes do not determine, or None.

    The batch is the first dimension of the arguments at the positions in `batched`. With `output`,
    only the operations that contribute to this output count. Raises Unfollowed if the answer is
    unknown.
    """
    return _Scan(module, output).run(batched)


class _Scan:
    def __init__(self, module: Any, output: int | None) -> None:
        self._functions = {
            ir.StringAttr(one.operation.attributes["sym_name"]).value: one.operation
            for one in module.body.operations
            if one.operation.name == "func.func"
        }
        self._steps = 0
        self._found: Finding | None = None
        self._sizes: dict[Any, tuple[Size | None, ...]] = {}
        self._output = output
        self._is_used = True
        """Whether the current operation contributes to the selected output."""

    def run(self, batched: Collection[int]) -> Finding | None:
        main = self._functions["main"].regions[0].blocks[0]
        for place, argument in enumerate(main.arguments):
            shape = self._shape(argument)
            self._sizes[argument] = (BATCH, *shape[1:]) if place in batched else shape
        wanted = None if self._output is None else frozenset({self._output})
        self._block(main, [_DATA] * len(main.arguments), {}, 0, wanted)
        return self._found

    @staticmethod
    def _shape(value: Any) -> tuple[Size | None, ...]:
        kind = value.type
        if not isinstance(kind, ir.RankedTensorType):
            return ()
        return tuple(
            None if kind.is_dynamic_dim(axis) else static(kind.shape[axis])
            for axis in range(kind.rank)
        )

    def _block(
        self,
        block: Any,
        arguments: Sequence[Any],
        known: dict[Any, Any],
        depth: int,
        wanted: frozenset[int] | None = None,
    ) -> Any:
        """Examine the operations of a block; only its results in `wanted`, or all, are used."""
        if depth > MAX_CALLS:
            raise Unfollowed("has functions nested too deeply")
        known.update(zip(block.arguments, arguments, strict=True))
        returned: list[Any] = []
        used, before = _used(block, wanted), self._is_used
        for each in block.operations:
            operation = each.operation
            self._is_used = before and (used is None or _is_used(operation, used))
            self._steps += 1
            if self._steps > MAX_STEPS:
                raise Unfollowed(f"takes more than {MAX_STEPS} operations")
            operands = [known[one] for one in operation.operands]
            if operation.name in {"stablehlo.return", "func.return"}:
                returned = operands
                for number, one in enumerate(operation.operands):
                    self._sizes["returned", number] = self._sizes_of(one)
                break
            results = self._step(operation, operands, known, depth, used)
            known.update(zip(operation.results, results, strict=True))
        self._is_used = before
        return returned

    def _step(
        self,
        operation: Any,
        operands: list[Any],
        known: dict[Any, Any],
        depth: int,
        used: Collection[Any] | None,
    ) -> Sequence[Any]:
        name = operation.name
        if name == "func.call" or operation.regions:
            return self._nested(operation, operands, known, depth, used)
        if name == "stablehlo.constant":
            return [_literal(operation)]
        if name == "stablehlo.get_dimension_size":
            return [self._dimension(operation)]
        self._pass_sizes(operation)
        return operands if name in _UNMOVED else self._flat(operation, operands)

    def _flat(self, operation: Any, operands: list[Any]) -> Sequence[Any]:
        name = operation.name
        if _is_assertion(operation):
            return []
        spared = _SHAPES.get(name, ())
        if any(_is_of_computed(operands[number]) for number in spared):
            is_constant = operands[0] is _OPAQUE or (
                isinstance(operands[0], Constant) and operands[0].is_static
            )
            if name != "stablehlo.dynamic_broadcast_in_dim" or not is_constant:
                raise Unfollowed("depends on the value of a computed size")
            return [_LIKE]
        data = [one for number, one in enumerate(operands) if number not in spared]
        if name == "stablehlo.dynamic_slice" and _is_size(data[0]):
            # A slice of the whole operand is folded even if its start depends on data.
            data = data[:1]
        return self._computed(operation, data)

    def _computed(self, operation: Any, operands: list[Any]) -> Sequence[Any]:
        count = len(operation.results)
        if not operands:
            # Random numbers and counts (iota) are not constants: treat them as data.
            return [_DATA] * count
        if any(map(_is_of_computed, operands)):
            return [self._like(operation, operands)]
        if any(one is _DATA for one in operands):
            return [_DATA] * count
        return self._of_constants(operation, operands)

    def _of_constants(self, operation: Any, operands: list[Any]) -> Sequence[Any]:
        count = len(operation.results)
        if count == 1 and all(isinstance(one, Constant) for one in operands):
            found = _result(operation, operands)
            if found is not None:
                return [found]
        if not any(map(_is_size, operands)):
            return [_OPAQUE] * count
        if operation.name == "stablehlo.dynamic_broadcast_in_dim":
            return [_SPREAD]
        self._note(operation)
        return [_DATA] * count

    @staticmethod
    def _like(operation: Any, operands: list[Any]) -> Any:
        if any(one is _MEASURED for one in operands):
            others = any(one is _DATA or one is _LIKE for one in operands)
            if operation.name not in _OF_SHAPES or others:
                raise Unfollowed("depends on the value of a computed size")
            return _MEASURED
        if not _is_elementwise(operation) or any(map(_is_size, operands)):
            raise Unfollowed("depends on the value of a computed size")
        return _DATA if any(one is _DATA for one in operands) else _LIKE

    def _nested(
        self,
        operation: Any,
        operands: list[Any],
        known: dict[Any, Any],
        depth: int,
        used: Collection[Any] | None,
    ) -> Sequence[Any]:
        name = operation.name
        if name == "func.call":
            callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
            block = self._functions[callee].regions[0].blocks[0]
            for argument, operand in zip(block.arguments, operation.operands, strict=True):
                self._sizes[argument] = self._sizes_of(operand)
            wanted = None
            if used is not None:
                results = enumerate(operation.results)
                wanted = frozenset(number for number, one in results if one in used)
            returned = self._block(block, operands, {}, depth + 1, wanted)
            for number, result in enumerate(operation.results):
                self._sizes[result] = self._sizes.get(("returned", number), ())
            return list(returned)
        if any(map(_is_of_computed, operands)):
            raise Unfollowed("depends on the value of a computed size")
        branches = list(operation.regions)
        if name in {"stablehlo.case", "stablehlo.if"}:
            branches = self._branches(operation, operands, branches)
        found = [
            self._block(
                region.blocks[0], [_DATA] * len(region.blocks[0].arguments), known, depth + 1
            )
            for region in branches
            if len(region.blocks)
        ]
        if any(_is_of_computed(one) for returned in found for one in returned):
            raise Unfollowed("depends on the value of a computed size")
        is_one = name in {"stablehlo.case", "stablehlo.if"} and len(found) == 1
        return found[0] if is_one else [_DATA] * len(operation.results)

    def _branches(self, operation: Any, operands: list[Any], branches: list[Any]) -> list[Any]:
        index = operands[0]
        if isinstance(index, Constant):
            taken = index.item()
            if taken is None:
                self._note(operation)
                return branches
            if operation.name == "stablehlo.if":
                taken = 0 if taken else 1
            return [branches[taken if 0 <= taken < len(branches) else -1]]
        return branches

    def _dimension(self, operation: Any) -> Any:
        axis = ir.IntegerAttr(operation.attributes["dimension"]).value
        size = (self._sizes_of(operation.operands[0]) + (None,) * (axis + 1))[axis]
        if size is None:
            return _MEASURED
        return Constant(size.offset, size.per_row)

    def _sizes_of(self, value: Any) -> tuple[Size | None, ...]:
        found = self._sizes.get(value)
        return self._shape(value) if found is None else found

    def _pass_sizes(self, operation: Any) -> None:
        """Remember the sizes of a value that is cast to a dynamic shape before a call."""
        if operation.name in {"stablehlo.convert", "tensor.cast"}:
            self._sizes[operation.results[0]] = self._sizes_of(operation.operands[0])

    def _note(self, operation: Any) -> None:
        if self._found is None and self._is_used:
            self._found = Finding(
                False,
                operation.name,
                "derives a value from the batch size that two sample sizes cannot represent",
                author_line(str(operation.location)),
            )


def _used(block: Any, wanted: frozenset[int] | None) -> set[Any] | None:
    """Return the values that contribute to the wanted results of a block; None means all."""
    if wanted is None:
        return None
    operations = [each.operation for each in block.operations]
    used: set[Any] = set()
    for operation in reversed(operations):
        if operation.name in {"stablehlo.return", "func.return"}:
            used.update(one for n, one in enumerate(operation.operands) if n in wanted)
        elif _is_used(operation, used):
            used.update(_taken_by(operation))
    return used


def _is_used(operation: Any, used: Collection[Any]) -> bool:
    return any(one in used for one in operation.results)


def _taken_by(operation: Any) -> list[Any]:
    """Return an operation's operands, including values that its regions capture."""
    taken = list(operation.operands)
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                taken.extend(_taken_by(inner.operation))
    return taken


def _is_elementwise(operation: Any) -> bool:
    if operation.name == "stablehlo.bitcast_convert":
        # A bitcast to another width adds or removes a dimension.
        kinds = [one.type for one in (*operation.operands, *operation.results)]
        return bool(kinds[0].rank == kinds[1].rank)
    return operation.name in elementwise.NAMES


def _is_of_computed(value: Any) -> bool:
    return value is _MEASURED or value is _LIKE


def _is_size(value: Any) -> bool:
    return value is _SPREAD or (isinstance(value, Constant) and not value.is_static)


def _is_assertion(operation: Any) -> bool:
    return operation.name == "stablehlo.custom_call" and not len(operation.results)


def _literal(operation: Any) -> Any:
    found = literal(attribute(operation, "value"))
    return _OPAQUE if found is None else Constant(found)


def _result(operation: Any, operands: list[Constant]) -> Constant | None:
    """Evaluate an operation on known integers; None if there is no rule."""
    name = operation.name
    rule = _MOVED.get(name)
    if rule is not None:
        return rule(operation, *operands)
    kind = operation.results[0].type
    direction = ""
    if name == "stablehlo.compare":
        text = str(operation.attributes["comparison_direction"])
        direction = text.rsplit(maxsplit=1)[-1].rstrip(">")
    return folded(name, str(kind.element_type), operands, direction)


def _broadcast(operation: Any, operand: Constant, *_: Constant) -> Constant | None:
    if operand.is_splat or operand.fixed.size == 1:
        return operand
    kind = operation.results[0].type
    if not kind.has_static_shape or np.prod(tuple(kind.shape)) > MAX_ELEMENTS:
        return None
    shape = tuple(kind.shape)
    places = [int(one) for one in operation.attributes["broadcast_dimensions"]]
    thin = [1] * len(shape)
    for size, place in zip(operand.fixed.shape, places, strict=True):
        thin[place] = size
    order = np.argsort(places)
    return operand.map(lambda a: np.broadcast_to(a.transpose(order).reshape(thin), shape))


def _reshaped(operation: Any, operand: Constant) -> Constant | None:
    kind = operation.results[0].type
    if operand.is_splat or not kind.has_static_shape:
        return operand if operand.is_splat else None
    return operand.map(lambda a: a.reshape(tuple(kind.shape)))


def _concatenated(operation: Any, *operands: Constant) -> Constant | None:
    axis = ir.IntegerAttr(operation.attributes["dimension"]).value
    whole = []
    for one, value in zip(operands, operation.operands, strict=True):
        kind = value.type
        if not kind.has_static_shape or np.prod(tuple(kind.shape)) > MAX_ELEMENTS:
            return None
        shape = tuple(kind.shape)
        whole.append(one.map(lambda a, shape=shape: np.broadcast_to(a, shape)))  # type: ignore[misc]
    return Constant(
        np.concatenate([one.fixed for one in whole], axis),
        np.concatenate([one.per_row for one in whole], axis),
    )


def _sliced(operation: Any, operand: Constant) -> Constant | None:
    if operand.is_splat:
        return operand
    bounds = [
        [int(one) for one in operation.attributes[name]]
        for name in ("start_indices", "limit_indices", "strides")
    ]
    cut = tuple(slice(*one) for one in zip(*bounds, strict=True))
    return operand.map(lambda a: a[cut])


def _all_alike(operation: Any, operand: Constant, *_: Constant) -> Constant | None:
    del operation
    return operand if operand.is_splat else None


def _looked_up(operation: Any, operand: Constant, indices: Constant) -> Constant | None:
    """Return the elements of a vector at constant indices."""
    kind = operation.results[0].type
    numbers = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    is_vector = operand.fixed.ndim == 1 and list(numbers.collapsed_slice_dims) == [0]
    if not is_vector or not indices.is_static or not kind.has_static_shape:
        return None
    shape = tuple(kind.shape)
    places = indices.fixed.clip(0, operand.fixed.size - 1)
    if not indices.is_splat and places.size != np.prod(shape):
        return None
    return operand.map(
        lambda a: (
            np.broadcast_to(a[places.reshape(-1)], shape)
            if indices.is_splat
            else a[places].reshape(shape)
        )
    )


_MOVED: Mapping[str, Callable[..., Constant | None]] = MappingProxyType(
    {
        "stablehlo.broadcast_in_dim": _broadcast,
        "stablehlo.dynamic_broadcast_in_dim": _broadcast,
        "stablehlo.reshape": _reshaped,
        "stablehlo.concatenate": _concatenated,
        "stablehlo.slice": _sliced,
        "stablehlo.gather": _looked_up,
        "stablehlo.dynamic_slice": _all_alike,
    }
)
"""Operations that rearrange known integers without changing them."""
