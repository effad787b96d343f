"""Reductions along axes: sums, extremes and their positions, cumulative sums."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, Operation, operator
from xlaserve.importers.onnx.values import Value, axis_of, integers_of, on_device, placed, scalar_of

_Reduce = Callable[[ModuleType, Value, tuple[int, ...], bool], Value]


def reduction(reduce: _Reduce) -> Operation:
    """Return an operation that reduces along the axes of the attribute or the second input."""

    def compute(node: Node, x: Value, given: Value | None = None) -> Value:
        listed = node.integers("axes") if given is None else integers_of(given)
        keep = bool(node.integer("keepdims", 1))
        nothing = bool(node.integer("noop_with_empty_axes", 0))
        if not listed and nothing:
            axes: tuple[int, ...] = ()
        else:
            axes = tuple(axis_of(axis, x.ndim) for axis in listed) or tuple(range(x.ndim))
        module, (x,) = placed(x.shape, x)
        return reduce(module, x, axes, keep)

    return compute


def _called(name: str) -> _Reduce:
    def reduce(module: ModuleType, x: Value, axes: tuple[int, ...], keep: bool) -> Value:
        reduced: Value = getattr(module, name)(x, axis=axes, keepdims=keep)
        # numpy and jax.numpy widen small integers.
        return reduced.astype(x.dtype)

    return reduce


def _extreme(name: str, *, is_greatest: bool) -> _Reduce:
    plain = _called(name)

    def reduce(module: ModuleType, x: Value, axes: tuple[int, ...], keep: bool) -> Value:
        if any(x.shape[axis] == 0 for axis in axes):
            return _of_nothing(x, axes, keep, is_greatest=is_greatest)
        return plain(module, x, axes, keep)

    return reduce


def _of_nothing(x: Value, axes: tuple[int, ...], keep: bool, *, is_greatest: bool) -> Value:
    """Reduce axes without elements: return the datatype's lowest value for max, highest for min."""
    sizes = [
        1 if axis in axes else size for axis, size in enumerate(x.shape) if keep or axis not in axes
    ]
    if x.dtype.kind == "b":
        return jnp.full(sizes, not is_greatest, x.dtype)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.full(sizes, -jnp.inf if is_greatest else jnp.inf, x.dtype)
    limits = jnp.iinfo(x.dtype)
    return jnp.full(sizes, limits.min if is_greatest else limits.max, x.dtype)


def _mean(module: ModuleType, x: Value, axes: tuple[int, ...], keep: bool) -> Value:
    if x.dtype.kind in "iu":
        total: Value = module.sum(x, axis=axes, keepdims=keep)
        count = x.size // total.size
        return (total // count).astype(x.dtype)
    return _called("mean")(module, x, axes, keep)


def _l1(module: ModuleType, x: Value, axes: tuple[int, ...], keep: bool) -> Value:
    magnitudes: Value = module.abs(x)
    return _called("sum")(module, magnitudes, axes, keep)


def _l2(module: ModuleType, x: Value, axes: tuple[int, ...], keep: bool) -> Value:
    rooted: Value = module.sqrt(_sum_square(module, x, axes, keep))
    return rooted.astype(x.dtype)


def _log_sum(module: ModuleType, x: Value, axes: tuple[int, ...], keep: bool) -> Value:
    logarithm: Value = module.log(_called("sum")(module, x, axes, keep))
    return logarithm.astype(x.dtype)


def _log_sum_exp(_: ModuleType, x: Value, axes: tuple[int, ...], keep: bool) -> Value:
    return jax.nn.logsumexp(on_device(x), axis=axes, keepdims=keep)


def _sum_square(module: ModuleType, x: Value, axes: tuple[int, ...], keep: bool) -> Value:
    return _called("sum")(module, x * x, axes, keep)


def _where_extreme(name: str) -> Operation:
    def compute(node: Node, x: Value) -> Value:
        axis = axis_of(node.integer("axis", 0), x.ndim)
        keep = bool(node.integer("keepdims", 1))
        last = bool(node.integer("select_last_index", 0))
        x = on_device(x)
        found: jax.Array = getattr(jnp, name)(
            jnp.flip(x, axis) if last else x, axis=axis, keepdims=keep
        )
        return ((x.shape[axis] - 1 - found) if last else found).astype(jnp.int64)

    return compute


def _running(accumulate: Callable[..., jax.Array], first: int) -> Operation:
    def compute(node: Node, x: Value, axis: Value) -> Value:
        reverse, exclusive = node.integer("reverse", 0), node.integer("exclusive", 0)
        along = axis_of(scalar_of(axis), x.ndim)
        array = on_device(x)
        if exclusive:
            array = _shifted(array, along, backwards=bool(reverse), fill=first)
        return accumulate(array, axis=along, reverse=bool(reverse))

    return compute


def _shifted(x: jax.Array, axis: int, *, backwards: bool, fill: int) -> jax.Array:
    edge = jnp.full_like(jax.lax.slice_in_dim(x, 0, 1, axis=axis), fill)
    if backwards:
        return jnp.concatenate([jax.lax.slice_in_dim(x, 1, None, axis=axis), edge], axis)
    kept = jax.lax.slice_in_dim(x, 0, x.shape[axis] - 1, axis=axis)
    return jnp.concatenate([edge, kept], axis)


def _top_k(node: Node, x: Value, count: Value) -> tuple[Value, Value]:
    axis = axis_of(node.integer("axis", -1), x.ndim)
    largest = node.integer("largest", 1)
    node.integer("sorted", 1)  # with 0 any order is valid
    if x.dtype.kind == "u" and not largest:
        raise InvalidModel("largest 0 is not implemented for unsigned integers")
    moved = jnp.moveaxis(on_device(x), axis, -1)
    values, indices = jax.lax.top_k(moved if largest else -moved, scalar_of(count))
    values = values if largest else -values
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis).astype(jnp.int64)


_REDUCTIONS: dict[str, _Reduce] = {
    "ReduceL1": _l1,
    "ReduceL2": _l2,
    "ReduceLogSum": _log_sum,
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": _extreme("max", is_greatest=True),
    "ReduceMean": _mean,
    "ReduceMin": _extreme("min", is_greatest=False),
    "ReduceProd": _called("prod"),
    "ReduceSum": _called("sum"),
    "ReduceSumSquare": _sum_square,
}

REDUCTION: Family = {
    # The axes became an input in opset 13 (ReduceSum) or 18 (others).
    **{name: operator(reduction(reduce), 1) for name, reduce in _REDUCTIONS.items()},
    "ArgMax": operator(_where_extreme("argmax")),
    "ArgMin": operator(_where_extreme("argmin")),
    "CumProd": operator(_running(jax.lax.cumprod, 1), 1),
    "CumSum": operator(_running(jax.lax.cumsum, 0), 1),
    "TopK": operator(_top_k, 1),
}
