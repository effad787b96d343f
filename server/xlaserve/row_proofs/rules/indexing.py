"""Operations that read or write elements at computed indices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jax.extend.mlir.dialects import stablehlo

from xlaserve.row_proofs.constants import MAX_ELEMENTS, Constant
from xlaserve.row_proofs.domain import (
    ROWS,
    Along,
    Dimension,
    Dimensions,
    Factor,
    Value,
    blocked,
    check_one_row,
    factor,
    has_rows,
    is_uniform,
    joined,
    joined_dimension,
    joined_dimensions,
    moves,
    size_of,
    uniform,
)
from xlaserve.row_proofs.findings import Finding, Mixes, NoRule, Problem
from xlaserve.row_proofs.program import Operation, Shape
from xlaserve.row_proofs.ranges import Range, is_within
from xlaserve.row_proofs.rules.elementwise import of_constant
from xlaserve.row_proofs.rules.places import place_of
from xlaserve.row_proofs.rules.reduction import check_pure
from xlaserve.row_proofs.rules.shape import depends_on_size, static_shape
from xlaserve.row_proofs.rules.tracing import Part, Place
from xlaserve.row_proofs.sizes import ONE, ZERO, Size, static
from xlaserve.row_proofs.walk import Walker

ONE_BY_ONE = "gathers or scatters rows one by one"
_MOVES = "indexes a dimension whose size is the batch size"


@dataclass(frozen=True, slots=True)
class _Indices:
    """The index vectors of a gather or a scatter, by dimension of the operand."""

    together: Value
    """The combined abstract value of all relevant indices, without the index vector dimension."""
    places: Mapping[int, Place]
    """Indices derived from the row number, by dimension of the operand, without the index vector
    dimension."""


@dataclass(frozen=True, slots=True)
class _Vectors:
    """A tensor of index vectors, and the dimension along which they lie."""

    number: int
    shape: Shape
    vector: int

    def found(
        self, walker: Walker, targets: Sequence[int], ignored: Sequence[int] = ()
    ) -> _Indices:
        """Split the vectors by dimension of the operand, except the dimensions in `ignored`."""
        found: list[Value] = [Value(uniform(self.thin))]
        places: dict[int, Place] = {}
        for number, target in enumerate(targets):
            if target in ignored:
                continue
            place = self._place(walker, number)
            if place.stride:
                places[target] = place
            if place.offset.blocked is not None:
                raise _Blocked(walker.value(self.number).blocked or place.offset.blocked)
            found.append(place.offset)
        return _Indices(joined(found), places)

    @property
    def thin(self) -> Shape:
        """Return the shape without the index vector dimension."""
        return tuple(size for axis, size in enumerate(self.shape) if axis != self.vector)

    def _place(self, walker: Walker, number: int) -> Place:
        if self.vector == len(self.shape):
            return place_of(walker, self.number)
        part = None if self.shape[self.vector] == ONE else Part(self.vector, number)
        found = place_of(walker, self.number, part)
        offset = found.offset
        if offset.blocked is None:
            offset = Value(self._without(offset.dimensions), sized=offset.sized)
        return replace(found, offset=offset, rows=self._without(found.rows))

    def _without(self, dimensions: Dimensions) -> Dimensions:
        return tuple(one for axis, one in enumerate(dimensions) if axis != self.vector)


class _Blocked(Exception):
    def __init__(self, finding: Finding) -> None:
        self.finding = finding


def _is_own_row(place: Place, dimension: Dimension, taken: int) -> bool:
    """Tell whether a slice of a dimension with one block per row lies in the block of its own row.

    Index `number * k + i` of `[b * k]` is `[number][i]` of `[b][k]`, if `i` is within the block.
    """
    inner = size_of(dimension[1:])
    return dimension[:1] == (ROWS,) and inner == static(place.stride) and _is_in_block(place, taken)


def _is_in_block(place: Place, taken: int) -> bool:
    return place.within is not None and is_within(
        place.within, Range(ZERO, static(place.stride - taken))
    )


# --- Gather ------------------------------------------------------------------------------------


def gather(operation: Operation, operands: Sequence[Value], walker: Walker) -> list[Value]:
    """Read slices of an operand at index vectors."""
    operand, indices = operands
    if operand.blocked is not None:
        return [Value((), operand.blocked)]
    known = _known(operation, operand, indices)
    if known is not None:
        return [known]
    try:
        return [_gathered(operation, operand, indices, walker)]
    except _Blocked as reason:
        return [Value((), reason.finding)]


def _gathered(operation: Operation, operand: Value, index: Value, walker: Walker) -> Value:
    numbers = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    taken = operation.sizes("slice_sizes") or ()
    shape, index_shape = (kind.shape for kind in operation.operand_types)
    vector = numbers.index_vector_dim
    targets = tuple(numbers.start_index_map)
    pairs = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    # A whole slice starts at 0 after clamping, and in a uniform dimension all slices are equal:
    # such indices have no effect.
    ignored = [
        axis
        for axis in targets
        if shape[axis] == taken[axis] or is_uniform(operand.dimensions[axis])
    ]
    found = _Vectors(operation.operands[1], index_shape, vector).found(walker, targets, ignored)
    batch: Dimensions = found.together.dimensions
    sized = operand.sized or found.together.sized
    for axis, place in pairs.items():
        own = place - (place > vector)
        joined_one = joined_dimension(batch[own], operand.dimensions[axis])
        batch = (*batch[:own], joined_one, *batch[own + 1 :])
    offsets: list[Dimension] = []
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    for axis, dimension in enumerate(operand.dimensions):
        if axis in pairs:
            continue
        place_of_axis = found.places.get(axis)
        sizes_of_axis = shape[axis], taken[axis]
        if place_of_axis is None:
            left, finding = _sliced_dimension(operation, dimension, sizes_of_axis, index)
        else:
            rows, left, finding = _sliced_by_row(operation, dimension, sizes_of_axis, place_of_axis)
            batch = joined_dimensions(batch, rows)
        sized = sized or finding
        if axis not in gone:
            offsets.append(left)
    dimensions = _put(operation, numbers.offset_dims, offsets, batch)
    check_one_row(dimensions)
    return Value(dimensions, sized=sized)


def _sliced_dimension(
    operation: Operation, dimension: Dimension, of: tuple[Size, Size], index: Value
) -> tuple[Dimension, Finding | None]:
    """Return the sliced dimension, and a finding if the slices depend on the batch size."""
    size, taken = of
    if size == taken:
        return dimension, None
    if has_rows(dimension):
        raise _at_rows(index)
    if is_uniform(dimension):
        return factor(taken, Along.UNIFORM), None
    finding = None if size.is_static else depends_on_size(operation, _MOVES, surely=False)
    return factor(taken, Along.ANY), finding


def _sliced_by_row(
    operation: Operation, dimension: Dimension, of: tuple[Size, Size], place: Place
) -> tuple[Dimensions, Dimension, Finding | None]:
    """Like `_sliced_dimension`, and also return how slices at the row number vary."""
    size, taken = of
    if not taken.is_static:
        raise NoRule("takes slices whose size is the batch size")
    left = factor(taken, Along.ANY)
    if _is_own_row(place, dimension, taken.fixed):
        return place.rows, left, None
    if has_rows(dimension):
        raise NoRule("gathers rows at indices that may belong to other rows")
    # The operand is the same for all rows, and each row reads it at its own index.
    varied = tuple(
        tuple(Factor(part.size, min(part.along, Along.ANY)) for part in one) for one in place.rows
    )
    is_inside = size == Size(place.stride, 0) and _is_in_block(place, taken.fixed)
    is_free = size.is_static or (is_inside and not moves(dimension))
    finding = None if is_free else depends_on_size(operation, _MOVES, surely=False)
    return varied, left, finding


def _put(
    operation: Operation,
    places: Sequence[int],
    offsets: Sequence[Dimension],
    batch: Sequence[Dimension],
) -> tuple[Dimension, ...]:
    rest, inside = iter(batch), iter(offsets)
    rank = range(len(operation.types[0].shape))
    return tuple(next(inside) if axis in places else next(rest) for axis in rank)


def _known(operation: Operation, operand: Value, indices: Value) -> Value | None:
    """Read elements of a constant at constant indices, as JAX does for bounds taken from shapes."""
    fact, at = operand.fact, indices.fact
    if not isinstance(fact, Constant) or not isinstance(at, Constant) or not at.is_static:
        return None
    shape = operation.types[0].shape
    if fact.is_splat:
        return of_constant(fact, shape, operation)
    numbers = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    if fact.fixed.ndim != 1 or list(numbers.collapsed_slice_dims) != [0]:
        return None
    known = static_shape(shape)
    if known is None or at.fixed.size > MAX_ELEMENTS:
        return None
    places = at.fixed.clip(0, fact.fixed.size - 1)
    if not at.is_splat and numbers.index_vector_dim < len(operation.operand_types[1].shape):
        places = places.take(0, numbers.index_vector_dim)
    return of_constant(
        fact.map(lambda a: a[places] if at.is_splat else a[places].reshape(known)), shape, operation
    )


# --- Scatter -----------------------------------------------------------------------------------


def scatter(operation: Operation, operands: Sequence[Value], walker: Walker) -> list[Value]:
    """Write slices of updates into operands at index vectors."""
    count = len(operands) // 2
    into, indices, updates = operands[:count], operands[count], operands[count + 1 :]
    if any(value.blocked is not None for value in (*into, *updates)):
        return [blocked((*into, *updates))] * count
    finding = check_pure(walker, operation.regions[0])
    try:
        found = _scattered(operation, joined(into), indices, joined(updates), walker)
    except _Blocked as reason:
        return [Value((), reason.finding)] * count
    return [Value(found.dimensions, sized=found.sized or finding)] * count


def _scattered(
    operation: Operation, operand: Value, indices: Value, update: Value, walker: Walker
) -> Value:
    numbers = stablehlo.ScatterDimensionNumbers(operation.attributes["scatter_dimension_numbers"])
    count = len(operation.results)
    shape, index_shape = operation.operand_types[0].shape, operation.operand_types[count].shape
    update_shape = operation.operand_types[count + 1].shape
    vector = numbers.index_vector_dim
    targets = tuple(numbers.scattered_dims_to_operand_dims)
    pairs = dict(
        zip(numbers.input_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    # Indices matter even for whole slices, since a slice that does not fit is dropped.
    found = _Vectors(operation.operands[count], index_shape, vector).found(walker, targets)
    sized = operand.sized or update.sized or found.together.sized
    windows = tuple(numbers.update_window_dims)
    outer = [axis for axis in range(len(update_shape)) if axis not in windows]
    scattered = [update.dimensions[axis] for axis in outer]
    batch = [
        joined_dimension(one, other)
        for one, other in zip(found.together.dimensions, scattered, strict=True)
    ]
    result: list[Dimension | None] = [None] * len(shape)
    paired: set[int] = set()
    places = {axis: place - (place > vector) for axis, place in pairs.items()}
    for axis, place in places.items():
        result[axis] = joined_dimension(operand.dimensions[axis], batch[place])
        paired.add(place)
    for axis, row in found.places.items():
        if axis not in numbers.inserted_window_dims:
            raise NoRule("writes slices at indices computed from the row number")
        along = _rows_of(row, paired)
        result[axis] = _put_by_row(operand.dimensions[axis], shape[axis], row, batch[along])
        paired.add(along)
    for place, dimension in enumerate(batch):
        if place in paired:
            continue
        if has_rows(dimension):
            raise Mixes("gathers or scatters rows by index")
        if not _without_vector(index_shape, vector)[place].is_static:
            sized = sized or depends_on_size(operation, "writes as many elements as rows")
    gone = {*numbers.inserted_window_dims, *pairs}
    inside = iter(windows)
    for axis, dimension in enumerate(operand.dimensions):
        if result[axis] is not None:
            continue
        window = None if axis in gone else next(inside)
        own = () if window is None else update.dimensions[window]
        taken = ONE if window is None else update_shape[window]
        result[axis], finding = _put_into(
            operation, dimension, own, (shape[axis], taken), index=indices
        )
        sized = sized or finding
    dimensions = tuple(one for one in result if one is not None)
    check_one_row(dimensions)
    return Value(dimensions, sized=sized)


def _rows_of(row: Place, paired: Collection[int]) -> int:
    """Return the dimension of the updates that holds the rows, which must not be in `paired`.

    A row number used as index in two dimensions would write along a diagonal.
    """
    (along,) = (axis for axis, one in enumerate(row.rows) if has_rows(one))
    if along in paired:
        raise NoRule("writes at indices computed from the row number in two dimensions")
    return along


def _put_by_row(dimension: Dimension, size: Size, row: Place, update: Dimension) -> Dimension:
    """Return how a dimension varies after each row has written at its own indices."""
    (own,) = filter(has_rows, row.rows)
    if size != Size(row.stride, 0) or not _is_in_block(row, 1):
        raise NoRule("writes at indices computed from the row number")
    if row.stride == 1 and own == (ROWS,):
        return joined_dimension(dimension, update)
    # Each written element must belong to the row at whose index it is written.
    joined_dimension(own, update)
    block = (ROWS, *factor(static(row.stride), Along.ANY))
    return joined_dimension(dimension, block)


def _without_vector(shape: Shape, vector: int) -> Shape:
    """Return the shape of the indices without the index vector dimension."""
    return tuple(size for axis, size in enumerate(shape) if axis != vector)


def _put_into(
    operation: Operation,
    dimension: Dimension,
    own: Dimension,
    of: tuple[Size, Size],
    *,
    index: Value,
) -> tuple[Dimension, Finding | None]:
    """Return how a dimension varies after a slice of it was replaced."""
    size, taken = of
    if size == taken:
        return joined_dimension(dimension, own), None
    if has_rows(dimension) or has_rows(own):
        raise _at_rows(index)
    finding = None
    if not size.is_static or not taken.is_static:
        finding = depends_on_size(operation, _MOVES, surely=False)
    return factor(size, Along.ANY), finding


def _at_rows(index: Value) -> Problem:
    """Return the problem with an index into the rows.

    An index that is uniform but not constant is a loop counter; an element read there may be
    written back to the same row.
    """
    is_alike = index.blocked is None and all(map(is_uniform, index.dimensions))
    if is_alike and not isinstance(index.fact, Constant):
        return OneByOne()
    return Mixes("gathers or scatters rows by index")


class OneByOne(NoRule):
    """A loop counter is used as index into the rows."""

    def __init__(self) -> None:
        super().__init__(ONE_BY_ONE)


# --- Slices at a single index ------------------------------------------------------------------


def dynamic_slice(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Read a slice at a dynamic index; for a whole slice the index is 0."""
    operand, *starts = operands
    if operand.blocked is not None:
        return [Value((), operand.blocked)]
    shape, taken = operation.operand_types[0].shape, operation.types[0].shape
    sized = operand.sized
    found: list[Dimension] = []
    for axis, dimension in enumerate(operand.dimensions):
        if shape[axis] == taken[axis]:
            found.append(dimension)
            continue
        if has_rows(dimension):
            raise _at_rows(starts[axis])
        if starts[axis].blocked is not None:
            return [Value((), starts[axis].blocked)]
        if is_uniform(dimension):
            found.append(factor(taken[axis], Along.UNIFORM))
            continue
        if not shape[axis].is_static:
            sized = sized or depends_on_size(operation, _MOVES, surely=False)
        sized = sized or starts[axis].sized
        found.append(factor(taken[axis], Along.ANY))
    fact = _sliced_fact(operation, operand, starts)
    if fact is not None:
        return [of_constant(fact, taken, operation)]
    return [Value(tuple(found), sized=sized)]


def _sliced_fact(operation: Operation, operand: Value, starts: Sequence[Value]) -> Constant | None:
    fact = operand.fact
    if not isinstance(fact, Constant):
        return None
    if fact.is_splat:
        return fact
    facts = [start.fact for start in starts]
    at = [one.item() if isinstance(one, Constant) else None for one in facts]
    taken = static_shape(operation.types[0].shape)
    if None in at or taken is None:
        return None
    places = [
        min(max(start or 0, 0), whole - size)
        for start, whole, size in zip(at, fact.fixed.shape, taken, strict=True)
    ]
    bounds = tuple(slice(start, start + size) for start, size in zip(places, taken, strict=True))
    return fact.map(lambda a: a[bounds])


def dynamic_update_slice(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Replace a slice at a dynamic index; for a whole slice the index is 0."""
    operand, update, *starts = operands
    if operand.blocked is not None or update.blocked is not None:
        return [blocked([operand, update])]
    shape, taken = (kind.shape for kind in operation.operand_types[:2])
    sized = operand.sized or update.sized
    found: list[Dimension] = []
    for axis, (dimension, own) in enumerate(
        zip(operand.dimensions, update.dimensions, strict=True)
    ):
        if shape[axis] == taken[axis]:
            found.append(joined_dimension(dimension, own))
            continue
        if taken[axis] == ZERO:
            found.append(dimension)
            continue
        if has_rows(dimension) or has_rows(own):
            raise _at_rows(starts[axis])
        if starts[axis].blocked is not None:
            return [Value((), starts[axis].blocked)]
        if not shape[axis].is_static or not taken[axis].is_static:
            sized = sized or depends_on_size(operation, _MOVES, surely=False)
        sized = sized or starts[axis].sized
        found.append(factor(shape[axis], Along.ANY))
    check_one_row(tuple(found))
    return [Value(tuple(found), sized=sized)]
