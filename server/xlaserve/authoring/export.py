"""Exports a JAX function and its parameters to a version directory.

def predict(params, image):
    return jax.nn.softmax(image.reshape(-1, 64) @ params["w"] + params["b"])

export_model(
    predict, params, {"image": ("FP32", [-1, 8, 8])}, "models/digits/1",
    outputs=["probabilities"],
)
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import structlog

from xlaserve import build
from xlaserve.artifact import manifest, parameter_files, weights
from xlaserve.artifact.artifact import durable_of
from xlaserve.artifact.computation import not_lasting
from xlaserve.artifact.manifest import ARTIFACT, STABLEHLO, WEIGHTS, Manifest
from xlaserve.artifact.shapes import TRIED_SIZE
from xlaserve.artifact.steps import Steps
from xlaserve.artifact.training_layers import said_of_module
from xlaserve.artifact.trees import Nesting
from xlaserve.authoring import read_back
from xlaserve.authoring.declared import (
    Inputs,
    checked_sizes,
    flattened,
    input_specs,
    max_batch_of,
    shapes_of,
)
from xlaserve.authoring.lowering import Lowered, OpenShapes, lower
from xlaserve.authoring.training_mode import refused_in_training
from xlaserve.errors import InvalidModel, InvalidReference
from xlaserve.files import files
from xlaserve.files.references import load_reference
from xlaserve.files.temporary import TemporaryDirectory
from xlaserve.model_config.buckets import MAX_BUCKETS
from xlaserve.row_proofs.verdict import Independence, Verdict, worst
from xlaserve.runtime.programs.trials import SECONDS, Outcome, refused_proof
from xlaserve.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Exportable:
    """A model that is ready to be exported; `xlaserve export FILE.py:NAME` looks for one.

    `fn`, `params`, `inputs`, `outputs`, `max_batch_size`, `platforms`, `x64`, `batch_independent`,
    `compiled_shapes`, `max_on_demand_shapes`, `trial_seconds` and `training_mode` are arguments of
    `export_model`.
    """

    fn: Callable[..., object]
    """The function to export, called as `fn(params, *inputs)`: plain or jitted; returns a dict, a
    tuple or one array."""
    params: object
    """Any pytree. Its arrays are stored in the weights file; its other leaves are constants. With
    `xlaserve export --params` the arrays may be `jax.ShapeDtypeStruct`."""
    inputs: Inputs
    """Name, datatype and shape of each input, in the order of the arguments. -1 is the batch; a
    name such as "s" is another dynamic dimension, and equal names stand for equal sizes."""
    outputs: Sequence[str] | None = None
    """Names of the results of `fn`; None if it returns a dict."""
    max_batch_size: int | None = None
    """Maximum number of rows per request. Requests are batched if it can be proved that this
    changes no answer; each server proves it for its platform. None means 64 if every input starts
    with -1. 0 means any number of rows, never batched; use it for fixed shapes as well."""
    platforms: Sequence[str] | None = None
    """Platforms of the artifact, which must include the one that exports it. None means CPU, CUDA
    and TPU, except those that lack a kernel for one of the function's operations."""
    x64: bool | None = None
    """Whether 64-bit types are enabled while `fn` is traced. None enables them if an input or a
    parameter has one, or if JAX is configured so."""
    batch_independent: bool | None = None
    """Whether each row of a batch is computed independently of the others. None leaves that to a
    proof; if it fails on all platforms, max_batch_size becomes 0. True declares what cannot be
    proved; a trial checks it, and the export fails if the trial or the proof refutes it. With False
    nothing is padded or batched, and every batch size is compiled, at most 64."""
    compiled_shapes: Mapping[str, Sequence[int]] | None = None
    """Sizes of dynamic dimensions to compile with the load, by name: `{"s": [32, 128]}`."""
    max_on_demand_shapes: int = 0
    """Maximum number of other sizes that are compiled on demand. The model configuration can
    override this field, `batch_independent` and `compiled_shapes`; the server also has a limit."""
    trial_seconds: float = SECONDS
    """CPU seconds that the trial of a function with loops may take, which runs in a separate
    process; a trial that exceeds it is incomplete. Showing that the function terminates at all on
    random inputs may take this many seconds of each core."""
    training_mode: bool = False
    """Whether layers in training mode are accepted: batch normalization by batch statistics, or
    dropout. By default they are an error, usually a forgotten `model.eval()`."""

    def write(
        self,
        path: Path | str,
        *,
        exported_at: datetime | None = None,
        overwrite: bool = False,
        on_notice: Callable[[str], None] | None = None,
        steps: Steps | None = None,
    ) -> Path:
        """Export to the version directory `<model>/<version>` and return it.

        Runs the artifact on random inputs and compares it with `fn`. The directory is written
        atomically. `on_notice` is called with each restriction, such as a platform that is missing
        or the reason why requests are not batched; by default these are logged. `steps` is set by
        ExportableStream. Raises InvalidModel, or FileExistsError unless `overwrite`.
        """
        target = Path(path)
        _check_target(target, overwrite=overwrite)
        declared, nesting = flattened(self.inputs)
        shapes = shapes_of(declared)
        inputs = input_specs(declared)
        batch = max_batch_of(self.max_batch_size, inputs)
        is_open = inputs[0].shape[:1] == (-1,)
        if self.batch_independent is False and batch > MAX_BUCKETS:
            raise InvalidModel(
                f"max_batch_size: expected at most {MAX_BUCKETS} for rows that depend on one"
                f" another, got {batch}"
            )
        sizes = checked_sizes(shapes, self.compiled_shapes or {}, batched=is_open)
        fn = self.fn if self.training_mode else refused_in_training(self.fn)
        lowered = lower(
            fn if nesting is None else partial(_call_nested, fn, nesting),
            self.params,
            inputs,
            outputs=self.outputs,
            shapes=OpenShapes(is_open, shapes, sizes),
            platforms=self.platforms,
            x64=self.x64,
            trial_seconds=self.trial_seconds,
        )
        verdicts, unfinished = _tried(lowered, self.batch_independent)
        notice = _notice(batch, verdicts, self.batch_independent, unfinished)
        untried = f"the trial of its rows did not finish: {unfinished}" if unfinished else ""
        if notice and not _proved(verdicts):
            batch = 0
        stamp = (exported_at or datetime.now(UTC)).astimezone(UTC)
        with TemporaryDirectory.beside(target) as temporary:
            made = temporary.path / target.name
            made.mkdir()
            described = _write_files(made, lowered)
            manifest.write(
                made,
                replace(
                    described,
                    inputs=inputs,
                    max_batch_size=batch,
                    exported_at=f"{stamp:%Y-%m-%dT%H:%M:%SZ}",
                    batch_independent=self.batch_independent,
                    verdict=worst(verdicts) if verdicts else None,
                    compiled_shapes={k: tuple(v) for k, v in (self.compiled_shapes or {}).items()},
                    max_on_demand_shapes=self.max_on_demand_shapes,
                    steps=steps,
                ),
            )
            read_back.check(made)
            made.chmod(0o755)
            temporary.replace(made, target)
        unsized = _unsized(sizes, self.compiled_shapes, self.max_on_demand_shapes)
        lasts = not_lasting(lowered.computation.module)
        training = "" if self.training_mode else _training(lowered, inputs)
        for text in filter(None, (notice, untried, unsized, lasts, training, *_not_for(lowered))):
            (on_notice or partial(_log_notice, target))(text)
        return target


def export_model(
    fn: Callable[..., object],
    params: object,
    inputs: Inputs,
    path: Path | str,
    *,
    outputs: Sequence[str] | None = None,
    max_batch_size: int | None = None,
    platforms: Sequence[str] | None = None,
    x64: bool | None = None,
    batch_independent: bool | None = None,
    compiled_shapes: Mapping[str, Sequence[int]] | None = None,
    max_on_demand_shapes: int = 0,
    trial_seconds: float = SECONDS,
    training_mode: bool = False,
    exported_at: datetime | None = None,
    overwrite: bool = False,
) -> Path:
    """Export a function and its parameters to a version directory, and return its path.

        export_model(predict, params, {"image": ("FP32", [-1, 8, 8])}, "models/digits/1")

    `fn` is called as `fn(params, *inputs)`, plain or jitted, and returns a dict, a tuple or one
    array.

    `params` is any pytree, such as a trained model; its arrays are stored in the weights file.

    `inputs` has the name, datatype and shape of each input, in the order of the arguments. -1 is
    the batch; a name such as "s" is another dynamic dimension. The datatype may be a dtype. An
    array or a jax.ShapeDtypeStruct may replace datatype and shape.

    `path` is the version directory, REPOSITORY/MODEL/VERSION, such as models/digits/1.

    `outputs` has the names of the results of `fn`; None if it returns a dict.

    `max_batch_size` is the maximum number of rows per request. By default it is 64 if all inputs
    start with -1. 0 means any number of rows, never batched.

    `platforms` are the platforms to export for; None means "cpu", "cuda" and "tpu".

    `x64` enables 64-bit types in `fn`; None enables them if an input has one.

    `batch_independent` declares whether each row is computed independently of the others. None
    leaves that to a proof, True is for what cannot be proved, False for rows that interact.

    `compiled_shapes` has the sizes of dynamic dimensions to compile, by name: {"s": [32, 128]}.
    `max_on_demand_shapes` limits how many other sizes are compiled on demand.

    `trial_seconds` limits the CPU time for the trial of a function with loops.

    `training_mode` accepts layers in training mode, which are an error otherwise: batch
    normalization by batch statistics, or dropout (Flax without `model.eval()`).

    `exported_at` is the recorded time of the export, by default now. `overwrite` replaces an
    existing version.

    Raises InvalidModel, or FileExistsError if the version exists.
    """
    model = Exportable(
        fn,
        params,
        inputs,
        outputs=outputs,
        max_batch_size=max_batch_size,
        platforms=platforms,
        x64=x64,
        batch_independent=batch_independent,
        compiled_shapes=compiled_shapes,
        max_on_demand_shapes=max_on_demand_shapes,
        trial_seconds=trial_seconds,
        training_mode=training_mode,
    )
    return model.write(path, exported_at=exported_at, overwrite=overwrite)


@runtime_checkable
class Writable(Protocol):
    """Anything that can be exported: an Exportable or an ExportableStream."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def params(self) -> object:
        """Return the parameters, or their shapes."""
        ...

    @property
    def inputs(self) -> Inputs:
        """Return the inputs, as the author wrote them."""
        ...

    @property
    def outputs(self) -> Sequence[str] | None:
        """Return the names of the outputs, or None if the function returns a dict."""
        ...

    def write(
        self,
        path: Path | str,
        *,
        overwrite: bool = False,
        on_notice: Callable[[str], None] | None = None,
    ) -> Path:
        """Export to the version directory `<model>/<version>` and return it."""
        ...


def load_exportable(reference: str) -> Writable:
    """Import `path/to/file.py:attribute` or `package.module:attribute`, and return the model.

    The attribute is an Exportable, an ExportableStream, or a function that returns one. Raises
    InvalidModel.
    """
    try:
        found = load_reference(reference)
    except InvalidReference as error:
        raise InvalidModel(str(error)) from error
    made = (
        found if isinstance(found, Writable) or not callable(found) else _called(reference, found)
    )
    if not isinstance(made, Writable):
        raise InvalidModel(
            f"{reference} is a {type(made).__name__}, expected an xlaserve.authoring.export."
            "Exportable or a function that returns one"
        )
    return made


def _called(reference: str, function: Callable[..., object]) -> object:
    """Call a function without arguments; raises InvalidModel if it requires any."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        taken = ", ".join(inspect.signature(function).parameters)
        raise InvalidModel(
            f"{reference} takes {taken}: expected an Exportable, or a function without arguments "
            "that returns one; `xlaserve init` takes functions of arrays, with --input for each"
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    return function()


def with_parameters(model: Writable, source: str) -> Writable:
    """Return a model with its parameters read from a file (`parameter_files.filled`).

    Raises InvalidModel.
    """
    return replace(model, params=parameter_files.filled(model.params, source))


# --- row independence ---------------------------------------------------------------------


def _tried(lowered: Lowered, declared: bool | None) -> tuple[Mapping[str, Verdict], str]:
    """Return the verdicts by platform after trials, and why trials were incomplete, if they were.

    Trials run on this machine's platform. If its rows are proved independent, a short trial checks
    the proof, and a difference revokes the proof of every platform. Raises InvalidModel if rows are
    declared independent, but are not.
    """
    verdicts, outcome = lowered.verdicts, Outcome()
    if declared is False:
        return verdicts, ""
    here = verdicts.get(jax.export.default_export_platform())
    if here is not None and here.independence is Independence.PROVED:
        outcome = lowered.find_contradiction()
        verdicts = _after(verdicts, outcome, refuse=True)
    if any(one.independence is Independence.UNKNOWN for one in _believed(verdicts)):
        unfinished = outcome.unfinished
        outcome = lowered.find_difference()
        outcome = replace(outcome, unfinished=unfinished or outcome.unfinished)
        verdicts = _after(verdicts, outcome, refuse=False)
    _check_declared(verdicts, declared)
    return verdicts, outcome.unfinished


def _believed(verdicts: Mapping[str, Verdict]) -> list[Verdict]:
    return [one for one in verdicts.values() if not one.is_contradicted]


def _after(
    verdicts: Mapping[str, Verdict], outcome: Outcome, *, refuse: bool
) -> dict[str, Verdict]:
    """Return the verdicts after a trial; with `refuse`, a difference also revokes proofs."""
    difference = outcome.difference
    if difference is None:
        return dict(verdicts)
    # Platforms with equal verdicts share one object, so that a refused proof is logged once.
    found: dict[Verdict, Verdict] = {}
    for one in dict.fromkeys(verdicts.values()):
        found[one] = one
        if one.independence is Independence.UNKNOWN:
            shown = f"{one.reason}: {difference}"
            found[one] = replace(one, independence=Independence.MIXED, reason=shown)
        elif one.independence is Independence.PROVED and refuse:
            found[one] = refused_proof(one, difference)
    return {name: found[one] for name, one in verdicts.items()}


def _check_declared(verdicts: Mapping[str, Verdict], declared: bool | None) -> None:
    """Raise InvalidModel if rows are declared independent, but a proof or trial refutes it."""
    if not declared or not verdicts:
        return
    found = worst(verdicts)
    if found.independence is Independence.MIXED or any(
        one.is_contradicted for one in verdicts.values()
    ):
        raise InvalidModel(
            f"batch_independent: rows are declared independent, but they are not: {found}"
        )


def _proved(verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return the platforms on which rows are proved independent."""
    return [name for name, one in verdicts.items() if one.independence is Independence.PROVED]


def _notice(
    batch: int, verdicts: Mapping[str, Verdict], declared: bool | None, unfinished: str
) -> str:
    """Return why requests will not be batched, although the author asked for it."""
    proved = _proved(verdicts)
    if not batch or declared is not None or len(proved) == len(verdicts):
        return ""
    verdict = worst(verdicts)
    where = f"; max_batch_size is 0 instead of {batch}"
    if proved:
        where = f" on {', '.join(name for name in verdicts if name not in proved)}"
    way_out = f"; {verdict.advice}"
    if verdict.independence is Independence.UNKNOWN:
        seen = "did not end" if unfinished else "found no dependence"
        way_out += f"; a trial {seen}, batch_independent=True declares it"
        if verdict.is_contradicted:
            way_out = ""
    return f"rows are {verdict}; requests will not be batched{where}{way_out}"


def _unsized(
    names: Iterable[str], compiled: Mapping[str, Sequence[int]] | None, on_demand: int
) -> str:
    """Return a warning if a dynamic dimension has no sizes: servers will refuse the model."""
    open_names = [] if compiled or on_demand else sorted(names)
    if not open_names:
        return ""
    example = ", ".join(f'"{name}": [{TRIED_SIZE}]' for name in open_names)
    return (
        f"it loads only with sizes for {', '.join(open_names)}: export it with compiled_shapes="
        f"{{{example}}} or max_on_demand_shapes, or set one of these as a parameter of its "
        "configuration"
    )


def _training(lowered: Lowered, inputs: Sequence[TensorSpec]) -> str:
    takes_integers = any(spec.datatype.dtype.kind in "iu" for spec in inputs)
    return said_of_module(lowered.computation.module, takes_integers=takes_integers)


def _not_for(lowered: Lowered) -> list[str]:
    return [
        f"it will not run on {platform}, which has no kernel for '{primitive}'"
        for platform, primitive in lowered.not_for.items()
    ]


def _log_notice(target: Path, notice: str) -> None:
    structlog.get_logger("export").warning(
        "exported, with a restriction", path=str(target), reason=notice
    )


def _write_files(directory: Path, lowered: Lowered) -> Manifest:
    """Write all files except the manifest, and return a manifest with their records."""
    records = {
        ARTIFACT: files.write_atomically(directory / ARTIFACT, [lowered.data]),
        STABLEHLO: files.write_atomically(directory / STABLEHLO, [lowered.computation.module]),
        WEIGHTS: weights.write(directory / WEIGHTS, lowered.parameters),
    }
    return Manifest(
        inputs=(),
        outputs=lowered.outputs,
        max_batch_size=0,
        parameters=tuple(lowered.parameters),
        parameters_bytes=sum(array.nbytes for array in lowered.parameters.values()),
        files=records,
        platforms=lowered.computation.platforms,
        jax_version=jax.__version__,
        exported_at="",
        written_by=build.version(),
        durable=durable_of(lowered.computation),
    )


def _check_target(target: Path, *, overwrite: bool) -> None:
    version = target.name
    if not (version.isascii() and version.isdigit() and version[0] != "0"):
        raise InvalidModel(f"expected a path MODEL/VERSION with a version like 1, got '{target}'")
    if target.exists() and not overwrite:
        raise FileExistsError(
            f"{target} already exists: choose another version number, or replace it with"
            " overwrite=True"
        )


def _call_nested(
    fn: Callable[..., object], nesting: Nesting, params: object, *leaves: object
) -> object:
    return fn(params, *nesting.arguments(leaves))
