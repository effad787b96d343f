"""Compares an imported model with onnxruntime on random inputs."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from xlaserve.artifact import artifact, manifest, weights
from xlaserve.artifact.manifest import WEIGHTS
from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx import counted
from xlaserve.importers.onnx.allowance import Allowance, allowance
from xlaserve.importers.onnx.graph import Graph, Node
from xlaserve.importers.onnx.labels import Labels
from xlaserve.importers.onnx.signature import Inputs
from xlaserve.importers.onnx.watching import Watch
from xlaserve.tensors import Tensor, TensorSpec

BATCHES = (1, 3)
"""Batch sizes to compare."""

SECONDS = 600.0
"""Time limit of each onnxruntime run."""
MEMORY_BYTES = 16 << 30
"""Memory limit of an onnxruntime run, in addition to the memory used before it."""

_EXECUTING = ["ConstantFolding"]
"""onnxruntime optimizers that execute parts of the model while it is loaded. They are disabled,
because the time limit applies only to runs."""

_SEED = 0
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an output differs from onnxruntime's."""

    output: str
    absolute: float
    relative: float
    """The absolute difference, divided by the output's largest absolute value."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of the comparison."""

    batches: tuple[int, ...]
    """Batch sizes that were compared; 0 for fixed shapes."""
    worst: Difference
    runtime: str
    """Version of onnxruntime."""
    allowed: str = ""
    """Explains a limit that comes from quantisation; empty if it is the requested tolerance."""


def check(
    model: Path,
    directory: Path,
    graph: Graph,
    inputs: Inputs,
    *,
    tolerance: float,
    on_batch: Callable[[int, int], None] = lambda step, steps: None,
    labels: Labels = MappingProxyType({}),
    counted_axes: Mapping[str, int] = MappingProxyType({}),
) -> Checked | None:
    """Compare a version directory with onnxruntime on random inputs.

    Return None if onnxruntime is not installed. `labels` lists the class labels of outputs that are
    texts in onnxruntime and class indices here; `counted_axes` gives the row axis of outputs whose
    number of rows depends on the data. Raises InvalidModel if an output differs by more than its
    allowance.
    """
    try:
        import onnxruntime
    except ImportError:
        return None
    described = manifest.read(directory)
    ours = _artifact(directory)
    theirs = Reference(model, graph, inputs)
    cases = _cases(inputs)
    allowed = {spec.name: allowance(graph, spec, tolerance) for spec in described.outputs}
    found: list[Difference] = []
    for step, (batch, sizes) in enumerate(cases, start=1):
        on_batch(step, len(cases))
        given = random_inputs(graph, inputs.sized(sizes), batch * theirs.rows)
        names = [spec.name for spec in described.outputs]
        results = ours([given[spec.name] for spec in described.inputs])
        got = counted.cut(dict(zip(names, results, strict=True)), counted_axes)
        expected = dict(zip(got, theirs.run(given, list(got)), strict=True))
        found += [
            compared(
                spec,
                numbers_of(expected[spec.name], labels.get(spec.name, ())),
                got[spec.name],
                allowed[spec.name],
            )
            for spec in described.outputs
            if spec.name in got
        ]
    worst = max(found, key=lambda difference: difference.relative)
    return Checked(
        tuple(dict.fromkeys(batch for batch, _ in cases)),
        worst,
        onnxruntime.__version__,
        allowed[worst.output].why,
    )


def _cases(inputs: Inputs) -> list[tuple[int, dict[str, int]]]:
    """Return the batch sizes (0 for fixed shapes) to run, each with the dynamic dimensions' sizes.

    Of the sizes that are compiled, the smallest and the largest are compared.
    """
    batches = BATCHES if inputs.is_open else (0,)
    ends = [min, max] if inputs.compiled else [min]
    sizes = [{name: end(listed) for name, listed in inputs.compiled.items()} for end in ends]
    return [(batch, one) for one in sizes for batch in batches]


def compared(spec: TensorSpec, expected: Tensor, got: Tensor, allowed: Allowance) -> Difference:
    """Return the difference of two results; raises InvalidModel if it exceeds the allowance."""
    if expected.shape != got.shape:
        raise InvalidModel(
            f"output '{spec.name}': expected the shape {list(expected.shape)} as in onnxruntime,"
            f" got {list(got.shape)}"
        )
    want, have = expected.astype(np.float64), got.astype(np.float64)
    same = (want == have) | (np.isnan(want) & np.isnan(have))
    with np.errstate(invalid="ignore"):
        gaps = np.where(same, 0.0, np.abs(want - have))
    # NaN or infinity on one side only counts as an infinite difference.
    gaps = np.nan_to_num(gaps, nan=np.inf, posinf=np.inf)
    absolute = float(gaps.max(initial=0.0))
    largest = float(np.abs(want[np.isfinite(want)]).max(initial=0.0))
    relative = absolute / largest if largest else absolute
    if not allowed.covers(absolute, relative):
        raise InvalidModel(
            f"output '{spec.name}' differs from onnxruntime's by {absolute:.3g}, which is "
            f"{relative:.3g} of its largest value; allowed: {allowed}"
        )
    return Difference(spec.name, absolute, relative)


def _artifact(directory: Path) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    described = manifest.read(directory)
    exported = artifact.read(directory, described)
    tensors = dict(weights.read(directory, WEIGHTS, described.files[WEIGHTS]))
    leaves = [tensors[name] for name in described.parameters]
    call = jax.jit(exported.call)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        with jax.enable_x64(True):
            return [np.asarray(output) for output in call(leaves, list(inputs))]

    return run


class Reference:
    """The model in onnxruntime on the CPU, with limits of time and memory."""

    def __init__(
        self,
        path: Path,
        graph: Graph,
        inputs: Inputs,
        *,
        seconds: float = SECONDS,
        most_bytes: int = MEMORY_BYTES,
    ) -> None:
        import onnxruntime

        self._seconds, self._most_bytes = seconds, most_bytes
        self._run_options = onnxruntime.RunOptions
        self._constants = inputs.constants
        self._axes = inputs.batch_axes
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(
                str(path),
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=_EXECUTING,
            )
        # onnxruntime's exceptions have no common base class.
        except Exception as error:
            raise InvalidModel(_unchecked(error)) from error
        axes = self._axes
        sizes = [item.shape[axes.get(item.name, 0)] for item in graph.inputs if item.shape]
        fixed = {size for size in sizes if isinstance(size, int)}
        self.rows = fixed.pop() if len(fixed) == 1 and len(sizes) == len(graph.inputs) else 1
        """Rows per run: the model's batch size if it is fixed, otherwise 1."""
        self._columns = _zip_maps(graph)
        fixed_here = bool(sizes) and all(isinstance(size, int) for size in sizes)
        self._piecewise = inputs.is_open and fixed_here

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> list[Tensor]:
        """Return the outputs.

        For a model with a fixed batch size the inputs are split into batches.
        """
        total = max((len(value) for value in inputs.values() if value.ndim), default=0)
        if not self._piecewise or total <= self.rows:
            return self._run(inputs, outputs)
        parts = [
            self._run({name: x[start : start + self.rows] for name, x in inputs.items()}, outputs)
            for start in range(0, total, self.rows)
        ]
        return [np.concatenate(part) for part in zip(*parts, strict=True)]

    def _run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> list[Tensor]:
        taken = {item.name for item in self._session.get_inputs()}
        moved = {name: self._moved(name, x) for name, x in inputs.items()}
        given = {name: x for name, x in {**moved, **self._constants}.items() if name in taken}
        options = self._run_options()
        watch = Watch(options, self._seconds, self._most_bytes)
        try:
            with watch:
                found = self._session.run(list(outputs), given, options)
        except Exception as error:
            raise InvalidModel(_unchecked(watch.reason or error)) from error
        return [
            self._moved(name, _as_tensor(value, self._columns.get(name, ())), back=True)
            for name, value in zip(outputs, found, strict=True)
        ]

    def _moved(self, name: str, x: Tensor, *, back: bool = False) -> Tensor:
        """Move the batch from the front to the model's batch axis, or with `back` to the front."""
        ends = (0, self._axes.get(name, 0))
        return np.moveaxis(x, *(ends[::-1] if back else ends)) if any(ends) else x


def _unchecked(error: Exception | str) -> str:
    return (
        f"onnxruntime cannot run the model: {str(error)[:_SHOWN_CHARACTERS]}; import it without a"
        " comparison with --no-check"
    )


def numbers_of(value: Tensor, labels: Sequence[str]) -> Tensor:
    """Replace texts by their indices in `labels`, -1 if missing; return numbers unchanged."""
    if value.dtype.kind not in "OU":
        return value
    places = {text: place for place, text in enumerate(labels)}
    found = [places.get(str(text), -1) for text in value.reshape(-1)]
    return np.asarray(found, np.int64).reshape(value.shape)


def _as_tensor(value: Any, columns: Sequence[int | str]) -> Tensor:
    """Convert ZipMap's list of maps to a tensor."""
    if isinstance(value, list):
        # Maps are sorted by key; the tensor's columns follow the order in the model.
        return np.asarray([[row[column] for column in columns or row] for row in value])
    return np.asarray(value)


def _zip_maps(graph: Graph) -> dict[str, Sequence[int | str]]:
    """Return the keys of ZipMap outputs, by output name."""
    found: dict[str, Sequence[int | str]] = {}
    for node in graph.nodes:
        if node.operator == "ZipMap":
            read = replace(node, _read=set())
            names = read.texts("classlabels_strings") or read.integers("classlabels_int64s")
            found[node.outputs[0]] = names
    return found


# --- Inputs ------------------------------------------------------------------------------------


def random_inputs(graph: Graph, specs: Sequence[TensorSpec], rows: int) -> dict[str, Tensor]:
    """Return random inputs with `rows` as the size of dynamic dimensions."""
    random = np.random.default_rng(_SEED)
    return {spec.name: _random(random, spec, rows, _integers_below(graph, spec)) for spec in specs}


def _random(random: np.random.Generator, spec: TensorSpec, rows: int, below: int) -> Tensor:
    shape = [rows if size == -1 else size for size in spec.shape]
    dtype = spec.datatype.dtype
    if dtype.kind in "iub":
        return random.integers(0, below, shape).astype(dtype)
    return random.standard_normal(shape).astype(dtype)


def _integers_below(graph: Graph, spec: TensorSpec) -> int:
    """Return an exclusive bound for integers: 256 (UINT8), the indexed table's size, or 2."""
    if spec.datatype.name == "UINT8":
        return 256
    tables = [_table(graph, node) for node in graph.nodes if _looks_up(graph, node, spec.name)]
    return min((size for size in tables if size), default=2)


def _looks_up(graph: Graph, node: Node, name: str) -> bool:
    if node.operator != "Gather":
        return False
    same = {name} | {
        item.outputs[0]
        for item in graph.nodes
        if item.operator in ("Cast", "Identity") and name in item.inputs
    }
    return node.inputs[1] in same


def _table(graph: Graph, node: Node) -> int:
    table = graph.constants.get(node.inputs[0])
    axis = node.attributes.get("axis", 0)
    return 0 if table is None or not isinstance(axis, int) else int(table.shape[axis])
