"""Estimates the temporaries of a computation from its StableHLO, without compiling it.

XLA fuses element-wise operations into their consumers and reuses the memory of dead results. The
estimate walks through the remaining operations and adds up the results that must be in memory, each
from its definition to its last use.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from xlaserve.artifact import computation
from xlaserve.artifact.element_types import ITEMSIZES

Shape: TypeAlias = tuple[int, ...]

MAX_STEPS = 20_000
"""Maximum number of operations to walk through, including repeated calls; about 0.2 ms each."""

_MAX_NUMBERS = 16
"""Maximum length of integer arrays whose values are tracked, to compute shapes."""

_SMALL_BYTES = 1024
"""Smaller tensors are not tracked."""

_ANYWHERE = frozenset(
    {"constant", "iota", "dynamic_iota", "broadcast_in_dim", "dynamic_broadcast_in_dim"}
)
"""Operations that every consumer recomputes instead of reading a stored result."""

_VIEWS = frozenset({"reshape", "dynamic_reshape", "bitcast_convert", "optimization_barrier"})
"""Operations whose result is a view of the operand."""

_KERNELS = frozenset(
    {
        "cholesky",
        "convolution",
        "custom_call",
        "dot_general",
        "dynamic_conv",
        "dynamic_update_slice",
        "fft",
        "reduce_window",
        "rng_bit_generator",
        "scatter",
        "select_and_scatter",
        "sort",
        "triangular_solve",
    }
)
"""Operations that read their operands from memory; all other operations are fused."""

_IN_MEMORY = _KERNELS | {"concatenate", "reduce"}
"""Operations that always write their results to memory."""

_IN_PLACE = frozenset({"dynamic_update_slice", "scatter"})
"""Operations that update their first operand in place."""

_WIDENED = frozenset({"bf16", "f16"})
"""Datatypes that a CPU converts to FP32 to compute."""

_SPLITS = 16
"""Assumed number of partial results into which a GPU splits a small matrix product (split-K); they
are all in memory until they are summed. Up to 22 were observed.
"""

_MAX_SPLIT_BYTES = 4 << 20

_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = MappingProxyType(
    {
        "add": operator.add,
        "subtract": operator.sub,
        "multiply": operator.mul,
        "divide": lambda left, right: left // right if right else 0,
        "remainder": lambda left, right: left % right if right else 0,
        "maximum": max,
        "minimum": min,
    }
)


@dataclass(eq=False, slots=True)
class _Place:
    """Memory of one result, from definition to last use."""

    nbytes: int
    made: int
    last: int
    """Index of the operation that reads it last."""
    over: "tuple[_Place, ...]" = ()
    """Memory that this result may reuse, if this operation is the last to read it."""


@dataclass(eq=False, slots=True)
class _Value:
    """A result of an operation: its shape and memory."""

    shape: Shape
    nbytes: int
    numbers: tuple[int, ...] | None = None
    """The elements, if the result is a short array of known integers."""
    places: tuple[_Place, ...] = ()
    """The result's own memory, or the memory that is read to recompute it."""
    over: tuple[_Place, ...] = ()
    """Memory that the result may overwrite."""
    lies: bool = False
    is_moved: bool = False
    """Whether the result is a permutation of `places`; matrix products read permuted operands."""
    is_cheap: bool = False
    is_widened: bool = False
    """Whether the CPU computes it in a datatype of twice the width."""


_Values: TypeAlias = dict[Any, _Value]
"""Results by MLIR value."""


def of_module(
    module: bytes, shapes: Sequence[Shape], kept: int, platform: int, *, widens: bool, rows: int
) -> int:
    """Estimate the peak bytes of outputs and temporaries for inputs of these shapes.

    The first `kept` arguments are parameters, the inputs follow. `platform` is the index of the
    target platform among the artifact's platforms. `widens`: half precision is computed in FP32, as
    CPUs do. Raises JAX's errors for an invalid artifact, and ValueError if it has too many
    operations.
    """
    with computation.parsed(module) as whole:
        return _Walk(whole, platform, widens=widens, rows=rows).estimate(shapes, kept)


class _Walk:
    """Walks through operations in order, following calls into functions."""

    def __init__(self, module: Any, platform: int, *, widens: bool, rows: int) -> None:
        self._functions = {_name(one): one for one in module.body.operations}
        self._platform = platform
        self._widens = widens
        self._rows = rows
        """The assumed size of dynamic dimensions."""
        self._now = 0
        self._made: list[_Place] = []

    def estimate(self, shapes: Sequence[Shape], kept: int) -> int:
        """Walk through the main function and return the peak memory in bytes."""
        main = self._functions["main"]
        (block,) = main.regions[0].blocks
        given, arguments = [], 0
        for index, argument in enumerate(block.arguments):
            if "jax.global_constant" in ir.DictAttr(main.attributes["arg_attrs"][index]):
                given.append(self._value(argument, (), (self._platform,)))
                continue
            shape = shapes[arguments - kept] if arguments >= kept else None
            value = self._value(argument, shape)
            value.places, value.lies = (_Place(0, 0, 0),), True
            arguments += 1
            given.append(value)
        outputs = self._block(block, {}, given)
        self._now += 1
        for one in outputs:
            self._keep(one, ())
        return _most(self._made)

    def _block(self, block: Any, values: _Values, given: Sequence[_Value]) -> list[_Value]:
        values.update(zip(block.arguments, given, strict=True))
        for operation in block.operations:
            name = operation.operation.name.rpartition(".")[2]
            if name == "return":
                return [values[one] for one in operation.operands]
            self._now += 1
            if self._now > MAX_STEPS:
                raise ValueError(f"it has more than {MAX_STEPS} operations")
            taken = [values[one] for one in operation.operands]
            found = self._of(name, operation, taken, values)
            values.update(zip(operation.results, found, strict=True))
        return []

    def _of(
        self, name: str, operation: Any, taken: Sequence[_Value], values: _Values
    ) -> list[_Value]:
        if name == "call":
            callee = self._functions[str(operation.attributes["callee"])[1:].strip('"')]
            return self._block(callee.regions[0].blocks[0], {}, taken)
        if name == "case":
            return self._branches(operation, taken[0].numbers, values)
        if name == "while":
            return self._loop(operation, taken, values)
        results = [
            self._value(one, _shape_of(name, operation, taken), _numbers(name, operation, taken))
            for one in operation.results
        ]
        self._place(name, operation, taken, results)
        return results

    def _branches(
        self, operation: Any, numbers: tuple[int, ...] | None, values: _Values
    ) -> list[_Value]:
        """Walk through the taken branch of a conditional, or through all if it is unknown."""
        branches = list(operation.regions)
        if numbers is not None:
            branches = [branches[numbers[0] if 0 <= numbers[0] < len(branches) else -1]]
        found: list[_Value] = []
        for branch in branches:
            found = self._block(branch.blocks[0], values, ())
            for one in found if len(branches) > 1 else ():
                self._keep(one, one.over)
        return found

    def _loop(self, operation: Any, taken: Sequence[_Value], values: _Values) -> list[_Value]:
        """Walk through a loop's body once: its operands live as long as the loop."""
        for one in taken:
            self._keep(one, ())
        outer = {place for value in values.values() for place in value.places}
        carried = [_Value(one.shape, one.nbytes, None, one.places, lies=True) for one in taken]
        begun = self._now
        for one in self._block(operation.regions[1].blocks[0], values, carried):
            self._read(one)
        self._now += 1
        for place in outer:
            if place.last > begun:
                place.last = self._now
        for one in carried:
            self._read(one)
        return carried

    def _place(
        self, name: str, operation: Any, taken: Sequence[_Value], results: Sequence[_Value]
    ) -> None:
        """Assign memory to an operation's results."""
        if not results:
            return
        first = results[0]
        if name in _VIEWS:
            first.places, first.lies = taken[0].places, taken[0].lies
            first.is_moved, first.is_cheap = taken[0].is_moved, taken[0].is_cheap
            return
        if name in _KERNELS:
            self._bring(name, taken)
        if name == "dot_general" and not self._widens:
            partial = min(_SPLITS * first.nbytes, _MAX_SPLIT_BYTES)
            self._made.append(_Place(partial, self._now, self._now))
        for one in taken:
            self._read(one)
        if name in _IN_PLACE and taken[0].lies:
            first.places, first.lies = taken[0].places, True
            return
        read = Counter(place for one in taken for place in one.places)
        places = tuple(read)
        over = places if max(read.values(), default=0) == 1 and len(_large(places)) == 1 else ()
        is_cheap = name in _ANYWHERE or all(one.is_cheap for one in taken)
        is_moved = name == "transpose" and (taken[0].lies or taken[0].is_moved)
        for one, result in zip(results, operation.results, strict=True):
            one.places, one.is_cheap, one.is_moved = places, is_cheap, is_moved
            one.over = over
            taken_often = not is_cheap and not is_moved and _uses(result) > 1
            if name in _IN_MEMORY or taken_often:
                may_be_over = name == "sort" or name not in _IN_MEMORY
                self._keep(one, over if may_be_over else ())

    def _bring(self, name: str, taken: Sequence[_Value]) -> None:
        """Store a kernel's operands in memory, except permuted operands of matrix products."""
        is_product = name == "dot_general"
        for one in taken:
            if is_product and one.is_widened and _are_given(one.places):
                # Count the wider copies of converted parameters and inputs as allocated from the
                # first operation on: XLA may convert them at any time.
                self._made.append(_Place(one.nbytes, 0, self._now))
            elif one.nbytes > _SMALL_BYTES and not (is_product and one.is_moved):
                self._keep(one, one.over)

    def _read(self, value: _Value) -> None:
        if value.lies:
            for place in value.places:
                place.last = self._now

    def _keep(self, value: _Value, over: tuple[_Place, ...]) -> None:
        """Store a result in memory from this operation on."""
        if not value.lies:
            for place in value.places:
                place.last = self._now
            place = _Place(value.nbytes, self._now, self._now, over)
            self._made.append(place)
            value.places, value.lies = (place,), True
        self._read(value)

    def _value(
        self, given: Any, shape: Sequence[int] | None, numbers: tuple[int, ...] | None = None
    ) -> _Value:
        array = ir.RankedTensorType(given.type)
        sizes = [
            array.get_dim_size(index)
            if not array.is_dynamic_dim(index)
            else self._open(shape, index)
            for index in range(array.rank)
        ]
        name = str(array.element_type)
        widened = self._widens and name in _WIDENED
        itemsize = 4 if widened else ITEMSIZES.get(name, 1)
        nbytes = prod(sizes) * itemsize
        return _Value(tuple(sizes), nbytes, numbers, is_widened=widened)

    def _open(self, shape: Sequence[int] | None, index: int) -> int:
        return shape[index] if shape is not None and index < len(shape) else self._rows


def _most(made: Iterable[_Place]) -> int:
    """Return the peak of the memory in use at the same time."""
    changes, taken = Counter[int](), set[int]()
    for one in made:
        gone = next(
            (old for old in one.over if id(old) not in taken and _may_take_over(one, old)), None
        )
        if gone is not None:
            taken.add(id(gone))
        changes[2 * one.made] += one.nbytes - (gone.nbytes if gone is not None else 0)
    for one in made:
        if id(one) not in taken:
            changes[2 * one.last + 1] -= one.nbytes
    live = most = 0
    for _, change in sorted(changes.items()):
        live += change
        most = max(most, live)
    return most


def _large(places: Iterable[_Place]) -> list[_Place]:
    return [place for place in places if place.nbytes > _SMALL_BYTES]


def _are_given(places: Iterable[_Place]) -> bool:
    return all(not place.made for place in places)


def _may_take_over(one: _Place, old: _Place) -> bool:
    return old.last == one.made and 0 < old.nbytes == one.nbytes


def _name(function: Any) -> str:
    return ir.StringAttr(function.attributes["sym_name"]).value


def _uses(result: Any) -> int:
    return sum(1 for _ in result.uses)


def _numbers(name: str, operation: Any, taken: Sequence[_Value]) -> tuple[int, ...] | None:
    """Return the elements of a result that is a short array of known integers, or None."""
    if name == "get_dimension_size":
        return (taken[0].shape[ir.IntegerAttr(operation.attributes["dimension"]).value],)
    if name == "constant":
        return _constant(operation.attributes["value"])
    known = [one.numbers for one in taken]
    if not known or None in known:
        return None
    found = [one for one in known if one is not None]
    if name in ("convert", "reshape"):
        return found[0]
    if name == "concatenate":
        return sum(found, ())
    compute = _ARITHMETIC.get(name)
    return tuple(map(compute, *found)) if compute and len(found) == 2 else None


def _constant(value: Any) -> tuple[int, ...] | None:
    try:
        elements = ir.DenseIntElementsAttr(value)
        if len(elements) > _MAX_NUMBERS:
            return None
        return tuple(int(elements[index]) for index in range(len(elements)))
    except (TypeError, ValueError):
        return None


def _shape_of(name: str, operation: Any, taken: Sequence[_Value]) -> Sequence[int] | None:
    """Return the shape of a dynamic result, or None unless it follows from the operands."""
    if all(ir.RankedTensorType(one.type).has_static_shape for one in operation.results):
        return None
    if name in ("dynamic_reshape", "dynamic_broadcast_in_dim", "dynamic_iota"):
        return taken[-1].numbers
    if name == "transpose":
        order = ir.DenseI64ArrayAttr(operation.attributes["permutation"])
        return [taken[0].shape[axis] for axis in order]
    if name == "dot_general":
        return _product(operation, taken[0].shape, taken[1].shape)
    if name == "reduce":
        gone = set(ir.DenseI64ArrayAttr(operation.attributes["dimensions"]))
        return [size for axis, size in enumerate(taken[0].shape) if axis not in gone]
    rank = ir.RankedTensorType(operation.results[0].type).rank
    return next((one.shape for one in taken if len(one.shape) == rank), None)


def _product(operation: Any, left: Shape, right: Shape) -> Sequence[int]:
    numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    batch = list(numbers.lhs_batching_dimensions)
    no_left = {*batch, *numbers.lhs_contracting_dimensions}
    no_right = {*numbers.rhs_batching_dimensions, *numbers.rhs_contracting_dimensions}
    return [
        *(left[axis] for axis in batch),
        *(size for axis, size in enumerate(left) if axis not in no_left),
        *(size for axis, size in enumerate(right) if axis not in no_right),
    ]
