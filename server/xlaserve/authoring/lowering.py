"""Lowers a function and its parameters to an artifact, and compares their results."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.export import Exported

from xlaserve.artifact import artifact, dimensions, weights
from xlaserve.artifact.artifact import BATCH_DIMENSION
from xlaserve.artifact.computation import Computation, lasting, text_of, to_file
from xlaserve.artifact.parameters import Parameters, flatten, has_64_bit
from xlaserve.artifact.trees import flatten_outputs
from xlaserve.errors import InvalidModel
from xlaserve.row_proofs import neighbours, prove_each, tolerances
from xlaserve.row_proofs.tolerances import TOLERANCES
from xlaserve.row_proofs.verdict import Independence, Verdict
from xlaserve.runtime.programs import trials
from xlaserve.runtime.programs.compilers.jobs import Packed
from xlaserve.runtime.programs.trials import Outcome, Subject
from xlaserve.tensors import Tensor, TensorSpec, describe

PLATFORMS = ("cpu", "cuda", "tpu")
"""Default platforms of an artifact; those without a kernel are skipped."""


KNOWN_PLATFORMS = (*PLATFORMS, "rocm")
_WITHOUT_KERNEL = re.compile(
    r"for primitive '(?P<primitive>[^']+)' not found for platforms? (?P<platforms>[\w\[\]', ]+)"
)

_CHECKED_ROWS = 3
_LOCATED_FRAMES = 10
"""Maximum number of stack frames recorded as source location, including frames of libraries."""

_HINTS = (
    " (its batch dimension has no fixed size during tracing)",
    " (its dynamic dimensions have no fixed size during tracing)",
)
_RANDOM_INTEGERS_BELOW = 8

_PYTHON_CALLS = {
    "debug_print": "jax.debug.print",
    "debug_callback": "jax.debug.callback",
    "pure_callback": "jax.pure_callback",
    "io_callback": "jax.experimental.io_callback",
}
"""Primitives that call Python during execution, with the functions that authors call."""
_CALLS_PYTHON = (
    "calls Python, which an artifact cannot contain: remove the call, or serve a Python model"
)


@dataclass(frozen=True, slots=True)
class Lowered:
    """An exported and verified function, not yet written."""

    data: bytes
    """The `jax.export` artifact; JAX guarantees to read it for six months."""
    computation: Computation
    """The same function as StableHLO, which stays readable for years."""
    parameters: Mapping[str, Tensor]
    outputs: tuple[TensorSpec, ...]
    verdicts: Mapping[str, Verdict]
    """Row-independence verdicts by platform; empty if the first dimension is fixed."""
    find_difference: Callable[[], Outcome]
    """Runs a thorough trial of row independence."""
    find_contradiction: Callable[[], Outcome]
    """Runs a brief trial that may refute a proof of row independence."""
    not_for: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Default platforms that were skipped, each with the primitive that has no kernel there."""


@dataclass(frozen=True, slots=True)
class OpenShapes:
    """The dynamic dimensions of the inputs."""

    batched: bool
    """Whether the first dimensions are dynamic, and may be the batch."""
    names: Sequence[Sequence[str | int]] = ()
    """Shapes of the inputs with named dimensions; empty if no dimension is dynamic."""
    checked: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Sizes of the dynamic dimensions in the test run, by name."""

    def shapes(self, inputs: Sequence[TensorSpec]) -> list[tuple[object, ...]]:
        """Return the input shapes with symbolic dimensions; raises InvalidModel."""
        scope = jax.export.SymbolicScope()
        symbols: dict[str | int, object] = {
            name: dimensions.symbolic(name, scope)[0] for name in (BATCH_DIMENSION, *self.checked)
        }
        symbols[-1] = symbols[BATCH_DIMENSION]
        return [
            tuple(symbols.get(size, size) for size in shape)
            for shape in self.names or [spec.shape for spec in inputs]
        ]

    def checked_shapes(self, inputs: Sequence[TensorSpec]) -> list[tuple[int, ...]]:
        """Return the input shapes of the test run."""
        written = self.names or [spec.shape for spec in inputs]
        return [tuple(self._checked(size) for size in shape) for shape in written]

    def _checked(self, size: str | int) -> int:
        if isinstance(size, str):
            return self.checked[size]
        return _CHECKED_ROWS if size == -1 else size


def lower(
    fn: Callable[..., object],
    params: object,
    inputs: Sequence[TensorSpec],
    *,
    outputs: Sequence[str] | None,
    shapes: OpenShapes,
    platforms: Sequence[str] | None,
    x64: bool | None,
    trial_seconds: float = trials.SECONDS,
) -> Lowered:
    """Export `fn(params, *inputs)` with the arrays of `params` as arguments, and verify it.

    If `platforms` is None, those of `PLATFORMS` are used for which every operation has a kernel. A
    function with loops first runs in a separate process, limited to `trial_seconds` of CPU time.

    Raises InvalidModel if the function cannot be traced, does not match the declared inputs and
    outputs, does not terminate, or differs from its artifact on random inputs.
    """
    _check_platforms(PLATFORMS if platforms is None else platforms)
    wide = is_wide(params, inputs, x64)
    with jax.enable_x64(wide), _source_locations(0):
        function = _Flat(fn, _storable(flatten(params, x64=wide)), outputs)
        not_for: dict[str, str] = {}
        if platforms is None:
            exported = _export_where_possible(function, inputs, shapes, not_for)
        else:
            exported = _export(function, inputs, platforms, shapes)
        batch = BATCH_DIMENSION if shapes.batched else None
        sized = bool(shapes.checked)
        specs = artifact.specs_of(
            "output", function.output_names, exported.out_avals, batch, sized=sized
        )
        computation = lasting(exported)
        data = to_file(exported, computation)
        artifact.deserialize(bytearray(data), jax.__version__)
        read_back = artifact.from_computation(computation, jax.__version__)
        parameters = function.parameters.arrays
        trial = _Trial(
            _subject(read_back, list(parameters.values()), inputs, specs, shapes, wide=wide),
            jax.jit(read_back.call),
            trial_seconds,
        )
        trial.check_ends()
        _check_runs_alike(trial.call, function, inputs, specs, shapes)
        verdicts: Mapping[str, Verdict] = {}
        if shapes.batched:
            names, count = function.output_names, len(parameters)
            again = partial(_export, function, inputs, exported.platforms, shapes)
            verdicts = _verdicts(
                lambda e: prove_each(e, count, names, shapes.checked), read_back, again
            )
    return Lowered(
        data,
        computation,
        parameters,
        specs,
        verdicts,
        partial(trial.made, is_thorough=True),
        partial(trial.made, is_thorough=False),
        MappingProxyType(not_for),
    )


def _storable(parameters: Parameters) -> Parameters:
    """Raise InvalidModel for a parameter whose dtype cannot be stored."""
    for name, array in parameters.arrays.items():
        weights.dtype_name(name, array)
    return parameters


def _check_platforms(platforms: Sequence[str]) -> None:
    for platform in platforms:
        if platform not in KNOWN_PLATFORMS:
            known = ", ".join(KNOWN_PLATFORMS)
            raise InvalidModel(f"platform {platform}: expected one of {known}")
    here = jax.export.default_export_platform()
    if here not in platforms:
        raise InvalidModel(
            f"platforms {', '.join(platforms)}: expected {here} among them, where the export"
            " executes the artifact to check it"
        )


def is_wide(params: object, inputs: Sequence[TensorSpec], x64: bool | None) -> bool:
    """Tell whether 64-bit types must be enabled for tracing; raises InvalidModel."""
    wide = [spec for spec in inputs if spec.datatype.itemsize == 8]
    if x64 is None:
        return bool(wide) or has_64_bit(params) or bool(cast("Any", jax.config).jax_enable_x64)
    if wide and not x64:
        raise InvalidModel(f"input '{wide[0].name}' is {wide[0]}, which needs x64")
    return x64


@contextmanager
def _source_locations(most: int) -> Iterator[None]:
    """Within this context, lowering records this many frames of source locations.

    Artifacts are written with none: they contain no paths, and equal models give equal bytes.
    """
    before = cast("Any", jax.config).jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", most)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)


class _Flat:
    """Wraps a function of pytrees as one of flat lists: `(parameters, inputs) -> outputs`."""

    def __init__(
        self, fn: Callable[..., object], parameters: Parameters, outputs: Sequence[str] | None
    ) -> None:
        self.parameters = parameters
        self.output_names: tuple[str, ...] = ()
        """Set once the function has been traced."""
        self._fn = fn
        self._outputs = outputs

    def __call__(self, leaves: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
        result = self._fn(self.parameters.unflatten(leaves), *inputs)
        found = named(result, self._outputs)
        self.output_names = tuple(found)
        return list(found.values())

    def abstract_leaves(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shape, dtype and weak type of each parameter array."""
        arrays, weak_types = self.parameters.arrays.values(), self.parameters.weak_types
        return [
            jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=weak)
            for array, weak in zip(arrays, weak_types, strict=True)
        ]


def named(result: object, names: Sequence[str] | None) -> dict[str, jax.Array]:
    """Return the results of a function by output name, in order.

    The arrays in a nested output have names such as `scores.0`.
    """
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
                "the function does not return a dict, so name its outputs: outputs=[...]"
            )
        if len(values) != len(names) or len(names) != len(set(names)):
            raise InvalidModel(
                f"the function returns {len(values)} outputs, got the names {list(names)}"
            )
        pairs = dict(zip(names, values, strict=True))
    flat = flatten_outputs({str(name): value for name, value in pairs.items()})
    return {name: _array(name, value) for name, value in flat.items()}


def _array(name: str, value: object) -> jax.Array:
    if not isinstance(value, jax.Array | np.ndarray):
        raise InvalidModel(f"output '{name}' is a {type(value).__name__}, expected an array")
    return jnp.asarray(value)


def _export(
    function: _Flat, inputs: Sequence[TensorSpec], platforms: Sequence[str], shapes: OpenShapes
) -> Exported:
    arguments = [
        jax.ShapeDtypeStruct(shape, spec.datatype.dtype)
        for spec, shape in zip(inputs, shapes.shapes(inputs), strict=True)
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
        hint = _HINTS[bool(shapes.checked)] if shapes.batched or shapes.checked else ""
        found = _python_call(model, function.abstract_leaves(), arguments)
        text = f"{hint}: {error}" if found is None else f": {found} {_CALLS_PYTHON}"
        raise InvalidModel(f"the function cannot be exported{text}") from error


def _python_call(model: Callable[..., object], *arguments: object) -> str | None:
    """Return the JAX function through which a model calls Python, or None if it does not."""
    with suppress(Exception):  # fails like the export, whose error is reported
        return next(_python_calls(jax.make_jaxpr(model)(*arguments)), None)
    return None


def _python_calls(traced: Any) -> Iterator[str]:
    """Yield the JAX functions through which a traced function calls Python."""
    for equation in getattr(traced, "jaxpr", traced).eqns:
        name = _PYTHON_CALLS.get(equation.primitive.name)
        if name is not None:
            yield name
        for part in jax.tree.leaves(list(equation.params.values())):
            if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                yield from _python_calls(part)


def _export_where_possible(
    function: _Flat, inputs: Sequence[TensorSpec], shapes: OpenShapes, not_for: dict[str, str]
) -> Exported:
    """Export for PLATFORMS, and record the platforms that lack a kernel in `not_for`."""
    here = jax.export.default_export_platform()
    while True:
        try:
            platforms = [name for name in PLATFORMS if name not in not_for]
            return _export(function, inputs, platforms, shapes)
        except InvalidModel as error:
            missing = _WITHOUT_KERNEL.search(str(error))
            found = re.findall(r"\w+", missing["platforms"]) if missing else []
            if missing is None or here in found or not set(found) - set(not_for):
                raise
            not_for |= dict.fromkeys(found, missing["primitive"])


# --- row independence ---------------------------------------------------------------------


def _verdicts(
    prove_it: Callable[[Exported], Mapping[str, Verdict]],
    exported: Exported,
    again: Callable[[], Exported],
) -> Mapping[str, Verdict]:
    """Return the verdicts on an artifact, with the source line that prevents a proof.

    To find the line, `again` exports the function with source locations.
    """
    verdicts = prove_it(exported)
    if all(one.independence is Independence.PROVED for one in verdicts.values()):
        return verdicts
    with _source_locations(_LOCATED_FRAMES):
        found = prove_it(again())
    return {
        name: replace(one, location=found[name].location) if _is_alike(one, found[name]) else one
        for name, one in verdicts.items()
    }


def _is_alike(one: Verdict, other: Verdict) -> bool:
    return (one.independence, one.operation) == (other.independence, other.operation)


def _subject(
    exported: Exported,
    leaves: Sequence[Tensor],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    shapes: OpenShapes,
    *,
    wide: bool,
) -> Subject:
    sized = [
        replace(spec, shape=tuple(shape))
        for spec, shape in zip(inputs, shapes.checked_shapes(inputs), strict=True)
    ]
    packing = Packed(len(leaves), (), {}, ())
    return Subject("the model", "", exported, sized, outputs, leaves, packing, wide)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Trials of an artifact, in a separate process if it has loops, which may not terminate."""

    subject: Subject
    call: Callable[..., Any]
    """The artifact's jitted function."""
    seconds: float

    def check_ends(self) -> None:
        """Raise InvalidModel unless the function terminates on the inputs of the test run."""
        if not self.subject.has_loops:
            return
        outcome = trials.tried(
            self.subject,
            seconds=self.seconds,
            is_thorough=False,
            is_compared=False,
            first=[tuple(spec.shape) for spec in self.subject.inputs],
            is_of_zeros=False,
        )
        if outcome.never_began:
            raise InvalidModel(
                f"a loop of the function did not end on made-up inputs: {outcome.unfinished};"
                " raise trial_seconds if it is only slow"
            )

    def made(self, *, is_thorough: bool) -> Outcome:
        """Run the trial of row independence."""
        if self.subject.has_loops:
            return trials.tried(self.subject, seconds=self.seconds, is_thorough=is_thorough)
        inputs, outputs = self.subject.inputs, self.subject.outputs
        if is_thorough:
            return Outcome(neighbours.find_difference(self._run, inputs, outputs))
        least = partial(_tolerance, self.subject.exported)
        return Outcome(neighbours.find_contradiction(self._run, inputs, outputs, least=least))

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with jax.enable_x64(self.subject.is_wide):
            outputs = self.call(list(self.subject.leaves), list(tensors))
            return [np.asarray(output) for output in outputs]


def _tolerance(exported: Exported) -> float:
    return tolerances.of_module(text_of(exported.mlir_module_serialized))


# --- verification against the function ---------------------------------------------------------


def _check_runs_alike(
    run_back: Callable[..., Any],
    function: _Flat,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    shapes: OpenShapes,
) -> None:
    leaves = list(function.parameters.arrays.values())
    arguments = _random_inputs(inputs, shapes.checked_shapes(inputs))
    # Lower with abstract parameters, because numpy arrays have no weak types.
    lowered = jax.jit(function.__call__).lower(function.abstract_leaves(), arguments)
    expected = lowered.compile()(leaves, arguments)
    got = run_back(leaves, arguments)
    _check_close(outputs, expected, got, "the artifact's results differ from the function's")


def _random_inputs(specs: Sequence[TensorSpec], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    random = np.random.default_rng(0)
    return [_random(random, shape, spec) for spec, shape in zip(specs, shapes, strict=True)]


def _random(random: np.random.Generator, shape: Sequence[int], spec: TensorSpec) -> Tensor:
    dtype = spec.datatype.dtype
    if dtype.kind in "iub":
        # Small, because integers are often indices into a table.
        return random.integers(0, 2 if dtype.kind == "b" else _RANDOM_INTEGERS_BELOW, shape).astype(
            dtype
        )
    return random.standard_normal(shape).astype(dtype)


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
        # Used as both the relative and the absolute tolerance.
        tolerance = TOLERANCES.get(spec.datatype.name, 0.0)
        left, right = left.astype(np.float64), right.astype(np.float64)
        if not np.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True):
            difference = np.nanmax(np.abs(left - right))
            raise InvalidModel(f"output '{spec.name}': {problem} (by up to {difference:.3g})")
