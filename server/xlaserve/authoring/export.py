"""Writes a JAX function and its parameters as a version directory that the server loads.

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


@dataclass(frozen=True, slots=True)
class Exportable:
    """A model that is ready to be exported, as `xlaserve export FILE.py:NAME` looks for it.

    `fn`, `params`, `inputs`, `outputs`, `max_batch_size`, `platforms`, `x64`, `batch_independent`,
    `compiled_shapes`, `max_on_demand_shapes`, `trial_seconds` and `training_mode` are as
    `export_model` says.
    """

    fn: Callable[..., object]
    """The function to export, called as `fn(params, *inputs)`: plain or jitted; returns a dict, a
    tuple or one array.
    """
    params: object
    """Any pytree. Its arrays are stored beside the artifact, its other leaves are constants. Where
    `xlaserve export --params` has the arrays, they may be `jax.ShapeDtypeStruct` here."""
    inputs: Inputs
    """Name, datatype and shape of each input, in the order of the arguments. -1 is the batch, a
    name such as "s" another dimension that stays open: the same name, the same size."""
    outputs: Sequence[str] | None = None
    """Names of the results of `fn`; None if it returns a dict."""
    max_batch_size: int | None = None
    """The most rows per request. Requests are batched where a proof shows that batching changes no
    answer; each server proves it for its platform. None means 64 where every input starts with -1;
    0 means any number of rows, never batched; use it for fixed shapes, too.
    """
    platforms: Sequence[str] | None = None
    """Platforms of the artifact. They must include the one that exports it. None for the CPU, CUDA
    and TPUs, but for those that have no kernel for a part of it."""
    x64: bool | None = None
    """Whether 64-bit types exist while `fn` is traced. None for yes where an input or a parameter
    has one, or JAX is configured so; otherwise `fn` computes what it does under plain JAX."""
    batch_independent: bool | None = None
    """Whether each row of a batch is computed from itself alone. None for what is proved: where
    nothing is on any platform, the model is exported with max_batch_size 0. True is for what cannot
    be proved; it is tried, and refused where the contrary is proved or seen. With False nothing is
    padded or put together, and every batch size is compiled, 64 at most."""
    compiled_shapes: Mapping[str, Sequence[int]] | None = None
    """The sizes of open dimensions to compile, by name: `{"s": [32, 128]}`."""
    max_on_demand_shapes: int = 0
    """For how many other sizes programs are kept that requests ask for. Its configuration and the
    server have a say in all three."""
    trial_seconds: float = SECONDS
    """Limit of processor time, in seconds, for the trial of a function with loops, which runs in a
    separate process; a trial that exceeds it is incomplete. To show that the function ends at all
    on made-up inputs, it may take as many seconds of each core.
    """
    training_mode: bool = False
    """Whether layers may be in training mode: batch normalisation by the statistics of the batch,
    or dropout. Such a model is refused otherwise: mostly its author forgot `model.eval()`."""

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

        The artifact was run on random inputs by then, and gave what `fn` gives. The directory is
        there with all its files or not at all. `on_notice` is told why requests will not be put
        together, and what it will not run on, where that is so; else the log is. `steps` is for
        what ExportableStream makes of a stepped function. Raises InvalidModel, or FileExistsError
        unless `overwrite`.
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
                f"max_batch_size: expected {MAX_BUCKETS} at most where rows depend on one another, "
                f"got {batch}"
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
        untried = f"its rows were not tried to the end: {unfinished}" if unfinished else ""
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
        for told in filter(None, (notice, untried, unsized, lasts, *_not_for(lowered))):
            (on_notice or partial(_log_notice, target))(told)
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
    """Export a function and its parameters to a version directory, and return that.

        export_model(predict, params, {"image": ("FP32", [-1, 8, 8])}, "models/digits/1")

    `fn` is called as `fn(params, *inputs)`, plain or jitted, and returns a dict, a tuple or one
    array.
    `params` is any pytree, as of a trained model: its arrays are stored beside the artifact.
    `inputs` has name, datatype and shape of each input, in the order of the arguments. -1 is the
    batch, a name such as "s" another dimension that stays open. The datatype may be a dtype, and an
    array or a jax.ShapeDtypeStruct stands for both.
    `path` is the directory of a version: REPOSITORY/MODEL/VERSION, as models/digits/1.
    `outputs` has the names of what `fn` returns; None where it returns a dict, which has them.
    `max_batch_size` is the most rows of one request: 64 unless given, where inputs start with -1;
    0 for any number, and for requests that are never put together.
    `platforms` are those that it is to run on; None for "cpu", "cuda" and "tpu".
    `x64` says whether 64-bit types exist in `fn`; None for yes where an input has one.
    `batch_independent` says whether each row of a batch is computed from itself alone; None for
    what is proved, True for what cannot be, False for a model whose rows depend on one another.
    `compiled_shapes` are the sizes of open dimensions to compile, by name: {"s": [32, 128]}, and
    `max_on_demand_shapes` is for how many others programs are kept that requests ask for.
    `trial_seconds` is what a trial of a function with loops may take of the processor.
    `training_mode` takes a model with layers in training mode, which is refused otherwise: batch
    normalisation by the statistics of the batch, or dropout (Flax without `model.eval()`).
    `exported_at` is the time that the artifact names; now unless given.
    `overwrite` replaces a version that is there.

    Raises InvalidModel, or FileExistsError for a version that is there.
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
        """Return the names of the outputs, None where the function gives them."""
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
    """Find `path/to/file.py:attribute` or `package.module:attribute` by running its code.

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
    """Return the result of a function without arguments; raises InvalidModel for others."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        taken = ", ".join(inspect.signature(function).parameters)
        raise InvalidModel(
            f"{reference} takes {taken}: expected an Exportable, or a function without arguments "
            "that returns one; `xlaserve init` takes functions of arrays, with --input for each"
        ) from None
    except ValueError:  # of a builtin, which has no signature
        pass
    return function()


def with_parameters(model: Writable, source: str) -> Writable:
    """Return a model with parameters out of a file, as parameter_files.filled finds them.

    Raises InvalidModel.
    """
    return replace(model, params=parameter_files.filled(model.params, source))


# --- facts about its rows -----------------------------------------------------------------


def _tried(lowered: Lowered, declared: bool | None) -> tuple[Mapping[str, Verdict], str]:
    """Return the verdicts by platform after trials, and why trials were incomplete.

    They are made on the platform that is here. What is proved of it gets a brief one, and the proof
    of no platform is believed that it contradicts. Raises InvalidModel where rows are declared
    independent, and are not.
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
    """Return the verdict after a trial; with `refuse`, one without proof."""
    difference = outcome.difference
    if difference is None:
        return dict(verdicts)
    # Platforms whose computation is the same have one verdict, of which the log is told once.
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
    """Raise InvalidModel if a trial refutes declared independence."""
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
    """Return the platforms with proved rows."""
    return [name for name, one in verdicts.items() if one.independence is Independence.PROVED]


def _notice(
    batch: int, verdicts: Mapping[str, Verdict], declared: bool | None, unfinished: str
) -> str:
    """Explain why requests are not batched although the author asked for it."""
    proved = _proved(verdicts)
    if not batch or declared is not None or len(proved) == len(verdicts):
        return ""
    verdict = worst(verdicts)
    where = f", max_batch_size is 0 instead of {batch}"
    if proved:
        where = f" on {', '.join(name for name in verdicts if name not in proved)}"
    way_out = f"; {verdict.advice}"
    if verdict.independence is Independence.UNKNOWN:
        seen = "did not end" if unfinished else "found nothing against it"
        way_out += f"; a trial {seen}, batch_independent=True declares it"
        if verdict.is_contradicted:
            way_out = ""
    return f"rows are {verdict}; no request will be put together with another{where}{way_out}"


def _unsized(
    names: Iterable[str], compiled: Mapping[str, Sequence[int]] | None, on_demand: int
) -> str:
    """Warn of an open dimension without sizes, which no server loads."""
    open_names = [] if compiled or on_demand else sorted(names)
    if not open_names:
        return ""
    example = ", ".join(f'"{name}": [{TRIED_SIZE}]' for name in open_names)
    return (
        f"it loads with sizes for {', '.join(open_names)} only: export it with compiled_shapes="
        f"{{{example}}} or with max_on_demand_shapes, or give one of them as a parameter of its "
        "configuration"
    )


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
    """Write all files but the manifest, and return their records."""
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
            f"{target} exists already, another number is a version beside it, overwrite=True "
            "replaces it"
        )


def _call_nested(
    fn: Callable[..., object], nesting: Nesting, params: object, *leaves: object
) -> object:
    return fn(params, *nesting.arguments(leaves))
