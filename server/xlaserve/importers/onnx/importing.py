"""Imports an ONNX file as a version directory, and compares it with onnxruntime."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from xlaserve.artifact import manifest, version_numbers
from xlaserve.artifact.manifest import Manifest
from xlaserve.authoring.cpu.optimizing import optimize
from xlaserve.authoring.export import Exportable
from xlaserve.errors import InvalidModel
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.files.temporary import TemporaryDirectory
from xlaserve.importers.onnx import checking, configuring, edges, planning, signature
from xlaserve.importers.onnx.checking import Checked
from xlaserve.importers.onnx.given import with_constants
from xlaserve.importers.onnx.graph import DEFAULT_LIMIT_BYTES, Graph, Model
from xlaserve.importers.onnx.labels import Labels, with_numbers
from xlaserve.importers.onnx.planning import Plan
from xlaserve.importers.onnx.signature import Inputs
from xlaserve.importers.onnx.texts import Texts, refuse, without_casts
from xlaserve.runtime.loaded import Stage

OnStage = Callable[[Stage], None]

DEFAULT_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an import."""

    version: int | None = None
    """Version number to write; None for the number after the highest existing one."""
    max_batch_size: int | None = None
    """Largest batch. None means 32 if every input has a dynamic first dimension, otherwise 0. With
    0, inputs with a dynamic first dimension take any number of rows, without batching."""
    dimensions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Sizes of dynamic dimensions, by dimension name; with several sizes a program is compiled for
    each."""
    shapes: Mapping[str, Sequence[int | str]] = field(default_factory=dict)
    """Input shapes that override the model's; -1 is the batch, and names refer to `dimensions`."""
    constants: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values, as text, of inputs that become constants."""
    batch_axes: Mapping[str, int] = field(default_factory=dict)
    """Batch axis of inputs and outputs whose first dimension is not the batch."""
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Input shapes from config.pbtxt, -1 for a dynamic size; used only for sizes that the model
    leaves open."""
    outputs: Sequence[str] = ()
    """Outputs to keep; empty for all."""
    platforms: Sequence[str] | None = None
    """Platforms to export for; None for all of CPU, CUDA and TPU that have every kernel."""
    check: bool = True
    """Whether to compare with onnxruntime, if it is installed."""
    tolerance: float = DEFAULT_TOLERANCE
    """Accepted difference relative to an output's largest absolute value."""
    limit_bytes: int = DEFAULT_LIMIT_BYTES
    """Size limit of the model including its external data."""
    labels: Sequence[str] = ()
    """Class labels for the output that has a score per class."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Parameters to write to the model's config.pbtxt."""
    batch_independent: bool | None = None
    """Declares whether rows are independent; None to prove it."""
    with_texts: bool = False
    """Whether the caller converts text inputs and outputs on the host."""
    roots: Roots = ANYWHERE
    """Directories that the file must be in after symlinks are resolved."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import."""

    path: Path
    manifest: Manifest
    producer: str
    opset: int
    nodes: int
    """Number of nodes after constant folding."""
    checked: Checked | None
    """Result of the comparison with onnxruntime; None if it was skipped."""
    notice: str = ""
    """Why requests cannot be batched, and unsupported platforms; empty if there is nothing to
    report."""
    texts: Texts = field(default_factory=Texts)
    """Tensors that are text in the model and numbers in the version directory."""
    labels: str = ""
    """Message about the label file and config.pbtxt; empty if there are none."""


def import_model(
    path: Path,
    directory: Path,
    options: Options | None = None,
    on_stage: OnStage = lambda stage: None,
) -> Imported:
    """Convert a model to a version directory of `directory` (REPOSITORY/NAME) and return it.

    The version directory is published atomically, after the comparison with onnxruntime. Raises
    InvalidModel, and FileExistsError if the version exists.
    """
    options = options or Options()
    read = _reader()
    target = version_numbers.target(directory, options.version)
    on_stage(Stage("reading"))
    model = read(path, options.limit_bytes, options.roots)
    texts = Texts()
    labels: Labels = {}
    if options.with_texts:
        graph, texts = without_casts(model.graph)
    else:
        graph, labels = with_numbers(model.graph)
    model = replace(model, graph=graph)
    refuse(model.graph)
    graph, constants = with_constants(model.graph, options.constants)
    _check_axes(graph, options.batch_axes)
    inputs = signature.resolve(
        graph.inputs,
        shapes=options.shapes,
        dimensions=options.dimensions,
        sizes=options.sizes,
        max_batch_size=options.max_batch_size,
        batch_axes=options.batch_axes,
    )
    inputs = replace(inputs, constants=constants)
    with jax.enable_x64(True):
        plan = planning.plan(
            graph,
            inputs.abstract(),
            options.outputs,
            lambda step, steps: on_stage(Stage("converting", step, steps)),
        )
    _check_counted(plan, inputs)
    on_stage(Stage("exporting"))
    notices: list[str] = []
    made = exportable(plan, inputs, options.platforms, batch_independent=options.batch_independent)
    with TemporaryDirectory.beside(directory) as staging:
        written = made.write(staging.path / target.name, on_notice=notices.append)
        checked = None
        if options.check and not texts:  # onnxruntime would need the inputs as text
            checked = checking.check(
                path,
                written,
                graph,
                inputs,
                tolerance=options.tolerance,
                on_batch=lambda step, steps: on_stage(Stage("checking", step, steps)),
                labels=labels,
                counted_axes=plan.counted,
            )
        if options.labels:
            labels = configuring.named(manifest.read(written), options.labels)
        version_numbers.publish(written, target)
    described = manifest.read(target)
    note = configuring.write(directory, described, labels, options.parameters)
    return Imported(
        target,
        described,
        model.producer,
        model.opset,
        len(plan.nodes),
        checked,
        notice="; ".join(filter(None, (*notices, edges.said_of(graph)))),
        texts=texts,
        labels=note,
    )


def exportable(
    plan: Plan,
    inputs: Inputs,
    platforms: Sequence[str] | None = None,
    *,
    batch_independent: bool | None = None,
) -> Exportable:
    """Convert a plan to an Exportable whose parameters are arguments."""
    names = [spec.name for spec in inputs.specs]

    axes = inputs.batch_axes

    def model(parameters: dict[str, jax.Array], *tensors: jax.Array) -> dict[str, jax.Array]:
        given = {
            name: jnp.moveaxis(tensor, 0, axes[name]) if axes.get(name) else tensor
            for name, tensor in zip(names, tensors, strict=True)
        }
        return {
            name: jnp.moveaxis(tensor, axes[name], 0) if axes.get(name) else tensor
            for name, tensor in plan(parameters, given).items()
        }

    return Exportable(
        optimize(model),
        plan.parameters,
        inputs.exported(),
        plan.outputs,
        inputs.max_batch_size,
        platforms,
        # ONNX uses 64-bit integers everywhere, also in outputs.
        x64=True,
        batch_independent=batch_independent,
        compiled_shapes=inputs.compiled or None,
    )


def _check_counted(plan: Plan, inputs: Inputs) -> None:
    """Raise InvalidModel if a plan has both a dynamic batch and data-dependent row counts."""
    if plan.counted and inputs.is_open:
        raise InvalidModel(
            f"output '{next(iter(plan.counted))}' has a data-dependent number of rows, so the"
            f" first dimension of input '{inputs.specs[0].name}' cannot be open: set its size"
            " with --shape or --dim"
        )


def _check_axes(graph: Graph, axes: Mapping[str, int]) -> None:
    known = [*(item.name for item in graph.inputs), *graph.outputs]
    for name in axes:
        if name not in known:
            raise InvalidModel(
                f"the model has no input or output '{name}', it has {', '.join(known)}"
            )


def _reader() -> Callable[[Path, int, Roots], Model]:
    """Return the function that reads a file; raises InvalidModel if onnx is not installed."""
    try:
        from xlaserve.importers.onnx import reading
    except ImportError as error:
        raise InvalidModel(
            "reading ONNX files requires additional packages: pip install 'xlaserve[onnx]'"
            f" ({error})"
        ) from error
    return reading.read
