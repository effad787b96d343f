"""Loop and Scan: unrolled if small, otherwise compiled to XLA loops."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Graph, Node, needed
from xlaserve.importers.onnx.sequences import NO_TENSORS, Absent, AnyValue, tensor_of
from xlaserve.importers.onnx.values import Value, axis_of, is_host, is_open, on_device, scalar_of

UNROLLED = 4_096
"""Limit on the nodes that one node's loops unroll to, including nested loops, because a small file
could ask for any number of iterations."""

_SPARED = 64
"""A loop that need not be unrolled is unrolled only if it takes at most this fraction (1/64) of the
allowance. Loops that carry a sequence must be unrolled."""

Run: TypeAlias = Callable[[Graph, Sequence[AnyValue], Mapping[str, AnyValue], int], list[AnyValue]]
"""Computes a graph's outputs from its arguments, captured values and an allowance."""


@dataclass(frozen=True, slots=True)
class Body:
    """A subgraph of a node, with the values it captures."""

    graph: Graph
    values: Mapping[str, AnyValue]
    allowance: int
    """Number of nodes to which loops in the subgraph may be unrolled."""
    run: Run

    def __call__(self, arguments: Sequence[AnyValue]) -> list[AnyValue]:
        """Compute the outputs."""
        if len(arguments) != len(self.graph.arguments):
            raise InvalidModel(
                f"its body expects {len(self.graph.arguments)} values, got {len(arguments)}"
            )
        return self.run(self.graph, arguments, self.values, self.allowance)

    def unrolled(self, trips: int) -> "Body":
        """Return the body for each of the unrolled iterations, with its part of the allowance.

        Raises InvalidModel if all iterations together exceed the allowance.
        """
        cost = trips * max(1, self.graph.size())
        if cost > self.allowance:
            raise InvalidModel(
                f"unrolling its {trips} iterations gives {cost} nodes, the limit is "
                f"{self.allowance}"
            )
        return replace(self, allowance=self.allowance // max(1, trips))

    def keeping(self, outputs: Sequence[int]) -> "Body":
        """Return the body with only these outputs."""
        kept = tuple(self.graph.outputs[place] for place in outputs)
        nodes = tuple(needed(self.graph.nodes, kept))
        return replace(self, graph=replace(self.graph, nodes=nodes, outputs=kept))


def as_array(value: AnyValue, subject: str) -> jax.Array:
    """Return a tensor as a JAX array with a strong dtype; raises InvalidModel for text."""
    tensor = tensor_of(value, subject)
    if is_host(tensor) and tensor.dtype.kind not in "biufVO":
        raise InvalidModel(f"{subject} is text")
    array = on_device(tensor)
    # Python scalars give weakly typed arrays, but the dtype of a carry must not change.
    fixed: jax.Array = jax.lax.convert_element_type(array, array.dtype)
    return fixed


def described(value: AnyValue) -> str:
    """Return datatype and shape of a tensor for error messages."""
    if isinstance(value, NO_TENSORS):
        return "no tensor"
    return f"{value.dtype}{list(value.shape)}"


# --- Loop --------------------------------------------------------------------------------------


def loop(node: Node, given: Sequence[AnyValue | None], body: Body) -> list[AnyValue]:
    """Compute a Loop: up to the trip count, while the condition holds."""
    trips, condition = (*given, None, None)[:2]
    state = [_present(value, place) for place, value in enumerate(given[2:], start=2)]
    made = _Loop(node, body, _limit(trips), _condition(condition, "its condition"), state)
    return made.computed()


def _present(value: AnyValue | None, position: int) -> AnyValue:
    if value is None:
        raise InvalidModel(f"its loop-carried input {position} is missing")
    return value


def _limit(trips: AnyValue | None) -> "int | jax.Array | None":
    if trips is None or isinstance(trips, Absent):
        return None
    found = tensor_of(trips, "its trip count")
    return scalar_of(found) if is_host(found) else _single(found, "its trip count")


def _condition(value: AnyValue | None, subject: str) -> "bool | jax.Array":
    if value is None or isinstance(value, Absent):
        return True
    found = tensor_of(value, subject)
    if is_host(found):
        return bool(scalar_of(found))
    return _single(found, subject)


def _single(value: Value, subject: str) -> jax.Array:
    if any(is_open(size) or size != 1 for size in value.shape):
        raise InvalidModel(f"{subject} has the shape {list(value.shape)}, expected one element")
    return on_device(value).reshape(())


@dataclass(slots=True)
class _Loop:
    node: Node
    body: Body
    limit: "int | jax.Array | None"
    """Maximum number of iterations: an integer, a symbolic size or an array; None if unlimited."""
    going_on: "bool | jax.Array"
    """Whether to run the first iteration."""
    state: list[AnyValue]
    stacked: list[int] = field(default_factory=list)
    """Indices of the outputs that stack one row per iteration and are read."""

    def computed(self) -> list[AnyValue]:
        count = len(self.state)
        if len(self.body.graph.outputs) < max(count + 1, len(self.node.outputs) + 1):
            raise InvalidModel(
                f"its body has {len(self.body.graph.outputs)} outputs, expected a condition,"
                f" {count} loop-carried values and the stacked values"
            )
        self.stacked = [p for p in range(count, len(self.node.outputs)) if self.node.needs(p)]
        carried = range(1, count + 1)
        self.body = self.body.keeping([0, *carried, *(place + 1 for place in self.stacked)])
        if self.going_on is False:
            self.limit = 0
        if self.going_on is False or self.going_on is True:
            found = self._unrolled() or self._counted()
            if found is not None:
                return found
        return self._while()

    def _unrolled(self) -> list[AnyValue] | None:
        """Unroll; return None if the loop is too large or its condition depends on the data."""
        limit, cost = self.limit, max(1, self.body.graph.size())
        if not isinstance(limit, int) or is_open(limit) or limit <= 0:
            return None
        must = any(isinstance(value, NO_TENSORS) for value in self.state)
        if not must and limit * cost > self.body.allowance // _SPARED:
            return None
        body, state = self.body.unrolled(limit), self.state
        rows: list[list[AnyValue]] = [[] for _ in self.stacked]
        for trip in range(limit):
            going_on, *found = body([np.asarray(trip), np.asarray(True), *state])
            state, made = found[: len(state)], found[len(state) :]
            for row, value in zip(rows, made, strict=True):
                row.append(value)
            more = trip + 1 < limit and _condition(going_on, "its condition")
            if not isinstance(more, bool):
                return None
            if not more:
                break
        return self._results(state, [stack(row) for row in rows])

    def _counted(self) -> list[AnyValue] | None:
        """Compute a known number of iterations; return None if data may end the loop earlier."""
        if isinstance(self.limit, int) and self.limit <= 0 and not self.stacked:
            return self._results(self.state, [])
        is_none = isinstance(self.limit, int) and self.limit <= 0
        more = True if is_none else self._goes_on()
        if more is False:
            self.limit = 1 if self.limit is None else _least(self.limit)
        elif more is None or self.limit is None:
            return None
        if isinstance(self.limit, jax.Array) or not self.stacked:
            return self._while(is_counted=True)
        limit = self.limit if is_open(self.limit) else max(0, self.limit or 0)
        carry = _Carry.of(self.state, self.body.graph, first=2, returned=1)

        def step(
            values: list[jax.Array], trip: jax.Array
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            _, *found = self.body([trip, np.asarray(True), *carry.merged(values)])
            made = found[len(self.state) :]
            return carry.checked(found), [as_array(each, "a stacked value") for each in made]

        last, rows = jax.lax.scan(step, carry.initial(), jnp.arange(limit, dtype=jnp.int64))
        return self._results(carry.merged(last), rows)

    def _while(self, *, is_counted: bool = False) -> list[AnyValue]:
        """Run the loop as a `while_loop` until the condition or the trip count ends it."""
        if self.stacked:
            raise InvalidModel(
                f"its output '{self.node.outputs[self.stacked[0]]}' has one row per iteration,"
                " and their number depends on data, but XLA needs fixed shapes: use a constant"
                " trip count and condition, or select other outputs with --output"
            )
        limit = self.limit
        if limit is None and self.going_on is True and self._goes_on() is True:
            raise InvalidModel("it has no trip count and its condition is always true")
        carry = _Carry.of(self.state, self.body.graph, first=2, returned=1)
        bound = None if limit is None else jnp.asarray(limit, dtype=jnp.int64)

        def condition(values: tuple[jax.Array, jax.Array, list[jax.Array]]) -> jax.Array:
            trip, more, _ = values
            if bound is None:
                return more
            return trip < bound if is_counted else more & (trip < bound)

        def step(
            values: tuple[jax.Array, jax.Array, list[jax.Array]],
        ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
            trip, _, carried = values
            going_on, *found = self.body([trip, np.asarray(True), *carry.merged(carried)])
            more = jnp.asarray(_condition(going_on, "its condition"), dtype=jnp.bool_)
            return trip + jnp.ones((), jnp.int64), more, carry.checked(found)

        first = (
            jnp.zeros((), jnp.int64),
            jnp.asarray(self.going_on, dtype=jnp.bool_),
            carry.initial(),
        )
        _, _, last = jax.lax.while_loop(condition, step, first)
        return self._results(carry.merged(last), [])

    def _goes_on(self) -> bool | None:
        """Return the condition's value, or None if it depends on data or on the iteration."""
        graph = self.body.keeping([0]).graph
        before = graph.arguments[1] if len(graph.arguments) > 1 else ""
        alone = replace(graph, arguments=(before,))
        read = set(alone.reads())
        if not all(is_host(self.body.values.get(name)) for name in read):  # type: ignore[arg-type]
            return None
        (found,) = replace(self.body, graph=alone)([np.asarray(True)])
        more = _condition(found, "its condition")
        return more if isinstance(more, bool) else None

    def _results(self, state: Sequence[AnyValue], rows: Sequence[AnyValue]) -> list[AnyValue]:
        stacked = dict(zip(self.stacked, rows, strict=True))
        places = range(len(state), len(self.node.outputs))
        return [*state, *(stacked.get(place, Absent()) for place in places)]


def _least(limit: "int | jax.Array | None") -> "int | jax.Array":
    if isinstance(limit, jax.Array):
        return jnp.minimum(jnp.ones((), jnp.int64), limit.astype(jnp.int64))
    return 1 if limit is None or is_open(limit) else min(1, limit)


def stack(values: Sequence[AnyValue]) -> Value:
    """Stack tensors of equal shape along a new first axis; raises InvalidModel if shapes differ."""
    rows = [tensor_of(value, "a stacked value") for value in values]
    if any(described(row) != described(rows[0]) for row in rows):
        shown = ", ".join(dict.fromkeys(map(described, rows)))
        raise InvalidModel(f"its stacked values have different shapes: {shown}")
    if all(map(is_host, rows)):
        return np.stack(rows)
    return jnp.stack([on_device(row) for row in rows])


# --- Loop carry --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Carry:
    """The loop-carried values that change.

    The others stay outside the carry, so that their elements remain known during tracing.
    """

    state: tuple[AnyValue, ...]
    names: tuple[str, ...]
    changed: tuple[int, ...]

    @classmethod
    def of(cls, state: Sequence[AnyValue], body: Graph, *, first: int, returned: int) -> "_Carry":
        """`first` and `returned` are the positions of the first carried argument and output."""
        names = body.arguments[first : first + len(state)]
        after = body.outputs[returned : returned + len(state)]
        changed = [
            place for place, pair in enumerate(zip(names, after, strict=True)) if _differ(pair)
        ]
        return cls(tuple(state), names, tuple(changed))

    def initial(self) -> list[jax.Array]:
        return [as_array(self.state[place], self._named(place)) for place in self.changed]

    def merged(self, values: Sequence[jax.Array]) -> list[AnyValue]:
        state = list(self.state)
        for place, value in zip(self.changed, values, strict=True):
            state[place] = value
        return state

    def checked(self, found: Sequence[AnyValue]) -> list[jax.Array]:
        """Return the carry after an iteration; raises InvalidModel if a shape or dtype changed."""
        after = [as_array(found[place], self._named(place)) for place in self.changed]
        for place, array, before in zip(self.changed, after, self.initial(), strict=True):
            if (array.shape, array.dtype) != (before.shape, before.dtype):
                raise InvalidModel(
                    f"{self._named(place)} is {described(before)} before an iteration and"
                    f" {described(array)} after it, expected the same"
                )
        return after

    def _named(self, place: int) -> str:
        return f"'{self.names[place]}', which is loop-carried,"


def _differ(pair: tuple[str, str]) -> bool:
    return pair[0] != pair[1]


# --- Scan --------------------------------------------------------------------------------------


def scan(node: Node, given: Sequence[AnyValue | None], body: Body) -> list[AnyValue]:
    """Compute a Scan: one iteration per row of its inputs."""
    count = node.integer("num_scan_inputs")
    kept = len(given) - count
    stacked = len(body.graph.outputs) - kept
    if count < 1 or kept < 0 or stacked < 0:
        raise InvalidModel(
            f"num_scan_inputs {count} does not fit its {len(given)} inputs and the"
            f" {len(body.graph.outputs)} outputs of its body"
        )
    ways = (
        _ways(node, "scan_input_directions", count),
        _ways(node, "scan_output_directions", stacked),
    )
    axes, put = node.integers("scan_input_axes"), node.integers("scan_output_axes")
    tensors = [as_array(_present(value, p), f"its input {p}") for p, value in enumerate(given)]
    rows = [
        _from(array, axis, backwards=way)
        for array, axis, way in zip(tensors[kept:], axes or [0] * count, ways[0], strict=True)
    ]
    lengths = {row.shape[0] for row in rows}
    if len(lengths) != 1:
        raise InvalidModel(
            f"its scanned inputs have different lengths: {', '.join(map(str, lengths))}"
        )
    carry = _Carry.of(
        [_present(value, 0) for value in given[:kept]], body.graph, first=0, returned=0
    )

    def step(
        values: list[jax.Array], parts: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        found = body([*carry.merged(values), *parts])
        return carry.checked(found), [as_array(each, "a stacked value") for each in found[kept:]]

    last, made = jax.lax.scan(step, carry.initial(), rows)
    results = [
        _to(array, axis, backwards=way)
        for array, axis, way in zip(made, put or [0] * stacked, ways[1], strict=True)
    ]
    return [*carry.merged(last), *results]


def _ways(node: Node, name: str, count: int) -> list[bool]:
    """Return for each tensor whether it is scanned in reverse."""
    ways = node.integers(name) or (0,) * count
    if len(ways) != count or not {*ways} <= {0, 1}:
        raise InvalidModel(f"{name}: expected {count} of 0 or 1, got {list(ways)}")
    return [bool(way) for way in ways]


def _from(array: jax.Array, axis: int, *, backwards: bool) -> jax.Array:
    if not array.ndim:
        raise InvalidModel("it scans a tensor without dimensions")
    moved = jnp.moveaxis(array, axis_of(axis, array.ndim), 0)
    return jnp.flip(moved, 0) if backwards else moved


def _to(array: jax.Array, axis: int, *, backwards: bool) -> jax.Array:
    ordered = jnp.flip(array, 0) if backwards else array
    return jnp.moveaxis(ordered, 0, axis_of(axis, array.ndim))
