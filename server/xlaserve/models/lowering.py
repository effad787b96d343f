"""From a function and its parameters to an artifact that was seen to give the same."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.export import Exported

from xlaserve.errors import InvalidModel
from xlaserve.models import artifact
from xlaserve.models.artifact import BATCH_DIMENSION
from xlaserve.models.computation import Computation, lasting, to_file
from xlaserve.models.parameters import Parameters, flatten, has_64_bit
from xlaserve.tensors import Tensor, TensorSpec, describe

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_CHECKED_ROWS = 3
_RANDOM_INTEGERS_BELOW = 8
_TOLERANCES = {"FP64": 1e-9, "FP32": 1e-4, "FP16": 2e-2, "BF16": 5e-2}
"""Relative and absolute. The same operations run, but XLA may fuse them differently."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """An exported function, checked, not written yet."""

    data: bytes
    """The file of `jax.export`, for the time that JAX reads it."""
    computation: Computation
    """The same in the form that lasts."""
    parameters: Mapping[str, Tensor]
    outputs: tuple[TensorSpec, ...]


def lower(
    fn: Callable[..., object],
    params: object,
    inputs: Sequence[TensorSpec],
    *,
    outputs: Sequence[str] | None,
    batched: bool,
    platforms: Sequence[str],
    x64: bool | None,
) -> Lowered:
    """Export `fn(params, *inputs)` with the arrays of `params` as arguments, and run it back.

    Raises InvalidModel when it cannot be traced, is not what the inputs and outputs say, gives
    something else than `fn` on random inputs, or mixes the rows of a batch.
    """
    _check_platforms(platforms)
    wide = _is_wide(params, inputs, x64)
    with jax.enable_x64(wide), _no_source_locations():
        function = _Flat(fn, flatten(params, x64=wide), outputs)
        exported = _export(function, inputs, platforms, batched=batched)
        batch = BATCH_DIMENSION if batched else None
        specs = artifact.specs_of("output", function.output_names, exported.out_avals, batch)
        computation = lasting(exported)
        data = to_file(exported, computation)
        artifact.deserialize(bytearray(data), jax.__version__)
        read_back = artifact.from_computation(computation, jax.__version__)
        _check_runs_alike(read_back, function, inputs, specs, batched=batched)
    return Lowered(data, computation, function.parameters.arrays, specs)


def _check_platforms(platforms: Sequence[str]) -> None:
    for platform in platforms:
        if platform not in _PLATFORMS:
            raise InvalidModel(f"platform {platform}: expected one of {', '.join(_PLATFORMS)}")
    here = jax.export.default_export_platform()
    if here not in platforms:
        raise InvalidModel(
            f"platforms {', '.join(platforms)}: expected {here} among them, where the artifact is "
            "run back"
        )


def _is_wide(params: object, inputs: Sequence[TensorSpec], x64: bool | None) -> bool:
    wide = [spec for spec in inputs if spec.datatype.itemsize == 8]
    if x64 is None:
        return bool(wide) or has_64_bit(params) or bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    if wide and not x64:
        raise InvalidModel(f"input '{wide[0].name}' is {wide[0]}, which needs x64")
    return x64


@contextmanager
def _no_source_locations() -> Iterator[None]:
    """Keep the paths of the author's files out of the artifact; equal models are equal bytes."""
    before = jax.config.jax_traceback_in_locations_limit  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)


class _Flat:
    """A function of any pytree as one of flat lists: `(parameters, inputs) -> outputs`."""

    def __init__(
        self, fn: Callable[..., object], parameters: Parameters, outputs: Sequence[str] | None
    ) -> None:
        self.parameters = parameters
        self.output_names: tuple[str, ...] = ()
        """Known once the function was traced."""
        self._fn = fn
        self._outputs = outputs

    def __call__(self, leaves: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
        result = self._fn(self.parameters.unflatten(leaves), *inputs)
        named = _named(result, self._outputs)
        self.output_names = tuple(named)
        return list(named.values())

    def abstract_leaves(self) -> list[jax.ShapeDtypeStruct]:
        """Return shape, dtype and weak type of each array of the parameters."""
        arrays, weak_types = self.parameters.arrays.values(), self.parameters.weak_types
        return [
            jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=weak)
            for array, weak in zip(arrays, weak_types, strict=True)
        ]


def _named(result: object, names: Sequence[str] | None) -> dict[str, jax.Array]:
    """Return what a function returned by the names of the outputs, in their order."""
    pairs: dict[str, object]
    if isinstance(result, Mapping):
        missing = [name for name in names or () if name not in result]
        if missing:
            raise InvalidModel(f"the function returns no '{missing[0]}', it returns {list(result)}")
        pairs = {name: result[name] for name in names or result}
    else:
        values = list(result) if isinstance(result, tuple | list) else [result]
        if names is None:
            raise InvalidModel(
                "the function returns no dict, so its outputs need names: outputs=[...]"
            )
        if len(values) != len(names) or len(names) != len(set(names)):
            raise InvalidModel(
                f"the function returns {len(values)} outputs, got the names {list(names)}"
            )
        pairs = dict(zip(names, values, strict=True))
    return {name: _array(name, value) for name, value in pairs.items()}


def _array(name: str, value: object) -> jax.Array:
    if not isinstance(value, jax.Array | np.ndarray):
        raise InvalidModel(f"output '{name}' is a {type(value).__name__}, expected an array")
    return jnp.asarray(value)


def _export(
    function: _Flat, inputs: Sequence[TensorSpec], platforms: Sequence[str], *, batched: bool
) -> Exported:
    batch = jax.export.symbolic_shape(BATCH_DIMENSION) if batched else ()
    arguments = [
        jax.ShapeDtypeStruct((*batch, *spec.shape[len(batch) :]), spec.datatype.dtype)
        for spec in inputs
    ]

    def model(parameters: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
        return function(parameters, inputs)

    try:
        return jax.export.export(jax.jit(model), platforms=tuple(platforms))(
            function.abstract_leaves(), arguments
        )
    except InvalidModel:
        raise
    except Exception as error:
        hint = " (its batch dimension has no size while it is traced)" if batched else ""
        raise InvalidModel(f"the function cannot be exported{hint}: {error}") from error


# --- running it back ---------------------------------------------------------------------------


def _check_runs_alike(
    exported: Exported,
    function: _Flat,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    batched: bool,
) -> None:
    leaves = list(function.parameters.arrays.values())
    arguments = _random_inputs(inputs)
    run_back = jax.jit(exported.call)
    # Lowered first, because numpy arrays would not say which parameters are weakly typed.
    lowered = jax.jit(function.__call__).lower(function.abstract_leaves(), arguments)
    expected = lowered.compile()(leaves, arguments)
    got = run_back(leaves, arguments)
    _check_close(outputs, expected, got, "the artifact does not give what the function gives")
    if batched:
        more = run_back(leaves, [_with_zero_row(argument) for argument in arguments])
        rows = [output[:_CHECKED_ROWS] for output in more]
        _check_close(
            outputs,
            got,
            rows,
            "a row depends on the other rows of its batch, export it with max_batch_size=0 and "
            "fixed shapes",
        )


def _random_inputs(specs: Sequence[TensorSpec]) -> list[Tensor]:
    random = np.random.default_rng(0)
    return [
        _random(random, [_CHECKED_ROWS if size == -1 else size for size in spec.shape], spec)
        for spec in specs
    ]


def _random(random: np.random.Generator, shape: Sequence[int], spec: TensorSpec) -> Tensor:
    dtype = spec.datatype.dtype
    if dtype.kind in "iub":
        # Small, since many a model looks them up in a table.
        return random.integers(0, 2 if dtype.kind == "b" else _RANDOM_INTEGERS_BELOW, shape).astype(
            dtype
        )
    return random.standard_normal(shape).astype(dtype)


def _with_zero_row(tensor: Tensor) -> Tensor:
    return np.concatenate([tensor, np.zeros_like(tensor[:1])])


def _check_close(
    specs: Sequence[TensorSpec],
    expected: Sequence[jax.Array],
    got: Sequence[jax.Array],
    problem: str,
) -> None:
    for spec, want, have in zip(specs, expected, got, strict=True):
        left, right = np.asarray(want), np.asarray(have)
        if left.dtype != right.dtype or left.shape != right.shape:
            raise InvalidModel(
                f"output '{spec.name}': {problem}: expected "
                f"{describe(left.dtype.name, left.shape)}, got "
                f"{describe(right.dtype.name, right.shape)}"
            )
        tolerance = _TOLERANCES.get(spec.datatype.name, 0.0)
        left, right = left.astype(np.float64), right.astype(np.float64)
        if not np.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True):
            difference = np.nanmax(np.abs(left - right))
            raise InvalidModel(f"output '{spec.name}': {problem} (by up to {difference:.3g})")
